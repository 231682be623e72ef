"""Checks on the statistics inside compiled graphs. Pure functions from `TelemetryStats` to findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampcheck.catalog.numerics import COVERAGE, FLUSH, HEADROOM, NONFINITE_GRADIENT, OVERFLOW, SILENT_ZERO
from ampcheck.core.check import Check, Evidence, first_findings
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table, Verdict
from ampcheck.core.text import counted
from ampcheck.records.telemetry import SiteStats, TelemetryStats

EAGER_MODULES = "modules that are not compiled"

_ROWS = 40


def check_telemetry(stats: TelemetryStats, limits: Limits, *, harmed: bool | None = None) -> list[Finding]:
    """`overflow`, `nonfinite-gradient`, `silent-zero`, `flush`, `headroom` and `coverage`, in this order.

    harmed: whether the results of the run were judged to be wrong; None where they were not judged (a user's own loop):
    then a defect fails when its damage is seen later in the graphs.
    """
    if stats.skipped:
        return [COVERAGE.skip(stats.subject, f"compiled graphs cannot be watched: {stats.skipped}")]
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    if not stats.measured:
        return [_nothing_measured(stats, unseen)]
    text = f"{stats.coverage} were looked at inside compiled graphs" + (f"; not looked at: {unseen}" if unseen else "")
    return [
        *_overflow(stats, harmed),
        *_gradients(stats, harmed),
        *_silent_zero(stats, harmed),
        *_flush(stats, limits),
        *_headroom(stats, limits),
        _coverage(stats, text),
    ]


def _coverage(stats: TelemetryStats, text: str) -> Finding:
    if EAGER_MODULES not in stats.coverage.unseen:
        return COVERAGE.passed(stats.subject, text, _finite_sites(stats.sites))
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


def _overflow(stats: TelemetryStats, harmed: bool | None) -> list[Finding]:
    """Forward values that are not finite though computed from finite values."""
    forward, backward = _in_phase(stats, "forward"), _in_phase(stats, "backward")
    if not forward:
        return [OVERFLOW.skip(stats.subject, "no forward value was measured inside compiled graphs")]
    findings = []
    for number, site in enumerate(forward):
        if harmed is False and not site.overflowed:
            continue  # the reference has it as well, or it is a mask: the outputs were judged to be right
        if not site.born or (site.fed and not site.overflowed and any(earlier.bad for earlier in forward[:number])):
            continue
        later = forward[number + 1 :] + backward
        carried = sum(bool(value.bad) for value in later)
        fails = (bool(carried) or not later) if harmed is None else harmed
        text = f"; {carried} later values carry it on" if carried else "; no later measured value is inf or NaN"
        message = (
            f"finite values must stay finite; {_bad_elements(site)} of {_value(site)} in {site.bad:,} of "
            f"{site.calls:,} measured calls{text if harmed is None or carried else ''}"
        )
        verdict = Verdict.FAIL if fails else Verdict.WARN
        findings.append(_finding(OVERFLOW, verdict, stats, site, message, site.bad, unit="calls"))
    return _judged(OVERFLOW, stats, findings, f"no value of {len(forward)} became inf or NaN in forward", forward)


def _gradients(stats: TelemetryStats, harmed: bool | None) -> Iterator[Finding]:
    """Backward values that are not finite. A GradScaler skips steps with infinite gradients: only lasting ones fail."""
    sites = _in_phase(stats, "backward")
    if not sites:
        return
    text = f"no value of {len(sites)} became inf or NaN in backward"
    if any(site.bad for site in _in_phase(stats, "forward")):
        if any(site.bad for site in sites):
            text = "backward starts from values that are inf or NaN in forward: see overflow"
            yield NONFINITE_GRADIENT.skip(stats.subject, text)
        else:
            yield from _judged(NONFINITE_GRADIENT, stats, [], text, sites)
        return
    born = [site for site in sites if site.born]
    lasting = [site for site in born if site.last or site.bad == site.calls]
    if lasting:
        site = min(lasting, key=lambda s: s.bad < s.calls)
        message = (
            f"gradients must be finite; {_bad_elements(site)} of {_value(site)} in {site.bad:,} of {site.calls:,} "
            f"measured calls, first in call {site.first}"
        )
        # One call says nothing about the next: a scaler starts too high on purpose.
        verdict = Verdict.FAIL if site.bad == site.calls > 1 and harmed is not False else Verdict.WARN
        yield _finding(NONFINITE_GRADIENT, verdict, stats, site, message, site.bad, unit="calls")
        return
    if born:
        worst = max(born, key=lambda site: site.bad)
        text = f"gradients overflowed in {worst.bad:,} of {worst.calls:,} measured calls and are finite again"
    yield from _judged(NONFINITE_GRADIENT, stats, [], text, sites)


def _silent_zero(stats: TelemetryStats, harmed: bool | None) -> list[Finding]:
    """Casts that make a whole tensor zero, in every measured call."""
    casts = [site for site in stats.sites if site.cast]
    if not casts:
        return [SILENT_ZERO.skip(stats.subject, "no cast to 16 bits was measured inside compiled graphs")]
    findings = []
    for site in filter(_is_emptied, casts):
        message = (
            f"a tensor must not vanish; {_value(site)} became zero altogether in each of {site.calls:,} measured calls "
            f"({site.flushed:,} nonzero elements, the largest {site.amax:.3g})"
        )
        verdict = Verdict.FAIL if (site.where.phase == "backward" if harmed is None else harmed) else Verdict.WARN
        findings.append(_finding(SILENT_ZERO, verdict, stats, site, message, site.flushed))
    return _judged(SILENT_ZERO, stats, findings, f"none of {counted(len(casts), 'casts')} made everything zero", casts)


def _flush(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Casts that may have lost more of a tensor's norm than a rounding does."""
    casts = [site for site in stats.sites if site.cast]
    if not casts:
        return []
    findings = []
    for site in casts:
        allowed = limits.flush * format_of(site.format).unit_roundoff
        if site.lost <= allowed or _is_emptied(site):
            continue
        message = (
            f"at most {allowed:.2g} of a tensor's norm may flush to zero; {_value(site)} lost up to {site.lost:.2g}: "
            f"{site.flushed:,} of {site.nonzero:,} nonzero elements"
        )
        findings.append(_finding(FLUSH, Verdict.WARN, stats, site, message, site.lost, allowed, "of the norm"))
    return _judged(
        FLUSH, stats, findings, f"{counted(len(casts), 'casts')} flushed no more than a rounding loses", casts
    )


def _headroom(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Forward values near the end of a 16-bit format; a loss scale keeps gradients near it on purpose."""
    narrow = [s for s in _in_phase(stats, "forward") if format_of(s.format).bits <= 16 and not s.bad]
    if not narrow:
        return []
    findings = []
    for site in narrow:
        top = format_of(site.format).max
        room = top / site.amax if site.amax else float("inf")
        if room >= limits.headroom:
            continue
        message = (
            f"values must stay {limits.headroom:g}x below the maximum of {site.format}; {_value(site)} reaches "
            f"{site.amax:.5g}, {room:.2f}x below {top:.6g}"
        )
        limit = limits.headroom
        findings.append(_finding(HEADROOM, Verdict.WARN, stats, site, message, room, limit, "x below max"))
    text = f"{len(narrow)} values of 16 bits are far from the maximum of their format"
    return _judged(HEADROOM, stats, findings, text, narrow)


def _in_phase(stats: TelemetryStats, phase: str) -> list[SiteStats]:
    return [site for site in stats.sites if site.where.phase == phase]


def _is_emptied(site: SiteStats) -> bool:
    return 0 < site.emptied == site.calls


def _bad_elements(site: SiteStats) -> str:
    counts = ((site.overflowed, f"beyond {site.format}"), (site.infs, "inf"), (site.nans, "NaN"))
    return ", ".join(counted(count, f"elements {what}") for count, what in counts if count) + f" among {site.numel:,}"


def _value(site: SiteStats) -> str:
    name = site.weight or f"{site.where.op.removeprefix('aten::')} in {site.where.module or '(the root)'}"
    line = f" ({site.where.file}:{site.where.line})" if site.where.file else ""
    return f"the {'cast to' if site.cast else 'result in'} {site.format} of {name}{line}"


def _finding(
    check: Check,
    verdict: Verdict,
    stats: TelemetryStats,
    site: SiteStats,
    message: str,
    observed: float,
    limit: float = 0.0,
    unit: str = "elements",
) -> Finding:
    where = replace(site.where, step=site.first) if unit == "calls" and site.first >= 0 else site.where
    evidence = Evidence(where=where, observed=observed, limit=limit, unit=unit, hint=_hint(check, site))
    evidence["names"] = [site.weight] if site.weight else []
    return check.finding(verdict, stats.subject, message, **evidence)


def _hint(check: Check, site: SiteStats) -> str:
    """What helps in the format and the phase of a value."""
    wider = "bfloat16 or float32" if site.format == "float16" else "float32"
    if check is OVERFLOW:
        return f"scale the inputs of this op down, or keep it in {wider} (torch.autocast(enabled=False) around it)"
    if check is NONFINITE_GRADIENT:
        return "a GradScaler that backs off ends this after a few steps; otherwise see what overflows in forward there"
    if check is HEADROOM:
        return f"normalise or scale before this op, or keep it in {wider}"
    if site.where.phase == "backward":
        return f"scale the loss (torch.amp.GradScaler), or keep this op in {wider}"
    return f"scale the values up before this op, or keep it in {wider}"


def _judged(
    check: Check, stats: TelemetryStats, findings: list[Finding], text: str, sites: Sequence[SiteStats]
) -> list[Finding]:
    """The first findings, or the pass."""
    passed = check.passed(stats.subject, f"{text} ({stats.coverage})", _finite_sites(sites))
    return first_findings(findings) or [passed]


def _finite_sites(sites: Sequence[SiteStats]) -> int:
    """Sites with a finite value; one that was always inf or NaN cannot lose any."""
    return sum(site.numel > site.infs + site.nans for site in sites)


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
    return (Table(f"Inside the compiled graphs: {stats.subject}", columns, rows, str(OVERFLOW), note),)


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
