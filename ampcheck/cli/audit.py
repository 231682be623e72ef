"""`ampcheck audit`: judge models and training loops."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from ampcheck.cli.output import EXIT_CODES, Commands, add_output, finish, outputs_of, print_report, require_writable
from ampcheck.cli.targets import add_selection, add_targets, audits, settings_of, targets_of


def add_command(commands: Commands) -> None:
    """Add `audit` to the parser's commands."""
    summary = "judge models in low precision, eager and compiled, forward and backward; or training loops"
    audit = commands.add_parser("audit", help=summary, description=f"{summary.capitalize()}. {EXIT_CODES}")
    add_targets(audit)
    audit.add_argument("--fast", action="store_true", help="eager alone: the same as --no-compile")
    add_selection(audit)
    add_output(audit)
    audit.add_argument("-q", "--quiet", action="store_true", help="print what failed, and nothing else")
    audit.set_defaults(command=_audit)


def _audit(options: argparse.Namespace) -> int:
    options.no_compile |= options.fast
    settings = settings_of(options)
    targets = targets_of(options, settings)
    require_writable(**outputs_of(options))

    from ampcheck.core.run import Run, merge
    from ampcheck.report.sections import headline

    runs, failed = list[Run](), False
    for run, fails in audits(targets, settings, options):
        runs.append(run)
        failed |= fails
        if len(targets) > 1:
            print_report(run, verbose=options.verbose, quiet=options.quiet)
            print(flush=True)
    if not runs:  # rank 0 reports the findings of all ranks
        return 0
    if len(targets) < 2:
        show = partial(print_report, runs[0], verbose=options.verbose, quiet=options.quiet)
        return finish(runs[0], options, show, failed=failed)
    merged = replace(merge(runs), title=f"audit of {len(runs)} targets")
    return finish(merged, options, lambda: print(f"{merged.title}: {headline(merged)}"), failed=failed)
