"""`ampcheck history`: the measurements so far, the steps in them, and the commits and versions that changed there."""

from __future__ import annotations

import argparse
from importlib.metadata import version

from ampcheck.cli.output import Commands, Stdout, add_output, finish, print_report
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.report.text import clean


def add_command(commands: Commands) -> None:
    """Add `history` to the parser's commands."""
    history = commands.add_parser(
        "history",
        help="report since when a benchmark is slower, and what changed there",
        description="Read the history of speed in a folder, find its steps and report the commits and versions between "
        "which they are. A step down is a warning, since this build cannot fix an earlier regression; with --fail it "
        "is a failure. Exit code 0: it was read; 1: with --fail, a step down among the last points; 2: usage error.",
    )
    history.add_argument("folder", metavar="DIR", help="the folder of pytest --ampcheck-history=DIR")
    history.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="add pytest-benchmark's JSON to the history first: a file, or a folder such as .benchmarks; "
        "may be given several times; known measurements are not added again",
    )
    history.add_argument(
        "--effect", type=float, default=2.0, metavar="PERCENT", help="the smallest step that is reported (default: 2)"
    )
    history.add_argument("--fail", action="store_true", help="a step down fails, such as for a nightly job")
    add_output(history, kind="history")
    history.set_defaults(command=_history)


def _history(options: argparse.Namespace) -> int:
    if not 0 <= options.effect < 100:
        raise UsageError(f"--effect is per cent, at least 0 and below 100; found {options.effect:g}")

    from ampcheck.speed.history.storage import import_benchmarks, load
    from ampcheck.speed.trend.judge import trend_run

    out = Stdout()
    if options.imports:
        done = import_benchmarks(options.folder, options.imports)
        lines = [f"imported: {done.added:,} new, {done.known:,} known already"]
        lines += [f"not imported: {note}" for note in done.notes]
        with out:
            for line in lines:
                print(clean(line))
    run = trend_run(
        load(options.folder),
        effect=options.effect / 100,
        verdict=Verdict.FAIL if options.fail else Verdict.WARN,
        title=f"history {options.folder}",
        environment={"ampcheck": version("ampcheck")},
    )
    return finish(run, options, lambda: print_report(run, run.tables, verbose=options.verbose), out=out)
