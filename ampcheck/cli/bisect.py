"""`ampcheck bisect`: the first commit in which a verdict changed."""

from __future__ import annotations

import argparse
from pathlib import Path

from ampcheck.cli.output import (
    INTERRUPTED,
    USAGE,
    Commands,
    add_output,
    finish,
    outputs_of,
    print_report,
    require_writable,
)
from ampcheck.cli.targets import add_audit_options, with_options
from ampcheck.core.arguments import parse_number
from ampcheck.core.settings import Target, load_settings


def add_command(commands: Commands) -> None:
    """Add `bisect` to the parser's commands."""
    bisect = commands.add_parser(
        "bisect",
        help="which commit changed the verdict?",
        description="Audit a target as the commits of a range have it, each in a temporary worktree, and search by "
        "halves for the first in which a verdict changed. Results are kept: a search that is interrupted goes on where "
        "it ended. Exit code 0: the verdicts at both ends are the same; 1: a commit that changed "
        "one is named; 2: usage error, or a change that cannot be narrowed down to a commit, or no change named and a "
        "verdict at one end alone; 130: interrupted.",
    )
    bisect.add_argument("target", metavar="TARGET", help="package.module:factory or path/to/file.py:factory")
    bisect.add_argument(
        "--commits", required=True, metavar="A..B", help="from a commit to a later one, which is HEAD if left out"
    )
    bisect.add_argument(
        "--check", default="", metavar="CHECK", help="search for this verdict (default: each that changed)"
    )
    bisect.add_argument(
        "--out", default="ampcheck-bisect", metavar="FOLDER", help="where results are kept (default: %(default)s)"
    )
    bisect.add_argument(
        "--time", type=float, default=900.0, metavar="S", help="seconds that one commit may take (default: %(default)g)"
    )
    add_audit_options(bisect)
    add_output(bisect, kind="bisect")
    bisect.set_defaults(command=_bisect)


def _bisect(options: argparse.Namespace) -> int:
    parse_number(options.time, "--time")
    require_writable(**outputs_of(options))

    from ampcheck.bisect.history import History
    from ampcheck.bisect.judge import judge_history
    from ampcheck.core.run import Verdict
    from ampcheck.report import progress_bar
    from ampcheck.sweep.results import Limits, ResultFolder

    known = {target.target: target for target in load_settings().targets}
    target = with_options(known.get(options.target, Target(options.target)), options)
    history = History.of(target, options.commits, ResultFolder(Path(options.out)), Limits(options.time))
    try:
        with progress_bar() as progress:
            run = judge_history(history, options.check, progress)
    except KeyboardInterrupt:
        print(f"interrupted: {len(history.results):,} audited commits are kept in {options.out}", flush=True)
        return INTERRUPTED
    changed = any(finding.check != "coverage" for finding in run.findings)
    incomplete = bool(run.of(Verdict.INCOMPLETE))
    # A change often takes the verdicts of other checks with it, as values that overflow have no error: it counts.
    undecided = bool(run.of(Verdict.UNDECIDED)) or (incomplete and not changed)
    code = finish(run, options, lambda: print_report(run, run.tables, verbose=True), failed=changed or incomplete)
    return USAGE if undecided and code == 1 else code
