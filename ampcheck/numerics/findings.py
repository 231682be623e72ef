"""What every check of a `NumericsStats` says in the same words."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.catalog.compiled import COMPILED_EXCEPTION
from ampcheck.catalog.numerics import LOW_PRECISION_ERROR
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.stats import NumericsStats
from ampcheck.telemetry.checks import check_telemetry


def who(stats: NumericsStats) -> str:
    """The subject and its arm, as findings name them."""
    return f"{stats.subject} [{stats.arm}]" if stats.arm else stats.subject


def finding(
    stats: NumericsStats,
    check: Check,
    verdict: Verdict,
    fact: OpFacts,
    message: str,
    hint: str,
    observed: float,
    limit: float,
    unit: str,
) -> Finding:
    """A finding about one op."""
    return check.finding(
        verdict, who(stats), message, where=fact.where, observed=observed, limit=limit, unit=unit, hint=hint
    )


def passed(
    stats: NumericsStats,
    check: Check,
    text: str,
    seen: int,
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
) -> Finding:
    """A pass that rests on `seen` observations, with the coverage of the run."""
    return check.passed(
        who(stats),
        f"{text} ({stats.coverage})",
        seen,
        observed=observed,
        limit=limit,
        unit=unit,
    )


def incomplete(stats: NumericsStats, check: Check, reason: str, hint: str = "") -> Finding:
    """A check that was asked for, and that the subject prevents."""
    return check.incomplete(who(stats), reason, hint=hint)


def not_reached(stats: NumericsStats, check: Check) -> Finding | None:
    """A run that raised has nothing more to say, and one that compiled nothing says nothing about compiled code."""
    if stats.raised is None and stats.compiled and not stats.graphs:
        return check.skip(who(stats), "nothing was compiled: see coverage")
    if stats.raised is None:
        return None
    raised = COMPILED_EXCEPTION if stats.compiled else LOW_PRECISION_ERROR
    return check.skip(who(stats), f"the run raised before it was complete: see {raised}")


def no_gradients(stats: NumericsStats, check: Check) -> Finding | None:
    """A skip where nothing needs a gradient; incomplete where the subject keeps backward from its weights."""
    if not stats.no_backward and any(e.kind == "gradient" for e in stats.errors):
        return None
    reason = f"no gradients to judge: {stats.no_backward or 'the run gave no gradient'}"
    if stats.no_backward and not stats.prevented:
        return check.skip(who(stats), reason)
    hint = (
        "mend what raises or cuts the graph (no_grad, detach, a reentrant checkpoint whose inputs need no gradient); "
        "for a model that is never trained set requires_grad_(False)"
    )
    return incomplete(stats, check, reason, hint)


def nothing_narrow(stats: NumericsStats, check: Check) -> Finding | None:
    """A skip where no op computed in 16 bits: nothing could be lost."""
    if stats.low:
        return None
    return check.skip(who(stats), "no op computed in 16 bits, so nothing was judged")


def inside_graphs(stats: NumericsStats, check: Check, limits: Limits) -> list[Finding]:
    """What the statistics inside compiled graphs say of one check; damage is what the comparison with float64 found."""
    harmed = bool(stats.harm(limits.precision))
    inside = replace(stats.inside, subject=who(stats)) if stats.inside is not None else None
    if inside is None or not inside.measured:
        reason = (inside.skipped if inside is not None else "") or "nothing was measured inside compiled graphs"
        return [check.skip(who(stats), f"{reason}; eager mode is judged")]
    return [f for f in check_telemetry(inside, limits, harmed=harmed) if f.check == check.slug]


def inside_unseen(stats: NumericsStats, check: Check) -> list[Finding]:
    """A skip for what cannot be told of a compiled run."""
    return [check.skip(who(stats), "not seen inside a compiled graph; eager mode is judged")]
