"""What every check of a `NumericsStats` says in the same words."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.core import run as record
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.stats import NumericsStats
from ampcheck.telemetry.checks import check_telemetry

LISTED = 5
"""How many places one check names; the table of the run holds all."""


def who(stats: NumericsStats) -> str:
    """The subject and its arm, as findings name them."""
    return f"{stats.subject} [{stats.arm}]" if stats.arm else stats.subject


def finding(
    stats: NumericsStats,
    check: str,
    verdict: Verdict,
    fact: OpFacts,
    message: str,
    hint: str,
    observed: float,
    limit: float,
    unit: str,
) -> Finding:
    """A finding about one op."""
    return Finding(check, verdict, who(stats), message, fact.where, float(observed), float(limit), unit, hint)


def passed(
    stats: NumericsStats,
    check: str,
    text: str,
    seen: int,
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
) -> Finding:
    """A pass that rests on `seen` observations, with the coverage of the run."""
    return record.passed(
        check,
        who(stats),
        f"{text} ({stats.coverage})",
        seen,
        observed=None if observed is None else float(observed),
        limit=None if limit is None else float(limit),
        unit=unit,
    )


def incomplete(stats: NumericsStats, check: str, reason: str, hint: str = "") -> Finding:
    """A check that was asked for, and that the subject prevents."""
    return Finding(check, Verdict.INCOMPLETE, who(stats), reason, hint=hint)


def not_reached(stats: NumericsStats, check: str) -> Finding | None:
    """A run that raised has nothing more to say, and one that compiled nothing says nothing about compiled code."""
    if stats.raised is None and stats.compiled and not stats.graphs:
        return Finding(check, Verdict.SKIP, who(stats), "nothing was compiled: see coverage")
    if stats.raised is None:
        return None
    slug = "compiled-exception" if stats.compiled else "low-precision-error"
    return Finding(check, Verdict.SKIP, who(stats), f"the run raised before it was complete: see {slug}")


def no_gradients(stats: NumericsStats, check: str) -> Finding | None:
    """A skip where nothing needs a gradient; incomplete where the subject keeps backward from its weights."""
    if not stats.no_backward and any(e.kind == "gradient" for e in stats.errors):
        return None
    reason = f"no gradients to judge: {stats.no_backward or 'the run gave no gradient'}"
    if stats.no_backward and not stats.prevented:
        return Finding(check, Verdict.SKIP, who(stats), reason)
    hint = (
        "mend what raises or cuts the graph (no_grad, detach, a reentrant checkpoint whose inputs need no gradient); "
        "for a model that is never trained set requires_grad_(False)"
    )
    return incomplete(stats, check, reason, hint)


def nothing_narrow(stats: NumericsStats, check: str) -> Finding | None:
    """A skip where no op computed in 16 bits: nothing could be lost."""
    if stats.low:
        return None
    return Finding(check, Verdict.SKIP, who(stats), "no op computed in 16 bits, so nothing was judged")


def inside_graphs(stats: NumericsStats, check: str, limits: Limits) -> list[Finding]:
    """What the statistics inside compiled graphs say of one check; damage is what the comparison with float64 found."""
    harmed = bool(stats.harm(limits.precision))
    inside = replace(stats.inside, subject=who(stats)) if stats.inside is not None else None
    if inside is None or not inside.measured:
        reason = (inside.skipped if inside is not None else "") or "nothing was measured inside compiled graphs"
        return [Finding(check, Verdict.SKIP, who(stats), f"{reason}; eager mode is judged")]
    return [f for f in check_telemetry(inside, limits, harmed=harmed) if f.check == check]


def inside_unseen(stats: NumericsStats, check: str) -> list[Finding]:
    """A skip for what cannot be told of a compiled run."""
    return [Finding(check, Verdict.SKIP, who(stats), "not seen inside a compiled graph; eager mode is judged")]


def most(found: list[Finding]) -> list[Finding]:
    """The first few: failures before warnings, in the order in which they ran; the last says how many it left out."""
    ordered = sorted(found, key=lambda f: f.verdict is not Verdict.FAIL)
    if len(ordered) <= LISTED:
        return ordered
    *shown, last = ordered[:LISTED]
    left = f"{last.message}; {len(ordered) - LISTED} further places are left out"
    return [*shown, replace(last, message=left)]
