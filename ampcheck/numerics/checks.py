"""Every check of one low-precision run."""

from __future__ import annotations

from collections.abc import Collection

from ampcheck.checks import added, needing
from ampcheck.checks import findings as findings_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import PROBLEMS, Finding
from ampcheck.core.subject import MODELS, Kind
from ampcheck.records.numerics import NumericsStats

CHECKS = needing(NumericsStats.__name__)
"""In the order in which a reader wants them: what stops the run, what ruins it, what blurs it."""

OBSERVABLE = (
    "nonfinite-reference", "overflow", "silent-zero", "flush", "integer-cast", "precision-loss", "headroom", "coverage"
)  # fmt: skip
"""The checks of a watched block, whose results are not known."""


def observable() -> tuple[str, ...]:
    """These, and those of other packages that judge the values of loops and blocks."""
    return (*OBSERVABLE, *added(Kind.TRAINING, Kind.CALL))


def check_numerics(stats: NumericsStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks (all by default); whether it ran and what was seen are always among them."""
    known = (*CHECKS, *added(*(MODELS if stats.judged else (Kind.TRAINING, Kind.CALL))))
    wanted = known if checks is None else [s for s in known if s in {*checks, "low-precision-error", "coverage"}]
    return _in_order_of_run(stats, findings_of(stats, limits, wanted))


def _in_order_of_run(stats: NumericsStats, findings: list[Finding]) -> list[Finding]:
    """The findings; those of faults come first, as the run met them: a value that vanished before what follows."""
    met = {fault.where: number for number, fault in reversed(list(enumerate(stats.faults)))}
    return sorted(
        findings, key=lambda finding: met.get(finding.where, len(met)) if finding.verdict in PROBLEMS else len(met)
    )
