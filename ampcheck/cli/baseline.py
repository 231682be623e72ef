"""`ampcheck baseline`: accept today's findings for a time."""

from __future__ import annotations

import argparse
import subprocess
from datetime import date, timedelta

from ampcheck.cli.output import Commands
from ampcheck.cli.report import load_run
from ampcheck.cli.targets import add_targets, audits, settings_of, targets_of
from ampcheck.core.errors import UsageError
from ampcheck.core.files import only_writer
from ampcheck.core.run import merge
from ampcheck.core.text import counted
from ampcheck.outcome.accept import accept
from ampcheck.outcome.baseline import Baseline

_REASON = "found when the baseline was written"
PATIENCE = 60.0
"""Seconds to wait for another process that writes the baseline."""

_OF_SOURCE = frozenset(("lint", "known"))
"""Families of reports on source, which stay accepted where their lines say so."""

_DAYS = 180
"""Days for which findings are accepted by default."""


def add_command(commands: Commands) -> None:
    """Add `baseline` to the parser's commands."""
    summary = "accept today's failures and warnings, so that only new ones fail"
    baseline = commands.add_parser(
        "baseline",
        help=summary,
        description=f"{summary.capitalize()}. Writes ampcheck.baseline.json beside pyproject.toml, without what is no "
        "longer found; entries that it has keep their reason, author and date. Exit code 0: it is written; 2: usage "
        "error.",
    )
    add_targets(baseline)
    baseline.add_argument(
        "--from",
        dest="runs",
        action="append",
        metavar="RUN.json",
        help="accept the findings of a run that --json or `pytest --ampcheck-json` wrote, instead of an audit",
    )
    baseline.add_argument(
        "--prune", action="store_true", help="only remove entries that are no longer found; accept nothing new"
    )
    baseline.add_argument("--reason", help=f"why they are accepted (default: {_REASON})")
    baseline.add_argument("--author", help="who accepts them (default: git's user.name)")
    baseline.add_argument(
        "--expires",
        metavar="DATE",
        help=f"the last day on which new entries are accepted, as 2027-05-31, or never (default: in {_DAYS} days)",
    )
    baseline.set_defaults(command=_baseline, fail_on=None, select=None, ignore=None, no_baseline=False)


def _baseline(options: argparse.Namespace) -> int:
    expires = _expiry(options.expires)
    if options.prune and (given := [name for name in ("reason", "author", "expires") if getattr(options, name)]):
        raise UsageError(f"--{given[0]} has no effect with --prune, which accepts nothing new: leave one of them out")
    settings = settings_of(options)

    if options.runs:
        if options.targets:
            raise UsageError("--from takes the findings of a run; leave out the targets, or --from")
        runs = [accept(load_run(path, settings, options)[0], settings, reads=False) for path in options.runs]
    else:
        targets = targets_of(options, settings)
        if not targets:
            raise UsageError("name targets to audit, on the command line or in [tool.ampcheck] of pyproject.toml")
        runs = [audited.run for audited in audits(targets, settings, options)]
    path = settings.folder / settings.baseline
    findings = merge(runs).findings
    if of_source := {finding.family for finding in findings} & _OF_SOURCE:
        raise UsageError(
            f"{of_source.pop()} reads no baseline: accept what it reports on the line, "
            "by `# ampcheck: ignore[CODE] REASON`"
        )
    with only_writer(path, PATIENCE):
        before = Baseline.load(path)
        if options.prune:
            after = before.pruned(findings)
        else:
            after = before.updated(findings, options.reason or _REASON, options.author or _git_user(), expires)
        if not options.prune or after != before:
            after.save(path)
    was, now = ({entry.place for entry in baseline.findings} for baseline in (before, after))
    print(f"{path.name}: {counted(len(now), 'places')} accepted, {len(now - was):,} new, {len(was - now):,} removed")
    if lacking := [finding for finding in findings if finding.unjudged]:
        first = f"such as {lacking[0].subject}, {lacking[0].message}"
        raise UsageError(
            f"{counted(len(lacking), 'targets')} could not be judged, {first}; what is accepted of them stays"
        )
    return 0


def _expiry(text: str | None) -> str:
    if text is None:
        return (date.today() + timedelta(days=_DAYS)).isoformat()
    if text == "never":
        return ""
    try:
        last = date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--expires must be a date such as 2027-05-31, or never; found {text!r}") from None
    if last < date.today():
        raise UsageError(f"--expires must be today or later, else nothing is accepted; found {text}, which is past")
    return last.isoformat()


def _git_user() -> str:
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
