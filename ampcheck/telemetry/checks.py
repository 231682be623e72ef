"""Judges values inside compiled graphs, with their table."""

from __future__ import annotations

from ampcheck.checks import findings
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table
from ampcheck.records.telemetry import SiteStats, TelemetryStats

_ROWS = 40


def check_telemetry(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """The findings about the values of graphs, and `coverage`, alone where nothing was measured."""
    return findings(stats, limits, None if stats.measured and not stats.skipped else ("coverage",))


def telemetry_tables(stats: TelemetryStats) -> tuple[Table, ...]:
    """The sites with the greatest losses first, then those nearest to the maximum of their format."""
    if not stats.sites:
        return ()
    ordered = sorted(
        stats.sites, key=lambda s: (-s.bad, -s.lost, -(s.amax / format_of(s.format).max if s.amax else 0.0))
    )
    columns = (
        *("phase", "module", "value", "format", "amax", "smallest", "zeros", "flushed", "subnormal", "inf or NaN"),
        *("calls", "source"),
    )
    note = f"level {stats.level}, every {stats.every}; zeros, flushed and subnormal are shares of all elements"
    if len(ordered) > _ROWS:
        note = f"{_ROWS} of {len(ordered)} values, those that lost most first; {note}"
    if stats.perturbation is not None:
        changed = f"measuring changed results of {stats.perturbed} graphs, by at most {stats.perturbation:.2g}"
        note += f"; {changed if stats.perturbation else 'measuring changed no result'}"
    rows = [_row(site) for site in ordered[:_ROWS]]
    return (Table(f"Inside the compiled graphs: {stats.subject}", columns, rows, "overflow", note),)


def _row(site: SiteStats) -> tuple[Scalar, ...]:
    where, numel = site.where, max(site.numel, 1)
    return (
        where.phase,
        where.module or "(root)",
        ("cast of " if site.cast else "") + (site.weight or where.op),
        *(site.format, site.amax, site.smallest),
        *(count / numel for count in (site.zeros, site.flushed, site.subnormals)),
        site.overflowed + site.infs + site.nans,
        site.calls,
        where.place,
    )
