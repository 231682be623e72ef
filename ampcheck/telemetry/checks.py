"""What is judged inside compiled graphs, with its coverage and its table."""

from __future__ import annotations

from ampcheck.catalog.numerics import COVERAGE
from ampcheck.checks import findings
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table
from ampcheck.records.telemetry import SiteStats, TelemetryStats

EAGER_MODULES = "modules that are not compiled"

_ROWS = 40


def check_telemetry(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """The findings about the values of graphs, and `coverage`."""
    if stats.skipped:
        return [COVERAGE.skip(stats.subject, f"compiled graphs cannot be watched: {stats.skipped}")]
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    if not stats.measured:
        return [_nothing_measured(stats, unseen)]
    text = f"{stats.coverage} were looked at inside compiled graphs" + (f"; not looked at: {unseen}" if unseen else "")
    return [*findings(stats, limits), _coverage(stats, text)]


def _coverage(stats: TelemetryStats, text: str) -> Finding:
    if EAGER_MODULES not in stats.coverage.unseen:
        return COVERAGE.passed(stats.subject, text, stats.finite_sites)
    hint = "watch() without the model follows every op of the block, compiled functions in eager mode"
    return COVERAGE.warn(stats.subject, f"{text}; what they compute was not judged", hint=hint)


def _nothing_measured(stats: TelemetryStats, unseen: str) -> Finding:
    what = unseen or "Inductor compiled no graph: the model was not called inside, or is not compiled by it"
    wider = "without autocast and 16-bit weights nothing is rounded to 16 bits: level='all' looks at all values; "
    hint = (
        "call what torch.compile returned inside the block, with backend='inductor'; "
        f"{wider if stats.level != 'all' else ''}eager mode is judged by assert_numerics"
    )
    message = f"a value of a compiled graph must have been measured; none was: {what}"
    return COVERAGE.fail(stats.subject, message, hint=hint)


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
