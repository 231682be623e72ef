"""What every check of a `NumericsStats` says in the same words."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.stats import NumericsStats
from ampcheck.record import Finding, Verdict
from ampcheck.settings import Limits
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
    stats: NumericsStats, check: str, text: str, observed: float | None, limit: float | None, unit: str = ""
) -> Finding:
    """A pass, with what was looked at."""
    return Finding(
        check,
        Verdict.PASS,
        who(stats),
        f"{text} ({stats.coverage})",
        observed=None if observed is None else float(observed),
        limit=None if limit is None else float(limit),
        unit=unit,
    )


def not_reached(stats: NumericsStats, check: str) -> Finding | None:
    """A run that raised has nothing more to say, and one that compiled nothing says nothing about compiled code."""
    if stats.raised is None and stats.compiled and not stats.graphs:
        return Finding(check, Verdict.SKIP, who(stats), "nothing was compiled: see coverage")
    if stats.raised is None:
        return None
    slug = "compiled-exception" if stats.compiled else "low-precision-error"
    return Finding(check, Verdict.SKIP, who(stats), f"the run raised before it was complete: see {slug}")


def no_gradients(stats: NumericsStats, check: str) -> Finding | None:
    """A skip where backward gave nothing."""
    if stats.no_backward or not any(e.kind == "gradient" for e in stats.errors):
        reason = stats.no_backward or "the run gave no gradient"
        return Finding(check, Verdict.SKIP, who(stats), f"no gradients to judge: {reason}")
    return None


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
