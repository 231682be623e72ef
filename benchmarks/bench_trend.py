"""Does the trend detector keep its word? False alarms per 60 points, power and delay, on simulated series.

Beside it, on the same series, what change-point libraries say with their usual settings: E-divisive as in Apache Otava
(window 50, p 0.001), and PELT as in ruptures (squared error with a penalty of 2 * variance * log n; radial kernel with
a penalty of log n, since the 10 of its examples finds nothing in 60 points). Neither is a dependency. They run under
another interpreter, since they ask for other versions:

    python benchmarks/bench_trend.py --libraries venv/bin/python --out reports/evidence/trend.json

They take most of the time. All series come from fixed seeds, so that a part may be measured again and the rest, what
the libraries said of the same series included, be kept:

    python benchmarks/bench_trend.py --parts "false alarms" keyed power places heights bound \
        --keep reports/evidence/trend.json --out reports/evidence/trend.json

Every series has one point a day of a ratio near 1.25. A false alarm is a series of 60 points without a step of which
any step is found: by the detector at any of its 60 days, by a library in one look at all 60; and, of fewer series, at
any day from the 20th on, which is how a history is read. A step is found where one is reported within 3 points of
it, by the detector and by the libraries alike. The part `heights` repeats the simulation that the detector's heights
are from; `bound` compares it with detectors that know more.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from trend_bound import bounds, bounds_text
from trend_heights import heights, heights_text

POINTS = 60
LEVEL = 1.25
SEED = 6
FIRST_DAY = 20
NEAR = 3  # points by which a step may be reported beside the planted one
FEWER, FEWEST = 2, 20  # of so many series the libraries see one: once, and every day
AT_FIVE = 300  # series of which the libraries are asked for a step, at most
PLACED = 500
SHAPED = 10_000  # series of each shape of noise from which the heights were taken
PARTS = ("false alarms", "keyed", "power", "places", "heights", "bound")
DAILY = ("normal, 1.5 %", "Student's t with 3 degrees", "drift of 5 % in 60 points")
LIBRARIES = ("E-divisive (Otava)", "PELT l2 (ruptures)", "PELT rbf (ruptures)")


def noises(random: np.random.Generator, count: int, points: int = POINTS) -> dict[str, tuple[str, Any]]:
    """Series of log-ratios without a step, float64 [count, points], by family; with what is promised of it."""
    shape = (count, points)
    normal = random.standard_normal(shape)
    day = np.arange(points)
    apart, seldom = random.random(shape) < 0.5, random.random(shape) < 0.15
    turns = np.cumsum(random.random(shape) < 1 / 3, axis=1) % 2  # the other machine for three days on average
    related = {rho: _autoregressive(random, shape, rho) for rho in (0.3, 0.6)}
    t3 = random.standard_t(3, shape)
    return {
        "normal, 1.5 %": ("promised", 0.015 * normal),
        "Student's t with 3 degrees": ("promised", 0.015 / math.sqrt(3) * t3),
        "every tenth point 5 times as wide": ("promised", 0.01 * normal * np.where(random.random(shape) < 0.1, 5, 1)),
        "log-normal": ("promised", 0.01 * np.exp(random.standard_normal(shape))),
        "two machines 6 % apart, by chance, 50 %": ("promised", 0.01 * normal + 0.06 * apart),
        "two machines 6 % apart, by chance, 15 %": ("promised", 0.01 * normal + 0.06 * seldom),
        "drift of 5 % in 60 points": ("promised", 0.01 * normal - 0.05 * day / points),
        "drift of 5 %, t with 3 degrees": ("promised", 0.01 / math.sqrt(3) * t3 - 0.05 * day / points),
        "drift at random, 0.1 % a point": ("promised", 0.01 * normal + _walk(random, shape, 0.001)),
        "neighbours alike, correlation 0.3": ("beyond", 0.015 * related[0.3]),
        "neighbours alike, correlation 0.6": ("beyond", 0.015 * related[0.6]),
        "drift that turns back after 2 %": ("beyond", 0.01 * normal - 0.02 * np.sin(np.pi * day / points)),
        "drift that turns back after 4 %": ("beyond", 0.01 * normal - 0.04 * np.sin(np.pi * day / points)),
        "drift at random, 0.3 % a point": ("beyond", 0.01 * normal + _walk(random, shape, 0.003)),
        "two machines 6 % apart, in turns of 3 points": ("beyond", 0.01 * normal + 0.06 * turns),
    }


def _walk(random: np.random.Generator, shape: tuple[int, int], size: float) -> Any:
    return np.cumsum(size * random.standard_normal(shape), axis=1)


def _autoregressive(random: np.random.Generator, shape: tuple[int, int], rho: float) -> Any:
    found = random.standard_normal(shape)
    for place in range(1, shape[1]):
        found[:, place] = rho * found[:, place - 1] + math.sqrt(1 - rho**2) * found[:, place]
    return found


def first_detected(logs: Any, begin: int = 0) -> Any:
    """After how many points each series is found to have a step, of more than `begin`; -1 for never."""
    return first_step(logs, begin)[0]


def first_step(logs: Any, begin: int = 0) -> tuple[Any, Any]:
    """The same, and how many points lie behind the step as the alarm has it."""
    from ampcheck.speed.trend.detect import LEAST, WINDOW, alarms

    detected, after = np.full(len(logs), -1), np.zeros(len(logs), dtype=int)
    for count in range(max(LEAST, begin + 1), logs.shape[1] + 1):
        found = alarms(logs[:, max(0, count - WINDOW) : count])
        new = (detected < 0) & (found > 0)
        detected, after = np.where(new, count, detected), np.where(new, found, after)
    return detected, after


def found_at(logs: Any, before: int) -> Any:
    """After how many points the step behind `before` is found, in its place; infinite where it is not."""
    from ampcheck.speed.trend.detect import WINDOW, _most_likely

    detected, after = first_step(logs, before)
    for row in np.flatnonzero(detected > 0):
        place = _most_likely(logs[row], max(0, detected[row] - WINDOW), int(detected[row]), int(after[row]))
        detected[row] = detected[row] if abs(place - before) <= NEAR else -1
    return np.where(detected > 0, detected - before, np.inf)


def with_step(random: np.random.Generator, count: int, before: int, sd: float, step: float, after: int = 20) -> Any:
    """Series that fall by `step` per cent after `before` points."""
    logs = sd * random.standard_normal((count, before + after))
    logs[:, before:] += math.log(1 - step / 100)
    return logs


def false_alarms(count: int, ask: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name, (kind, logs) in noises(np.random.default_rng(SEED), count).items():
        row = {"noise": name, "kind": kind, "ampcheck": float((first_detected(logs) >= 0).mean())}
        row |= {library: _any(found) for library, found in ask(logs[: count // FEWER]).items()}
        if name in DAILY:
            row |= {f"{library}, daily": value for library, value in daily(logs[: count // FEWEST], ask).items()}
        rows.append(row)
        print(row, flush=True)
    return rows


def _any(found: Any) -> float:
    return float((found >= 0).any(axis=1).mean())


def daily(logs: Any, ask: Callable[[Any], dict[str, Any]]) -> dict[str, float]:
    """The share of series in which a library finds a step when it looks at them each day."""
    days = range(FIRST_DAY, POINTS + 1)
    prefixes = np.concatenate([np.where(np.arange(POINTS) < day, logs, np.nan) for day in days])
    found = {name: (each >= 0).any(axis=1).reshape(len(days), len(logs)) for name, each in ask(prefixes).items()}
    return {name: float(each.any(axis=0).mean()) for name, each in found.items()}


def keyed(count: int) -> float:
    """Two machines 6 % apart, each with series of its own as in the history: whether either has a step."""
    random = np.random.default_rng(SEED + 1)
    logs = 0.015 * random.standard_normal((2, count, POINTS // 2))
    return float(((first_detected(logs[0]) >= 0) | (first_detected(logs[1] + 0.06) >= 0)).mean())


def power(count: int, few: int, ask: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for before in (25, 40):
        for step in (3, 5, 10):
            for sd in (0.005, 0.01, 0.0125, 0.015, 0.02):
                random = np.random.default_rng([SEED, before, step, round(sd * 1e4)])
                logs = with_step(random, count, before, sd, step)
                delay = found_at(logs, before)
                row: dict[str, Any] = {"before": before, "step": step, "sd": sd}
                row |= {f"ampcheck, {n} points": float((delay <= n).mean()) for n in (5, 8, 12, 20)}
                row["median delay"] = float(np.median(delay)) if np.isfinite(np.median(delay)) else None
                if before == 40 and sd in (0.01, 0.015):
                    found = ask(logs[:few, : before + 5])
                    row |= {f"{name}, 5 points": float(_near(each, before).mean()) for name, each in found.items()}
                rows.append(row)
                print(row, flush=True)
    return rows


def _near(found: Any, before: int) -> Any:
    return ((found >= 0) & (np.abs(found - before) <= NEAR)).any(axis=1)


def places(count: int) -> dict[str, float]:
    """How good the commit range is, for steps of 5 % with a noise of 1 %, 20 points later."""
    from ampcheck.speed.trend.detect import change_points

    random = np.random.default_rng(SEED + 2)
    logs = with_step(random, count, 40, 0.01, 5)
    batch, held, exact, width, covered, detected = first_detected(logs), 0, 0, [], 0, 0
    for row, expected in zip(logs, batch, strict=True):
        changes = change_points(np.exp(row))
        assert (changes[0].detected + 1 if changes else -1) == expected, "the batch and the detector differ"
        if not changes:
            continue
        change = changes[-1]
        detected += 1
        held += change.earliest <= 40 <= change.latest
        exact += change.index == 40
        width.append(change.latest - change.earliest + 1)
        covered += change.low <= 0.95 <= change.high
    shares = {"range holds the commit": held, "exact": exact, "interval holds the size": covered}
    return {
        **{name: value / detected for name, value in shares.items()},
        "mean commits in the range": float(np.mean(width)),
    }


# Libraries ------------------------------------------------------------------------------------------------------------


def asking(interpreter: str | None) -> Callable[[Any], dict[str, Any]]:
    """Ask the libraries under `interpreter` for the steps of log-ratios; none where there is no interpreter."""
    if interpreter is None:
        return lambda _: {}

    def ask(logs: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            given, taken = Path(folder) / "given.npy", Path(folder) / "taken.npz"
            np.save(given, logs)
            subprocess.run([interpreter, __file__, "--judge", str(given), str(taken)], check=True)
            with np.load(taken) as found:
                return {name: found[name] for name in LIBRARIES if name in found}

    return ask


def judge(given: str, taken: str) -> None:
    """The other interpreter's part: indices of steps, int [series, most], filled up with -1."""
    logs = [row[np.isfinite(row)] for row in np.load(given)]
    found: dict[str, list[list[int]]] = {}
    try:
        from otava.analysis import compute_change_points

        found[LIBRARIES[0]] = [[point.index for point in compute_change_points(list(np.exp(y)))[0]] for y in logs]
    except ImportError as error:
        print(f"no Otava: {error}", file=sys.stderr)
    try:
        import ruptures

        for name, kernel in zip(LIBRARIES[1:], ("linear", "rbf"), strict=True):
            found[name] = [_pelt(ruptures, kernel, row) for row in logs]
    except ImportError as error:
        print(f"no ruptures: {error}", file=sys.stderr)
    np.savez(taken, **{name: _filled(rows) for name, rows in found.items()})


def _pelt(ruptures: Any, kernel: str, row: Any) -> list[int]:
    gaps = np.diff(row)
    variance = (np.median(np.abs(gaps - np.median(gaps))) / 0.6745) ** 2 / 2
    penalty = 2 * variance * math.log(len(row)) if kernel == "linear" else math.log(len(row))
    detected: list[int] = ruptures.KernelCPD(kernel=kernel, min_size=2).fit(row).predict(pen=penalty)
    return detected[:-1]


def _filled(rows: Sequence[Sequence[int]]) -> Any:
    found = np.full((len(rows), max(map(len, rows), default=0) or 1), -1)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found


# Report ---------------------------------------------------------------------------------------------------------------


def report(data: dict[str, Any]) -> list[str]:
    names = [name for name in ("ampcheck", *LIBRARIES) if name in data["false alarms"][0]]
    worst = max(row["ampcheck"] for row in data["false alarms"] if row["kind"] == "promised")
    count = data["series"]
    lines = [
        f"False alarms: the share of series of {POINTS} points without a step in which one is found. ampcheck looks at "
        f"{count:,} series of each family, after every point; the libraries at the first {count // FEWER:,} of them, "
        f"once, and at the first {count // FEWEST:,} every day from the 20th on (in brackets).",
        *("", f"At most 1 % is promised of the upper families; found at most {worst:.2%}.", ""),
        "| noise | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for kind in ("promised", "beyond"):
        lines += [f"| *{kind}* |" + " |" * len(names)]
        for row in data["false alarms"]:
            if row["kind"] == kind:
                shares = [f"{row[name]:.2%}" + _daily_text(row, name) for name in names]
                lines.append(f"| {row['noise']} | " + " | ".join(shares) + " |")
    lines += [
        "",
        f"Two machines 6 % apart, separated by their hardware: {data['keyed']:.2%}.",
        "",
        f"Power: the share of {count:,} steps that is found within so many points after them and within {NEAR} points "
        "of their place, by the noise's standard deviation (normal) and the points before the step. In brackets "
        f"{', '.join(LIBRARIES)}, asked once with five points after the step, of the first {min(AT_FIVE, count)} "
        "series, by the same criterion.",
        "",
        "| before | step | noise | 5 points | 8 | 12 | 20 | median delay |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["power"]:
        beside = ", ".join(f"{row[f'{name}, 5 points']:.0%}" for name in LIBRARIES if f"{name}, 5 points" in row)
        shares = [f"{row[f'ampcheck, {n} points']:.1%}" for n in (5, 8, 12, 20)]
        shares[0] += f" ({beside})" if beside else ""
        delay = "–" if row["median delay"] is None else f"{row['median delay']:g}"
        lines.append(f"| {row['before']} | {row['step']} % | {row['sd']:.2%} | {' | '.join(shares)} | {delay} |")
    detected = data["places"]
    lines += [
        "",
        f"Of {min(PLACED, count)} steps of 5 % with a noise of 1 %, 20 points later: "
        + "; ".join(f"{k}: {v:.3g}" for k, v in detected.items())
        + ".",
    ]
    lines += heights_text(data["heights"]) if "heights" in data else []
    lines += bounds_text(data["bound"]) if "bound" in data else []
    if len(names) == 1:
        lines += ["", "The libraries were not asked: no interpreter that has them was named (--libraries)."]
    if "kept" in data:
        detected = ", ".join([*data["kept"]["parts"], "what the libraries said"])
        lines += ["", f"Kept from `{data['kept']['of']}`, as the series are the same: {detected}."]
    return [*lines, "", "Seconds: " + ", ".join(f"{part} {spent:.0f}" for part, spent in data["seconds"].items()) + "."]


def _daily_text(row: dict[str, Any], name: str) -> str:
    return f" (daily {row[f'{name}, daily']:.0%})" if f"{name}, daily" in row else ""


def measured(parts: Sequence[str], count: int, ask: Callable[[Any], dict[str, Any]], kept: Any) -> dict[str, Any]:
    """The parts that are asked for, and what is kept of the others and of the libraries."""
    ways: dict[str, Callable[[], Any]] = {
        "false alarms": lambda: false_alarms(count, ask),
        "keyed": lambda: keyed(count),
        "power": lambda: power(count, min(AT_FIVE, count), ask),
        "places": lambda: places(min(PLACED, count)),
        "heights": lambda: heights(min(SHAPED, 5 * count), SEED + 3),
        "bound": lambda: bounds(min(SHAPED, 5 * count), SEED + 4),
    }
    spent = kept.get("seconds", {})
    data: dict[str, Any] = {"series": count, "points": POINTS, "seed": SEED}
    data["seconds"] = dict(spent) if isinstance(spent, dict) else {"all at first, the libraries included,": spent}
    if kept:
        first = kept["kept"]["of"] if "kept" in kept else kept.get("command", "")
        data["kept"] = {"of": first, "parts": [part for part in PARTS if part in kept and part not in parts]}
    for part in PARTS:
        begin = time.perf_counter()
        if part in parts:
            data[part] = ways[part]()
            data["seconds"][part] = time.perf_counter() - begin
            if part in ("false alarms", "power"):
                data[part] = [
                    {**before, **row} for before, row in zip(_of_libraries(kept.get(part)), data[part], strict=False)
                ]
        elif part in kept:
            data[part] = kept[part]
    return data


def _of_libraries(rows: Sequence[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    """What the libraries said, row by row; without end."""
    for row in rows or ():
        yield {name: value for name, value in row.items() if name.startswith(LIBRARIES)}
    yield from repeat({})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=2000, help="series of each family (default: 2000)")
    parser.add_argument("--libraries", metavar="PYTHON", help="an interpreter with apache-otava and ruptures")
    parser.add_argument(
        "--parts", nargs="+", default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--keep", type=Path, metavar="PATH", help="evidence from which all the rest is taken")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write the evidence here")
    parser.add_argument("--judge", nargs=2, metavar=("GIVEN", "TAKEN"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.judge:
        judge(*options.judge)
        return
    if wrong := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {wrong[0]!r}, but {', '.join(PARTS)}")
    kept = json.loads(options.keep.read_text(encoding="utf-8")) if options.keep else {}
    if kept and [kept[name] for name in ("series", "points", "seed")] != [options.series, POINTS, SEED]:
        parser.error(f"{options.keep} is of other series")
    if missing := [part for part in PARTS[:4] if part not in options.parts and part not in kept]:
        parser.error(f"{missing[0]} is neither measured nor kept")
    data = measured(options.parts, options.series, asking(options.libraries), kept)
    lines = report(data)
    print("\n".join(lines))
    if options.out:
        from _evidence import write_evidence

        write_evidence(options.out, data, lines)


if __name__ == "__main__":
    main()
