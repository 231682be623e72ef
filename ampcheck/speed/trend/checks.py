"""Findings, tables and charts of a history: its steps, the commits between which they are, and the version changes.

A build of today cannot mend a commit of last week, so a step down is a `WARN`: the gate, base against head, is what
fails. `verdict=Verdict.FAIL` (`ampcheck history --fail`) makes it a failure, such as for a nightly job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ampcheck.catalog.speed import REGRESSION
from ampcheck.core.run import Chart, Coverage, Finding, Marker, Run, Scalar, Series, Table, Verdict
from ampcheck.speed.history.records import History, Point, SpeedSeries
from ampcheck.speed.stats import VERSIONS, changes_between
from ampcheck.speed.trend.detect import EFFECT, HEIGHTS, LEAST, Change, change_points
from ampcheck.speed.verdict import WHERE

RECENT = 30
"""How many points back a step down is a warning; older ones are in the table."""


def trend_run(
    history: History,
    *,
    effect: float = EFFECT,
    verdict: Verdict = Verdict.WARN,
    title: str = "history",
    environment: Mapping[str, Scalar] | None = None,
) -> Run:
    """Findings of the check `regression`, with tables of the series, their steps and unreadable lines, and charts.

    effect: the smallest step that is reported, as a share. verdict: of a step down among the last points. One that
    later points reversed is none. Absolute times are skipped, since they wander by tens of per cent without a cause; a
    series of fewer than 20 points is undecided; a history without points is skipped.
    """
    trends = [
        _Trend(series, [] if series.key.absolute else change_points(series.values, effect=effect))
        for series in history.series
    ]
    findings = [finding for trend in trends for finding in _judged(trend, effect, verdict)]
    if not trends:
        findings = [REGRESSION.skip("history", "the history has no points: nothing was judged", where=WHERE)]
    judged = [trend.series for trend in trends if not trend.series.key.absolute]
    unseen: dict[str, int] = {}
    if absolute := history.points - sum(len(series.points) for series in judged):
        unseen["points that are absolute times: no verdict"] = absolute
    if history.notes:
        unseen["lines or files that could not be read"] = len(history.notes)
    return Run(
        environment=dict(environment or {}),
        findings=tuple(findings),
        coverage=Coverage({"points": history.points - absolute, "series": len(judged)}, unseen),
        tables=tuple(table for table in _tables(trends, history) if table.rows),
        charts=tuple(_chart(*trend) for trend in trends),
        title=title,
    )


class _Trend(NamedTuple):
    """A series and its steps; none of absolute times."""

    series: SpeedSeries
    changes: list[Change]


def _judged(trend: _Trend, effect: float, verdict: Verdict) -> list[Finding]:
    subject, count = str(trend.series.key), len(trend.series.points)
    if trend.series.key.absolute:
        message = (
            "absolute times: no verdict, since they wander by tens of per cent without any change; "
            "a paired ratio in extra_info['ampcheck'] would be judged"
        )
        return [REGRESSION.skip(subject, message, where=WHERE)]
    if count < LEAST:
        there = "is 1" if count == 1 else f"are {count}"
        message = f"a step is detected from {LEAST} points of one kind of machine on; there {there}"
        return [REGRESSION.undecided(subject, message, where=WHERE, observed=count, limit=LEAST, unit="points")]
    findings = [
        REGRESSION.finding(
            verdict,
            subject,
            _message(trend.series, change),
            where=WHERE,
            observed=_percent(change.factor),
            limit=-100 * effect,
            unit="%",
            hint=_hint(trend.series, change),
        )
        for change in trend.changes
        if change.slower and change.index >= count - RECENT and not _reversed_later(trend.series, change, effect)
    ]
    if findings:
        return findings
    message = f"no step down of {100 * effect:g} % or more in the last {min(RECENT, count)} points, of {count} points"
    if trend.changes:
        last = trend.changes[-1]
        message += f"; the last step, {_percent(last.factor):+.1f} %, is {count - last.index} points old"
        message += " and was reversed" if last.slower and _reversed_later(trend.series, last, effect) else ""
    return [REGRESSION.passed(subject, message, count, where=WHERE)]


def _reversed_later(series: SpeedSeries, change: Change, effect: float) -> bool:
    """Whether the newest points are where they were before: a step up soon after one down may be undetected."""
    return median(series.values[-min(HEIGHTS) :]) >= change.before / (1 + effect)


def _percent(factor: float) -> float:
    return 100 * (factor - 1)


def _bounds(series: SpeedSeries, change: Change) -> tuple[Point, Point]:
    """The last point that is surely before the step and the first that is surely after it."""
    return series.points[change.earliest - 1], series.points[change.latest]


def _versions(series: SpeedSeries, change: Change) -> str:
    good, changed = (point.measured.fingerprint for point in _bounds(series, change))
    return ", ".join(f"{name} {old} to {new}" for name, old, new in changes_between(good, changed, VERSIONS))


def _message(series: SpeedSeries, change: Change) -> str:
    good, changed = map(_dated, _bounds(series, change))
    key, versions = series.key, _versions(series, change)
    fell, least, most = (-_percent(factor) for factor in (change.factor, change.high, change.low))
    return (
        f"{key.arm} must not become slower against {key.reference}: the ratio fell by {fell:.1f} % "
        f"(95 % interval {least:.1f} to {most:.1f} %), from {change.before:.3f} to {change.after:.3f}, after "
        f"{good}, the last good one, and not later than {changed}; "
        + (f"changed there: {versions}" if versions else "no version changed there")
        + f"; detected after {change.detected - change.index + 1} points"
    )


def _dated(point: Point) -> str:
    return f"{point.commit_text} ({point.time:%Y-%m-%d})"


def _hint(series: SpeedSeries, change: Change) -> str:
    good, changed = (point.commit for point in _bounds(series, change))
    confirm = "measure both in one job to confirm it: the ratio falls as well when the reference becomes faster"
    if not (good and changed) or good == changed:
        return confirm
    return f"git log {good[:10]}..{changed[:10]}; {confirm} (ampcheck speed TARGET --base {good[:10]})"


def _tables(trends: list[_Trend], history: History) -> tuple[Table, ...]:
    series_rows: list[list[Scalar]] = []
    step_rows: list[list[Scalar]] = []
    for series, changes in trends:
        key, points = series.key, series.points
        compared = "seconds" if key.absolute else f"{key.arm} / {key.reference}, {key.precision}"
        low, high = points[-1].interval
        interval = "" if key.absolute else f"{low:.3f} to {high:.3f}"
        steps = "no verdict" if key.absolute else "none" if len(points) >= LEAST else f"needs {LEAST} points"
        if changes:
            steps = ", ".join(f"{_percent(c.factor):+.1f} % at {points[c.index].commit_text}" for c in changes)
        series_rows.append([key.name, compared, len(points), points[-1].value, interval, steps, key.device])
        for change in changes:
            size, low, high = (_percent(factor) for factor in (change.factor, change.low, change.high))
            good, changed = map(_dated, _bounds(series, change))
            row = [key.name, compared, f"{size:+.1f} % ({low:+.1f} to {high:+.1f})", good, changed]
            step_rows.append([*row, _versions(series, change) or "no version", key.device])
    return (
        _with_hardware(
            "Series",
            ("benchmark", "compared", "points", "last", "95 % interval", "steps", "hardware"),
            series_rows,
            "Times as fast as the reference. Hardware is never mixed.",
        ),
        _with_hardware(
            "Steps",
            ("benchmark", "compared", "step", "last good", "first changed", "changed there", "hardware"),
            step_rows,
            "The step, with its 95 % interval, is after the last good and not after the first changed measurement.",
        ),
        Table(
            "Not read",
            ("where", "why"),
            [[note.where, note.reason] for note in history.notes],
            "",
            "Nothing of it was changed or deleted.",
        ),
    )


def _with_hardware(title: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], note: str) -> Table:
    """A table whose last column is the hardware: one that all rows share moves into the note."""
    shared = {row[-1] for row in rows}
    if len(shared) != 1:
        return Table(title, columns, rows, REGRESSION.slug, note)
    return Table(title, columns[:-1], [row[:-1] for row in rows], REGRESSION.slug, f"{note} Hardware: {shared.pop()}.")


def _chart(series: SpeedSeries, changes: list[Change]) -> Chart:
    points, key, values = series.points, series.key, series.values
    numbers = list(range(1, len(points) + 1))
    if key.absolute:
        unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if max(values) * s >= 1), ("µs", 1e6))
        lines = [Series("median time", numbers, [value * scale for value in values])]
        y_label, note = f"median time in {unit}", "Absolute times: no verdict."
    else:
        low, high = zip(*(point.interval for point in points), strict=True)
        lines = [Series("ratio and its 95 % interval", numbers, values, low=low, high=high)]
        y_label, note = f"times faster than {key.reference}", ""
    if changes:
        lines.append(_levels(changes, len(points)))
    markers = [
        Marker(f"{_percent(change.factor):+.1f} %, {points[change.index].commit_text}", change.index + 0.5, "step")
        for change in changes
    ]
    for index, changed in series.releases():
        # A runner's kernel changes every week: it is in the message of a step, and as a marker would hide the others.
        label = ", ".join(f"{name} {new}" for name, _, new in changed if name != "platform")
        markers += [Marker(label, index + 0.5, "new version")] if label else []
    first, last = points[0], points[-1]
    return Chart(
        "line",
        str(key),
        f"measurement (1: {first.time:%Y-%m-%d}, {len(points)}: {last.time:%Y-%m-%d})",
        y_label,
        lines,
        check=REGRESSION.slug,
        note=note,
        markers=markers,
    )


def _levels(changes: list[Change], count: int) -> Series:
    """The level between steps, as a broken line."""
    x: list[float] = []
    y: list[float] = []
    edges = [0, *(change.index for change in changes), count]
    levels = [changes[0].before, *(change.after for change in changes)]
    for begin, end, level in zip(edges, edges[1:], levels, strict=False):
        x += [begin + 0.5, end + 0.5, end + 0.5]
        y += [level, level, math.nan]
    return Series("level", x, y, "between steps")
