"""Findings, tables and charts of a history: its steps, the commits between which they are, and the version changes.

A build of today cannot mend a commit of last week, so a step down is a `WARN`: the gate, base against head, is what
fails. `verdict=Verdict.FAIL` (`ampcheck history --fail`) makes it a failure, such as for a nightly job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ampcheck.checks import findings
from ampcheck.checks.speed import WHERE, percent_of
from ampcheck.checks.speed.regression import CHECK as REGRESSION
from ampcheck.core.limits import Limits
from ampcheck.core.run import Chart, Coverage, Marker, Run, Scalar, Series, Table, Verdict
from ampcheck.records.history import Change, History, SpeedSeries, Trend
from ampcheck.speed.trend.detect import EFFECT, HEIGHTS, LEAST, change_points


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
        Trend(
            series,
            () if series.key.absolute else tuple(change_points(series.values, effect=effect)),
            *(effect, verdict, LEAST, min(HEIGHTS)),
        )
        for series in history.series
    ]
    judged_trends = [finding for trend in trends for finding in findings(trend, Limits())]
    if not trends:
        judged_trends = [REGRESSION.skip("history", "the history has no points: nothing was judged", where=WHERE)]
    judged = [trend.series for trend in trends if not trend.series.key.absolute]
    unseen: dict[str, int] = {}
    if absolute := history.points - sum(len(series.points) for series in judged):
        unseen["points that are absolute times: no verdict"] = absolute
    if history.notes:
        unseen["lines or files that could not be read"] = len(history.notes)
    return Run(
        environment=dict(environment or {}),
        findings=tuple(judged_trends),
        coverage=Coverage({"points": history.points - absolute, "series": len(judged)}, unseen),
        tables=tuple(table for table in _tables(trends, history) if table.rows),
        charts=tuple(_chart(trend.series, trend.changes) for trend in trends),
        title=title,
    )


def _tables(trends: list[Trend], history: History) -> tuple[Table, ...]:
    series_rows: list[list[Scalar]] = []
    step_rows: list[list[Scalar]] = []
    for trend in trends:
        series, changes = trend.series, trend.changes
        key, points = series.key, series.points
        compared = "seconds" if key.absolute else f"{key.arm} / {key.reference}, {key.precision}"
        low, high = points[-1].interval
        interval = "" if key.absolute else f"{low:.3f} to {high:.3f}"
        steps = "no verdict" if key.absolute else "none" if len(points) >= LEAST else f"needs {LEAST} points"
        if changes:
            steps = ", ".join(f"{percent_of(c.factor):+.1f} % at {points[c.index].commit_text}" for c in changes)
        series_rows.append([key.name, compared, len(points), points[-1].value, interval, steps, key.device])
        for change in changes:
            size, low, high = (percent_of(factor) for factor in (change.factor, change.low, change.high))
            good, changed = (point.dated for point in trend.bounds(change))
            row = [key.name, compared, f"{size:+.1f} % ({low:+.1f} to {high:+.1f})", good, changed]
            step_rows.append([*row, trend.versions(change) or "no version", key.device])
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


def _chart(series: SpeedSeries, changes: Sequence[Change]) -> Chart:
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
        Marker(f"{percent_of(change.factor):+.1f} %, {points[change.index].commit_text}", change.index + 0.5, "step")
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


def _levels(changes: Sequence[Change], count: int) -> Series:
    """The level between steps, as a broken line."""
    x: list[float] = []
    y: list[float] = []
    edges = [0, *(change.index for change in changes), count]
    levels = [changes[0].before, *(change.after for change in changes)]
    for begin, end, level in zip(edges, edges[1:], levels, strict=False):
        x += [begin + 0.5, end + 0.5, end + 0.5]
        y += [level, level, math.nan]
    return Series("level", x, y, "between steps")
