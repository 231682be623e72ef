"""Values inside compiled graphs: what the checks of this family say of `TelemetryStats`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ampcheck.checks.range import wider
from ampcheck.core.check import Check, Evidence, first_findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.text import counted
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.telemetry import SiteStats, TelemetryStats


def inside(
    check: Check, judge: Callable[[TelemetryStats, Limits], list[Finding]], stats: AccuracyStats, limits: Limits
) -> list[Finding]:
    """Return what the values inside the graphs of an audit say; damage is what the comparison with float64 found."""
    if not stats.beside:
        return []
    if stats.exceptions.compiled or not stats.graphs:
        return [check.skip(stats.name, "nothing ran compiled to its end: see compiled-exception and coverage")]
    if stats.inside is None or not stats.inside.measured:
        reason = (stats.inside.skipped if stats.inside is not None else "") or "nothing was measured inside the graphs"
        return [check.skip(stats.name, f"{reason}; eager mode is judged")]
    harmed = any(error.beyond(limits.precision) for error in stats.errors)
    return judge(replace(stats.inside, subject=stats.name, harmed=harmed), limits)


def in_phase(stats: TelemetryStats, phase: str) -> list[SiteStats]:
    """The values of forward, or of backward."""
    return [site for site in stats.sites if site.where.phase == phase]


def is_emptied(site: SiteStats) -> bool:
    """Return whether a cast made the whole of it zero in each call."""
    return 0 < site.emptied == site.calls


def bad_elements(site: SiteStats) -> str:
    """Return how many elements are inf or NaN, or became so."""
    counts = ((site.overflowed, f"beyond {site.format}"), (site.infs, "inf"), (site.nans, "NaN"))
    return ", ".join(counted(count, f"elements {what}") for count, what in counts if count) + f" among {site.numel:,}"


def value_text(site: SiteStats) -> str:
    """The value in a message."""
    name = site.weight or f"{site.where.op.removeprefix('aten::')} in {site.where.module or '(the root)'}"
    line = f" ({site.where.file}:{site.where.line})" if site.where.file else ""
    return f"the {'cast to' if site.cast else 'result in'} {site.format} of {name}{line}"


def finding(
    check: Check,
    verdict: Verdict,
    stats: TelemetryStats,
    site: SiteStats,
    message: str,
    hint: str,
    observed: float,
    limit: float = 0.0,
    unit: str = "elements",
) -> Finding:
    """Return what is said of one value, `unit="calls"` of the first call in which it was so."""
    where = replace(site.where, step=site.first) if unit == "calls" and site.first >= 0 else site.where
    evidence = Evidence(where=where, observed=observed, limit=limit, unit=unit, hint=hint)
    evidence["names"] = [site.weight] if site.weight else []
    return check.finding(verdict, stats.subject, message, **evidence)


def vanished_hint(site: SiteStats) -> str:
    """Return what helps a value that becomes zero or too small."""
    if site.where.phase == "backward":
        return f"scale the loss (torch.amp.GradScaler), or keep this op in {wider(site.format)}"
    return f"scale the values up before this op, or keep it in {wider(site.format)}"


def judged(
    check: Check, stats: TelemetryStats, findings: list[Finding], text: str, sites: Sequence[SiteStats]
) -> list[Finding]:
    """The first findings, or the pass."""
    passed = check.passed(stats.subject, f"{text} ({stats.coverage})", finite_sites(sites))
    return first_findings(findings) or [passed]


def finite_sites(sites: Sequence[SiteStats]) -> int:
    """Sites with a finite value; one that was always inf or NaN cannot lose any."""
    return sum(site.numel > site.infs + site.nans for site in sites)
