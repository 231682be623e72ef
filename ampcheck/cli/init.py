"""`ampcheck init`: write tests, targets, the policy lock and a workflow for a repository."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ampcheck.cli.output import Commands, Stdout
from ampcheck.core.errors import UsageError
from ampcheck.core.heartbeat import Heartbeat
from ampcheck.core.text import clean
from ampcheck.report.progress import say

if TYPE_CHECKING:
    from ampcheck.tools.init.plan import Draft


def add_command(commands: Commands) -> None:
    """Add `init` to the parser's commands."""
    init = commands.add_parser(
        "init",
        help="write tests, targets, the policy lock and a GitHub workflow for a repository",
        description="Read a repository, try its models in a copy of it, and write tests/test_amp.py, [tool.ampcheck] "
        "in pyproject.toml, tests/ampcheck.lock.json and .github/workflows/ampcheck.yml. A file that exists is not "
        "changed. Exit code 0: done, or nothing to do; 2: usage error, or not confirmed; nothing is written then.",
    )
    init.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="the repository (default: here)")
    init.add_argument("--yes", action="store_true", help="write without asking")
    init.set_defaults(command=_init)


def _init(options: argparse.Namespace) -> int:
    from ampcheck.tools.init.files import write
    from ampcheck.tools.init.plan import make_draft

    if not options.yes and not sys.stdin.isatty():
        raise UsageError("ampcheck init asks before it writes, and stdin is no terminal: pass --yes")
    with Heartbeat(say) as heartbeat:
        draft = make_draft(Path(options.folder), partial(heartbeat.step, aloud=True))
    out = Stdout()
    with out:
        print("\n".join(map(clean, _described(draft, "would write" if not options.yes else "writes"))))
    if not draft.files:
        print("nothing to write")
        return out.code()
    if not options.yes and not _confirmed():
        raise UsageError("not confirmed; nothing was written")
    write(draft.files)
    with out:
        print("\n".join(map(clean, _next(draft))))
    return out.code()


def _confirmed() -> bool:
    try:
        return input("write these files? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _described(draft: Draft, verb: str) -> list[str]:
    lines = [f"{draft.folder}", *(f"  {line}" for line in draft.seen)]
    for planned in draft.files:
        lines += [f"{verb} {_relative(planned.path, draft)}", f"  {planned.what}"]
    lines += [f"leaves {_relative(path, draft)}: {reason}" for path, reason in draft.left]
    return lines + [f"note: {note}" for note in draft.notes]


def _next(draft: Draft) -> list[str]:
    lines = [f"wrote {len(draft.files)} files"]
    if draft.unfinished:
        lines.append("next: fill in the arguments in tests/test_amp.py, at the line FILL IN")
    lines.append("next: python -m pytest tests/test_amp.py --ampcheck")
    lines.append("then: ampcheck audit judges the targets compiled too; ampcheck baseline accepts what is known")
    return lines


def _relative(path: Path, draft: Draft) -> str:
    return str(path.relative_to(draft.folder)) if path.is_relative_to(draft.folder) else str(path)
