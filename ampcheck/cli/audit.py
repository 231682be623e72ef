"""`ampcheck audit`: judge models and training loops."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial

from ampcheck.cli.following import Interrupted, second_interrupt_ends
from ampcheck.cli.interrupts import ending_of
from ampcheck.cli.output import EXIT_CODES, USAGE, Commands, add_output, finish, print_report
from ampcheck.cli.profile import Profile
from ampcheck.cli.targets import add_selection, add_targets, audits, settings_of, targets_of, with_selection
from ampcheck.core.run import Run, merge
from ampcheck.outcome.accept import selected_groups
from ampcheck.report.sections import headline


def add_command(commands: Commands) -> None:
    """Add `audit` to the parser's commands."""
    summary = "judge models in low precision, eager and compiled, forward and backward; or training loops"
    audit = commands.add_parser("audit", help=summary, description=f"{summary.capitalize()}. {EXIT_CODES}")
    add_targets(audit)
    add_selection(audit)
    add_output(audit)
    audit.add_argument("-q", "--quiet", action="store_true", help="print what failed, and nothing else")
    audit.add_argument("--profile", action="store_true", help="print where the time and memory of the audit went")
    audit.set_defaults(command=_audit)


def _audit(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    targets = targets_of(options, settings)
    if not targets:
        text = "no target is named, here or in pyproject.toml: this is the built-in demo, and none of your code"
        print(f"ampcheck: {text}", file=sys.stderr, flush=True)

    runs, failed, printed, stopped = list[Run](), False, 0, 0
    profile = Profile() if options.profile else None
    with second_interrupt_ends():
        try:
            for audited in audits(targets, settings, options, early=not options.quiet, profile=profile):
                runs.append(audited.run)
                failed |= audited.failed
                printed = audited.printed
                if len(targets) > 1:
                    print_report(audited.run, verbose=options.verbose, quiet=options.quiet, printed=printed)
                    print(flush=True)
        except Interrupted as error:
            how, stopped = ending_of(error)
            print(f"ampcheck: {how}; the report says what was judged until then", file=sys.stderr, flush=True)
            runs.append(error.run)
            printed = error.printed
        finally:
            if profile is not None:
                profile.end()
        if profile is not None:
            print(*profile.lines(), sep="\n", end="\n\n", flush=True)
        if not runs:  # rank 0 reports the findings of all ranks
            return 0
        groups = () if stopped else selected_groups(settings, each=bool(options.select))
        runs[-1], lacking = with_selection(runs, groups, options)
        merged = replace(merge(runs), title=f"audit of {len(runs)} targets") if len(targets) > 1 else runs[0]
        if stopped or len(targets) < 2:
            show = partial(print_report, runs[-1], verbose=options.verbose, quiet=options.quiet, printed=printed)
            show = partial(show, json=options.json if merged is runs[-1] else None)
        else:
            show = partial(print, f"{merged.title}: {headline(merged)}")
        code = finish(merged, options, show, failed=failed)
    return stopped or code or (USAGE if lacking or any(f.unjudged for f in merged.findings) else 0)
