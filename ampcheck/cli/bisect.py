"""`ampcheck bisect`: the first commit, or the first release of a package, in which a verdict changed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ampcheck.cli.interrupts import ending_of
from ampcheck.cli.output import USAGE, Commands, add_output, finish, print_report
from ampcheck.cli.speed import add_speed_options, speed_options
from ampcheck.cli.targets import add_audit_options, with_options
from ampcheck.core.arguments import parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.core.settings import Target, load_settings
from ampcheck.core.subject import TARGET_FORMS
from ampcheck.report import progress_bar

if TYPE_CHECKING:
    from ampcheck.tools.bisect.versions import Versions

_SPEED = ("mode", "budget", "effect")


def add_command(commands: Commands) -> None:
    """Add `bisect` to the parser's commands."""
    bisect = commands.add_parser(
        "bisect",
        help="which commit, or which release of a package, changed the verdict?",
        description="Judge a target in the versions of a range, each in a process of its own, and search by halves for "
        "the first in which a verdict changed: commits in temporary worktrees, releases in environments over the "
        "packages of this one, which are kept and shared. Results are kept: a search that is interrupted goes on where "
        "it ended. Exit code 0: the verdicts at both ends are the same; 1: a version that changed one is named; 2: "
        "usage error, or a change that cannot be narrowed down to a version, or no change named and a verdict at one "
        "end alone; 130: interrupted; 143: stopped by SIGTERM.",
    )
    bisect.add_argument("target", metavar="TARGET", help=TARGET_FORMS)
    over = bisect.add_mutually_exclusive_group(required=True)
    over.add_argument("--commits", metavar="A..B", help="from a commit to a later one, which is HEAD if left out")
    over.add_argument(
        "--torch",
        metavar="A..B",
        help="from a release of PyTorch to a later one, such as 2.6..2.13; the newest if left out",
    )
    over.add_argument(
        "--package", metavar="NAME==A..B", help="the same for releases of any package, such as transformers==4.50..4.57"
    )
    what = bisect.add_mutually_exclusive_group()
    what.add_argument(
        "--check", default="", metavar="CHECK", help="search for this verdict (default: each that changed)"
    )
    what.add_argument(
        "--speed", action="store_true", help="search for the first that is slower than the first of the range"
    )
    add_speed_options(bisect, _SPEED)
    bisect.add_argument(
        "--out", default="ampcheck-bisect", metavar="FOLDER", help="where results are kept (default: %(default)s)"
    )
    bisect.add_argument(
        "--time", type=float, default=900.0, metavar="S", help="seconds that one audit may take (default: %(default)g)"
    )
    bisect.add_argument("--prune", action="store_true", help="remove the environment of each release after its verdict")
    add_audit_options(bisect)
    add_output(bisect, kind="bisect")
    bisect.set_defaults(command=_bisect)


def _bisect(options: argparse.Namespace) -> int:
    parse_number(options.time, "--time")
    for name in _SPEED:
        if getattr(options, name) is not None and not options.speed:
            raise UsageError(f"--{name} is of a measurement of speed: add --speed, or leave it out")
    speed = speed_options(options, _SPEED) if options.speed else None

    from ampcheck.tools.bisect.history import History
    from ampcheck.tools.bisect.judge import judge_history
    from ampcheck.tools.sweep.results import Allowance, ResultFolder

    known = {target.target: target for target in load_settings().targets}
    target = with_options(known.get(options.target, Target(options.target)), options)
    history = History(_versions(target, options), ResultFolder(Path(options.out)), Allowance(options.time), speed)
    if estimate := history.versions.estimate(history.looks):
        print(f"ampcheck: {estimate}", file=sys.stderr, flush=True)
    try:
        with progress_bar(aloud=True) as progress:
            run = judge_history(history, options.check, progress)
    except KeyboardInterrupt as error:
        stopped, status = ending_of(error)
        judged = f"{len(history.results):,} judged {history.versions.noun}s"
        print(f"{stopped}: {judged} are kept in {options.out}", flush=True)
        return status
    finally:
        history.versions.close()
    changed = any(finding.check != "coverage" for finding in run.findings)
    incomplete = bool(run.of(Verdict.INCOMPLETE))
    # A change often takes the verdicts of other checks with it, as values that overflow have no error: it counts.
    undecided = bool(run.of(Verdict.UNDECIDED)) or (incomplete and not changed)
    code = finish(run, options, lambda: print_report(run, run.tables, verbose=True), failed=changed or incomplete)
    return USAGE if undecided and code == 1 else code


def _versions(target: Target, options: argparse.Namespace) -> Versions:
    if options.commits is not None:
        if options.prune:
            raise UsageError("--prune is about environments of releases; a worktree of --commits is always removed")
        from ampcheck.tools.bisect.commits import Commits

        return Commits.of(target, options.commits)
    from ampcheck.tools.bisect.releases import Releases

    if options.torch is not None:
        return Releases.of(target, "torch", options.torch, "--torch", prune=options.prune)
    name, equals, span = options.package.partition("==")
    if not equals or not name.strip():
        raise UsageError(
            f"--package takes a name and a range, such as transformers==4.50..4.57; found {options.package!r}"
        )
    return Releases.of(target, name.strip(), span, "--package", prune=options.prune)
