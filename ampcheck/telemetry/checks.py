"""What the statistics inside compiled graphs say. Pure functions from `TelemetryStats` to findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table, Verdict, passed
from ampcheck.telemetry.stats import SiteStats, TelemetryStats

CHECKS = ("overflow", "nonfinite-gradient", "silent-zero", "flush", "headroom", "coverage")
"""The checks that telemetry can judge, in the order in which a reader wants them."""

_LISTED = 5
_ROWS = 40


def check_telemetry(stats: TelemetryStats, limits: Limits, *, harmed: bool | None = None) -> list[Finding]:
    """The findings of `CHECKS`.

    harmed: whether what came out of the run was judged to be wrong; None where nobody judged it (a user's own loop):
    then what is found fails when its damage is seen further on in the graphs.
    """
    if skipped := _nothing(stats):
        return [skipped]
    return [
        *_overflow(stats, harmed),
        *_gradients(stats, harmed),
        *_vanished(stats, harmed),
        *_flushed(stats, limits),
        *_headroom(stats, limits),
        _passed_coverage(stats),
    ]


def _passed_coverage(stats: TelemetryStats) -> Finding:
    unseen = _unseen(stats)
    text = f"{stats.coverage} were looked at inside compiled graphs" + (f"; not looked at: {unseen}" if unseen else "")
    return passed("coverage", stats.subject, text, _alive(stats.sites))


def _unseen(stats: TelemetryStats) -> str:
    return "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())


def _nothing(stats: TelemetryStats) -> Finding | None:
    unseen = _unseen(stats)
    if stats.skipped:
        return Finding("coverage", Verdict.SKIP, stats.subject, f"compiled graphs cannot be watched: {stats.skipped}")
    if stats.measured:
        return None
    what = unseen or "Inductor compiled no graph: the model was not called inside, or is not compiled by it"
    message = f"a value of a compiled graph must have been measured; none was: {what}"
    wider = "without autocast and 16-bit weights nothing is rounded to 16 bits: level='all' looks at all values; "
    hint = (
        "call what torch.compile returned inside the block, with backend='inductor'; "
        f"{wider if stats.level != 'all' else ''}eager mode is judged by assert_numerics"
    )
    return Finding("coverage", Verdict.FAIL, stats.subject, message, hint=hint)


def _overflow(stats: TelemetryStats, harmed: bool | None) -> list[Finding]:
    """Forward: a value that is not finite, where nothing that it was computed from was so."""
    check = "overflow"
    sites = [site for site in stats.sites if site.where.phase == "forward"]
    if not sites:
        return [Finding(check, Verdict.SKIP, stats.subject, "no forward value was measured inside compiled graphs")]
    found = []
    for place, site in enumerate(sites):
        if harmed is False and not site.overflowed:
            continue  # what the reference has as well, or a mask: a judge has found nothing wrong with what came out
        if not site.born or (site.fed and not site.overflowed and any(one.bad for one in sites[:place])):
            continue
        later = sites[place + 1 :] + [one for one in stats.sites if one.where.phase == "backward"]
        carried = [one for one in later if one.bad]
        lost = bool(carried) or not later if harmed is None else harmed
        text = f"; {len(carried)} later values carry it on" if carried else "; no later measured value is inf or NaN"
        message = (
            f"finite values must stay finite; {_counts(site)} of {_what(site)} in {site.bad:,} of {site.calls:,} "
            f"measured calls{text if harmed is None or carried else ''}"
        )
        found.append(
            _finding(
                stats, check, Verdict.FAIL if lost else Verdict.WARN, site, message, _overflow_hint(site), site.bad
            )
        )
    return _most(found) or [_passed(stats, check, f"no value of {len(sites)} became inf or NaN in forward", sites)]


def _gradients(stats: TelemetryStats, harmed: bool | None) -> list[Finding]:
    """Backward: a GradScaler skips a step with an infinite gradient now and then, so only what never ends fails."""
    check = "nonfinite-gradient"
    sites = [site for site in stats.sites if site.where.phase == "backward"]
    if not sites:
        return []
    if any(site.bad for site in stats.sites if site.where.phase == "forward"):
        if not any(site.bad for site in sites):
            return [_passed(stats, check, f"no value of {len(sites)} became inf or NaN in backward", sites)]
        text = "backward starts from values that are inf or NaN in forward: see overflow"
        return [Finding(check, Verdict.SKIP, stats.subject, text)]
    born = [site for site in sites if site.born]
    found = []
    for site in sorted((s for s in born if s.last or s.bad == s.calls), key=lambda s: s.bad < s.calls)[:1]:
        # One call tells nothing of the next: a scaler starts too high on purpose.
        always = site.bad == site.calls > 1 and harmed is not False
        message = (
            f"gradients must be finite; {_counts(site)} of {_what(site)} in {site.bad:,} of {site.calls:,} measured "
            f"calls, first in call {site.first}"
        )
        hint = "a GradScaler that backs off ends this after a few steps; otherwise see what overflows in forward there"
        verdict = Verdict.FAIL if always else Verdict.WARN
        found.append(_finding(stats, check, verdict, site, message, hint, site.bad))
    passing = sum(site.bad for site in born)
    text = f"no value of {len(sites)} became inf or NaN in backward" if not passing else _passing(born)
    return found or [_passed(stats, check, text, sites)]


def _passing(born: list[SiteStats]) -> str:
    worst = max(born, key=lambda site: site.bad)
    return f"gradients overflowed in {worst.bad:,} of {worst.calls:,} measured calls and are finite again"


def _vanished(stats: TelemetryStats, harmed: bool | None) -> list[Finding]:
    """A cast that makes a whole tensor zero, in every measured call."""
    check = "silent-zero"
    casts = [site for site in stats.sites if site.cast]
    if not casts:
        return [Finding(check, Verdict.SKIP, stats.subject, "no cast to 16 bits was measured inside compiled graphs")]
    found = []
    for site in casts:
        if not site.emptied or site.emptied < site.calls:
            continue
        message = (
            f"a cast must leave something of what it is given; {_what(site)} became zero altogether in each of "
            f"{site.calls:,} measured calls ({site.flushed:,} nonzero elements, the largest {site.amax:.3g})"
        )
        backward = site.where.phase == "backward"
        fails = harmed if harmed is not None else backward
        hint = (
            "scale the loss (torch.amp.GradScaler), or use bfloat16"
            if backward
            else "scale the values up before this cast, use bfloat16, or keep this op in float32"
        )
        verdict = Verdict.FAIL if fails else Verdict.WARN
        found.append(_finding(stats, check, verdict, site, message, hint, site.flushed))
    return _most(found) or [_passed(stats, check, f"none of {len(casts)} casts made everything zero", casts)]


def _flushed(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Casts that can have lost more of a tensor's norm than a rounding does."""
    check = "flush"
    casts = [site for site in stats.sites if site.cast]
    found = []
    for site in casts:
        roundoff = format_of(site.format).unit_roundoff
        if site.lost <= limits.flush * roundoff or (site.emptied and site.emptied == site.calls):
            continue
        message = (
            f"what is too small for {site.format} may be at most {limits.flush * roundoff:.2g} of a tensor's norm; in "
            f"{_what(site)} {site.flushed:,} of {site.nonzero:,} nonzero elements became zero, up to {site.lost:.2g} "
            f"of it"
        )
        hint = (
            "scale the loss (torch.amp.GradScaler), use bfloat16, or keep this op in float32"
            if site.where.phase == "backward"
            else "scale the values up before this cast, use bfloat16, or keep this op in float32"
        )
        limit = limits.flush * roundoff
        place = site.where
        unit = "of the norm, at most"
        found.append(Finding(check, Verdict.WARN, stats.subject, message, place, site.lost, limit, unit, hint))
    if not casts:
        return []
    return _most(found) or [_passed(stats, check, f"{len(casts)} casts flushed no more than a rounding loses", casts)]


def _headroom(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Forward values near the end of a 16-bit format; gradients are held near it by a loss scale on purpose."""
    check = "headroom"
    narrow = [s for s in stats.sites if s.where.phase == "forward" and format_of(s.format).bits <= 16 and not s.bad]
    found = []
    for site in narrow:
        room = format_of(site.format).max / site.amax if site.amax else float("inf")
        if room >= limits.headroom:
            continue
        message = (
            f"values must stay a factor of {limits.headroom:g} below {format_of(site.format).max:.6g}; {_what(site)} "
            f"reached {site.amax:.6g}, a factor of {room:.3g}"
        )
        hint = "scale its inputs down, use bfloat16, or keep this op in float32"
        found.append(
            Finding(check, Verdict.WARN, stats.subject, message, site.where, room, limits.headroom, "factor", hint)
        )
    if not narrow:
        return []
    return _most(found) or [
        _passed(stats, check, f"{len(narrow)} values of 16 bits keep their distance from the end", narrow)
    ]


def _counts(site: SiteStats) -> str:
    parts = [
        f"{count:,} elements {what}"
        for count, what in ((site.overflowed, f"beyond {site.format}"), (site.infs, "inf"), (site.nans, "NaN"))
        if count
    ]
    return ", ".join(parts) + f" among {site.numel:,}"


def _what(site: SiteStats) -> str:
    value = f"the {'cast to' if site.cast else 'result in'} {site.format} of "
    name = site.weight or f"{site.where.op.removeprefix('aten::')} in {site.where.module or '(the root)'}"
    line = f" ({site.where.file}:{site.where.line})" if site.where.file else ""
    return value + name + line


def _overflow_hint(site: SiteStats) -> str:
    wider = "" if site.format == "bfloat16" else ", or use bfloat16"
    return f"keep this op in float32 (torch.autocast(enabled=False) around it), scale its inputs down{wider}"


def _finding(
    stats: TelemetryStats, check: str, verdict: Verdict, site: SiteStats, message: str, hint: str, observed: float
) -> Finding:
    where = replace(site.where, step=site.first if site.first >= 0 else None)
    return Finding(check, verdict, stats.subject, message, where, float(observed), 0.0, "calls", hint)


def _passed(stats: TelemetryStats, check: str, text: str, sites: Sequence[SiteStats]) -> Finding:
    return passed(check, stats.subject, f"{text} ({stats.coverage})", _alive(sites))


def _alive(sites: Sequence[SiteStats]) -> int:
    """How many sites had a finite value; one that was inf or NaN throughout cannot lose any."""
    return sum(site.numel > site.infs + site.nans for site in sites)


def _most(found: list[Finding]) -> list[Finding]:
    ordered = sorted(found, key=lambda f: f.verdict is not Verdict.FAIL)
    return ordered[:_LISTED]


def tables(stats: TelemetryStats) -> tuple[Table, ...]:
    """The sites that lost or nearly lost something first, then those nearest to the end of their format."""
    if not stats.sites:
        return ()
    ordered = sorted(
        stats.sites, key=lambda s: (-s.bad, -s.lost, -(s.amax / format_of(s.format).max if s.amax else 0.0))
    )
    rows = [_row(site) for site in ordered[:_ROWS]]
    columns = (
        "phase", "module", "value", "format", "amax", "smallest", "zeros", "flushed", "subnormal", "inf or NaN",
        "calls", "source",
    )  # fmt: skip
    shares = "zeros, flushed and subnormal are shares of all elements"
    note = f"level {stats.level}, every {stats.every}; {shares}"
    if len(ordered) > _ROWS:
        note = f"{_ROWS} of {len(ordered)} values, those that lost most first; {note}"
    if stats.perturbation is not None:
        same = "measuring changed no result" if not stats.perturbation else _changed(stats)
        note += f"; {same}"
    return (Table(f"Inside the compiled graphs: {stats.subject}", columns, rows, "overflow", note),)


def _changed(stats: TelemetryStats) -> str:
    return f"measuring changed results of {stats.perturbed} graphs, by at most {stats.perturbation:.2g}"


def _row(site: SiteStats) -> tuple[Scalar, ...]:
    whole = max(site.numel, 1)
    value = site.weight or site.where.op
    source = f"{site.where.file}:{site.where.line}" if site.where.file else ""
    bad = site.overflowed + site.infs + site.nans
    return (
        site.where.phase, site.where.module or "(root)", ("cast of " if site.cast else "") + value, site.format,
        site.amax, site.smallest, site.zeros / whole, site.flushed / whole, site.subnormals / whole, bad,
        site.calls, source,
    )  # fmt: skip
