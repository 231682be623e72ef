"""The values of a loop: what the shadow of its steps saw of their ops, beside what is judged of the steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ampcheck.core.plan import Plan
from ampcheck.core.run import SEVERITY, Finding, Run, Verdict, merge
from ampcheck.numerics.checks import OBSERVABLE, observable
from ampcheck.numerics.observe import block_run
from ampcheck.records.numerics import NumericsStats

VALUES = tuple(slug for slug in OBSERVABLE if slug != "coverage")
"""The checks of the values of steps."""

_BAD = (Verdict.FAIL, Verdict.WARN)


def together(values: list[Finding], steps: list[Finding]) -> list[Finding]:
    """The findings about the values of a block and about its steps, those of one cause once.

    Where both judge a check, what is worse stays; of equal verdicts the values', which name the op.
    """
    named = {f.check for f in values if f.verdict in _BAD}
    named = {check for check in named if _worst(values, check) <= _worst(steps, check)} - {"coverage"}
    kept = [f for f in steps if f.check not in named]
    ahead = {f.check for f in kept if f.verdict in _BAD} - {"coverage"}
    failed = {(f.check, f.where.file, f.where.line) for f in kept if f.verdict is Verdict.FAIL and f.where.file}
    values = [f for f in values if f.verdict is Verdict.FAIL or (f.check, f.where.file, f.where.line) not in failed]
    return [*(f for f in values if f.check not in ahead or f.verdict in _BAD), *kept]


def with_measured(followed: list[Finding], measured: Iterable[Finding]) -> list[Finding]:
    """The findings about a loop whose ops were followed and whose steps were measured: of each check those of what
    judges it worse, and of equal verdicts of what was followed."""
    judged, measured = [f for f in followed if f.verdict is not Verdict.SKIP], list(measured)
    worse = {f.check for f in measured if _worst(measured, f.check) < _worst(judged, f.check)}
    return [*(f for f in followed if f.check not in worse), *(f for f in measured if f.check in worse)]


def _worst(findings: Iterable[Finding], check: str) -> int:
    return min((SEVERITY.index(f.verdict) for f in findings if f.check == check), default=len(SEVERITY))


def with_values(steps: Run, stats: NumericsStats | None, plan: Plan, *, finished: bool) -> Run:
    """The run of a loop with the findings about the values of its steps.

    stats: None where these were not followed. finished: whether a step came to its end; else no check passes.
    """
    wanted = [slug for slug in observable() if slug != "coverage" and plan.judges(slug)]
    if stats is None or not wanted:
        return steps
    values = block_run(stats, plan.limits, wanted)
    found = [finding for finding in values.findings if finding.check in wanted]
    judged = {finding.check for finding in steps.findings}
    found = [f for f in found if f.verdict is not Verdict.PASS or (f.check not in judged and finished)]
    both = merge([steps, replace(values, findings=())])
    return replace(both, findings=tuple(together(found, list(steps.findings))), title=steps.title)
