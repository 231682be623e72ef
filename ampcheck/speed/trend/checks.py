"""What a history says about speed: steps, since when, and what changed there. A report on the past, so it warns.

A build of today cannot mend a commit of last week, so a step down is a `WARN`: the gate, base against head, is what
fails. `verdict=Verdict.FAIL` (`ampcheck history --fail`) makes it a failure where one wants that, such as in a nightly
job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeAlias

from ampcheck.core.run import Chart, Coverage, Finding, Marker, Run, Scalar, Series, Table, Verdict, Where, passed
from ampcheck.speed.history.points import History, Point, SpeedSeries, changed_versions
from ampcheck.speed.trend.detect import EFFECT, HEIGHTS, LEAST, Change, change_points

SLUG = "regression"

RECENT = 30
"""How many points back a step down is warned of; older ones stand in the table."""

HERE = Where(phase="speed")

_Found: TypeAlias = tuple[SpeedSeries, list[Change]]


def check_trend(
    history: History, *, effect: float = EFFECT, recent: int = RECENT, verdict: Verdict = Verdict.WARN
) -> list[Finding]:
    """Findings of the slug `regression`, at least one for each series.

    effect: the smallest step that is told, as a share. recent: how many points back a step down is told. verdict: what
    it is. A step down that later points made good is none. Absolute times are skipped, since they wander by tens of
    per cent without a cause; a series of fewer than 20 points is undecided; a history without points is skipped.
    """
    found = [(series, changes_of(series, effect)) for series in history.series]
    return _all_judged(found, effect, recent, verdict)


def changes_of(series: SpeedSeries, effect: float = EFFECT) -> list[Change]:
    """The steps of a series; none of absolute times."""
    return [] if series.key.absolute else change_points(series.values, effect=effect)


def trend_run(
    history: History,
    *,
    effect: float = EFFECT,
    recent: int = RECENT,
    verdict: Verdict = Verdict.WARN,
    title: str = "history",
    environment: Mapping[str, Scalar] | None = None,
) -> Run:
    """The findings, as of `check_trend`, a table of the series, one of their steps, one of what could not be read, and
    a chart of each.
    """
    found = [(series, changes_of(series, effect)) for series in history.series]
    judged = [series for series in history.series if not series.key.absolute]
    unseen: dict[str, int] = {}
    if absolute := history.points - sum(len(series.points) for series in judged):
        unseen["points that are absolute times: no verdict"] = absolute
    if history.notes:
        unseen["lines or files that could not be read"] = len(history.notes)
    return Run(
        environment=dict(environment or {}),
        findings=tuple(_all_judged(found, effect, recent, verdict)),
        coverage=Coverage({"points": history.points - absolute, "series": len(judged)}, unseen),
        tables=tuple(
            table for table in (_series_table(found), _steps_table(found), _notes_table(history)) if table.rows
        ),
        charts=tuple(_chart(series, changes) for series, changes in found),
        title=title,
    )


def _all_judged(found: list[_Found], effect: float, recent: int, verdict: Verdict) -> list[Finding]:
    if not found:
        return [Finding(SLUG, Verdict.SKIP, "history", "the history has no points: nothing was judged", HERE)]
    return [finding for series, changes in found for finding in _judged(series, changes, effect, recent, verdict)]


def _judged(series: SpeedSeries, changes: list[Change], effect: float, recent: int, verdict: Verdict) -> list[Finding]:
    subject, count = str(series.key), len(series.points)
    if series.key.absolute:
        message = (
            "absolute times: no verdict, since they wander by tens of per cent without any change; "
            "a paired ratio in extra_info['ampcheck'] would be judged"
        )
        return [Finding(SLUG, Verdict.SKIP, subject, message, HERE)]
    if count < LEAST:
        message = f"a step is told from {LEAST} points of one kind of machine on; there {_are(count)}"
        return [Finding(SLUG, Verdict.UNDECIDED, subject, message, HERE, count, LEAST, "points")]
    slower = [change for change in changes if change.slower and not _made_good(series, change, effect)]
    found = [
        Finding(
            check=SLUG,
            verdict=verdict,
            subject=subject,
            message=_message(series, change),
            where=HERE,
            observed=_per_cent(change.factor),
            limit=-100 * effect,
            unit="%",
            hint=_hint(series, change),
        )
        for change in slower
        if change.index >= count - recent
    ]
    if found:
        return found
    told = f"no step down of {100 * effect:g} % or more in the last {min(recent, count)} points, of {count} looked at"
    if changes:
        last = changes[-1]
        told += f"; the last step, {_per_cent(last.factor):+.1f} %, is {count - last.index} points old"
        told += " and was made good" if last.slower and _made_good(series, last, effect) else ""
    return [passed(SLUG, subject, told, count, where=HERE)]


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _made_good(series: SpeedSeries, change: Change, effect: float) -> bool:
    """Whether the newest points are where they were before: a step up soon after one down has too few to be told."""
    return median(series.values[-min(HEIGHTS) :]) >= change.before / (1 + effect)


def _per_cent(factor: float) -> float:
    return 100 * (factor - 1)


def bounds(series: SpeedSeries, change: Change) -> tuple[Point, Point]:
    """The last point that is surely before the step and the first that is surely after it."""
    return series.points[change.earliest - 1], series.points[change.latest]


def _what_changed(series: SpeedSeries, change: Change) -> str:
    good, changed = bounds(series, change)
    versions = changed_versions(good.measured.fingerprint, changed.measured.fingerprint)
    return ", ".join(f"{name} {old} to {new}" for name, old, new in versions)


def _message(series: SpeedSeries, change: Change) -> str:
    good, changed = bounds(series, change)
    key, versions = series.key, _what_changed(series, change)
    fell, least, most = (-_per_cent(factor) for factor in (change.factor, change.high, change.low))
    return (
        f"{key.arm} must not become slower against {key.reference}: the ratio fell by {fell:.1f} % "
        f"(95 % interval {least:.1f} to {most:.1f} %), from {change.before:.3f} to {change.after:.3f}, after "
        f"{_named(good)}, the last good one, and not later than {_named(changed)}; "
        + (f"changed there: {versions}" if versions else "no version changed there")
        + f"; told after {change.told - change.index + 1} points"
    )


def _named(point: Point) -> str:
    return f"{point.commit_text} ({point.time:%Y-%m-%d})"


def _hint(series: SpeedSeries, change: Change) -> str:
    good, changed = bounds(series, change)
    confirm = "measure both in one job to confirm it: the ratio falls as well when the reference becomes faster"
    if not (good.commit and changed.commit) or good.commit == changed.commit:
        return confirm
    one, other = good.commit[:10], changed.commit[:10]
    return f"git log {one}..{other}; {confirm} (ampcheck speed TARGET --base {one})"


def _series_table(found: list[_Found]) -> Table:
    rows: list[list[Scalar]] = []
    for series, changes in found:
        last, key = series.points[-1], series.key
        low, high = last.interval
        steps = ", ".join(f"{_per_cent(c.factor):+.1f} % at {series.points[c.index].commit_text}" for c in changes)
        what = "seconds" if key.absolute else f"{key.arm} / {key.reference}, {key.precision}"
        interval = "" if key.absolute else f"{low:.3f} to {high:.3f}"
        enough = len(series.points) >= LEAST
        told = "no verdict" if key.absolute else steps or ("none" if enough else f"needs {LEAST} points")
        rows.append([key.name, what, len(series.points), last.value, interval, told, key.device])
    columns = ("benchmark", "compared", "points", "last", "95 % interval", "steps", "hardware")
    return _with_hardware("Series", columns, rows, "Times as fast as the reference. Hardware is never mixed.")


def _steps_table(found: list[_Found]) -> Table:
    rows: list[list[Scalar]] = []
    for series, changes in found:
        for change in changes:
            key, (good, changed) = series.key, bounds(series, change)
            low, high = _per_cent(change.low), _per_cent(change.high)
            step = f"{_per_cent(change.factor):+.1f} % ({low:+.1f} to {high:+.1f})"
            what = f"{key.arm} / {key.reference}, {key.precision}"
            row = [key.name, what, step, _named(good), _named(changed), _what_changed(series, change) or "no version"]
            rows.append([*row, key.device])
    columns = ("benchmark", "compared", "step", "last good", "first changed", "changed there", "hardware")
    note = (
        "The step, with its 95 % interval, lies after the last good and not later than the first changed measurement."
    )
    return _with_hardware("Steps", columns, rows, note)


def _with_hardware(title: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], note: str) -> Table:
    """A table whose last column is the hardware: one that all share is told once, in the note."""
    shared = {row[-1] for row in rows}
    if len(shared) != 1:
        return Table(title, columns, rows, SLUG, note)
    return Table(title, columns[:-1], [row[:-1] for row in rows], SLUG, f"{note} Hardware: {shared.pop()}.")


def _notes_table(history: History) -> Table:
    rows = [[note.place, note.reason] for note in history.notes]
    return Table("Not read", ("where", "why"), rows, "", "Nothing of it was changed or deleted.")


def _chart(series: SpeedSeries, changes: list[Change]) -> Chart:
    points, key = series.points, series.key
    numbers = list(range(1, len(points) + 1))
    if key.absolute:
        unit, scale = _unit(series.values)
        lines = [Series("median time", numbers, [value * scale for value in series.values])]
        y_label, note = f"median time in {unit}", "Absolute times: no verdict."
    else:
        low, high = zip(*(point.interval for point in points), strict=True)
        lines = [Series("ratio and its 95 % interval", numbers, series.values, low=low, high=high)]
        y_label, note = f"times faster than {key.reference}", ""
    if changes:
        lines.append(_levels(series, changes))
    markers = [
        Marker(f"{_per_cent(change.factor):+.1f} %, {points[change.index].commit_text}", change.index + 0.5, "step")
        for change in changes
    ]
    for index, what in series.releases():
        # A runner's kernel changes every week: it stands with a step, and as a marker it would hide the others.
        told = ", ".join(f"{name} {new}" for name, _, new in what if name != "platform")
        markers += [Marker(told, index + 0.5, "new version")] if told else []
    first, last = points[0], points[-1]
    return Chart(
        "line",
        str(key),
        f"measurement (1: {first.time:%Y-%m-%d}, {len(points)}: {last.time:%Y-%m-%d})",
        y_label,
        lines,
        check=SLUG,
        note=note,
        markers=markers,
    )


def _unit(seconds: list[float]) -> tuple[str, float]:
    """The unit in which the largest time is a number between 1 and 1000, and what seconds are multiplied by."""
    largest = max(seconds)
    return next(((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3)) if largest * scale >= 1), ("µs", 1e6))


def _levels(series: SpeedSeries, changes: list[Change]) -> Series:
    """The level between steps, as a broken line."""
    x: list[float] = []
    y: list[float] = []
    edges = [0, *(change.index for change in changes), len(series.points)]
    levels = [changes[0].before, *(change.after for change in changes)]
    for begin, end, level in zip(edges, edges[1:], levels, strict=False):
        x += [begin + 0.5, end + 0.5, end + 0.5]
        y += [level, level, float("nan")]
    return Series("level", x, y, "between steps")
