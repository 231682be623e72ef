"""Every check of one low-precision run, by its slug."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from ampcheck.checks import REGISTRY, added
from ampcheck.checks import findings as checks_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import PROBLEMS, Finding
from ampcheck.core.subject import MODELS, Kind
from ampcheck.numerics import execution, nonfinite, precision, range
from ampcheck.numerics.findings import who
from ampcheck.numerics.stats import NumericsStats

Check = Callable[[NumericsStats, Limits], list[Finding]]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "low-precision-error": execution.check_low_precision_error,
        "nonfinite-reference": nonfinite.check_observed,
        "overflow": range.check_overflow,
        "nonfinite-gradient": range.check_nonfinite_gradient,
        "integer-cast": range.check_integer_cast,
        "precision-loss": precision.check_precision_loss,
        "silent-zero": range.check_silent_zero,
        "flush": range.check_flush,
        "headroom": range.check_headroom,
        "autocast-state": execution.check_state,
        "loss-dtype": execution.check_loss_dtype,
        "dtype": execution.check_declared_dtypes,
        "coverage": execution.check_coverage,
    }
)
"""In the order in which a reader wants them: what stops the run, what ruins it, what blurs it."""

OBSERVABLE = (
    "nonfinite-reference", "overflow", "silent-zero", "flush", "integer-cast", "precision-loss", "headroom", "coverage"
)  # fmt: skip
"""The checks of a watched block, whose results are not known."""


def observable() -> tuple[str, ...]:
    """These, and those of other packages that judge the values of loops and blocks."""
    return (*OBSERVABLE, *added(Kind.TRAINING, Kind.CALL))


_COMPLETE = frozenset(
    "overflow nonfinite-gradient integer-cast precision-loss silent-zero flush headroom loss-dtype".split()
)
"""Checks that need a run that came to its end."""

_NARROW = frozenset(("silent-zero", "flush", "headroom"))
"""Checks of what 16 bits lose."""


def check_numerics(stats: NumericsStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks (all by default); whether it ran and what was seen are always among them."""
    wanted = CHECKS if checks is None else {*checks, "low-precision-error", "coverage"}
    findings: list[Finding] = []
    for slug, check in CHECKS.items():
        reason = ""
        if stats.raised is not None and slug in _COMPLETE:
            reason = "the run raised before it was complete: see low-precision-error"
        elif not stats.low and slug in _NARROW:
            reason = "no op computed in 16 bits, so nothing was judged"
        if slug in wanted:
            findings += [REGISTRY[slug].skip(who(stats), reason)] if reason else check(stats, limits)
    others = added(*(MODELS if stats.judged else (Kind.TRAINING, Kind.CALL)))
    names = [slug for slug in others if checks is None or slug in checks]
    findings += checks_of(stats, limits, names)
    return _in_order_of_run(stats, findings)


def _in_order_of_run(stats: NumericsStats, findings: list[Finding]) -> list[Finding]:
    """The findings; those of faults come first, as the run met them: a value that vanished before what follows."""
    met = {fault.where: number for number, fault in reversed(list(enumerate(stats.faults)))}
    return sorted(
        findings, key=lambda finding: met.get(finding.where, len(met)) if finding.verdict in PROBLEMS else len(met)
    )
