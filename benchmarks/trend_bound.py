"""How much power any detector can have: a step of 5 per cent within five points, with a noise of 2 per cent.

Each column is a detector that knows something of normal noise, calibrated, as ampcheck's, to alarms in 1 per cent of
series of 60 points without a step, each judged after every point from the 20th on; three of four alarms are of falls:

- `level, noise and size`: the likelihood ratio of a fall of this size, 1 to 5 points ago (Shiryaev and Roberts), with
  the true level and standard deviation. No drift.
- `normal noise, no drift`: the t-test of the last five points against all before them.
- `normal noise`: the same beside a straight line: level, slope and standard deviation from the points at hand. No test
  of five points that is invariant under drift is more powerful, at the same rate of alarms after each point.

The limit is none of a method: a step of 5 per cent after 40 points, with this noise, is 4.5 standard deviations from a
drift of 4 per cent in 60 points, in which no step may be reported either. `at most` bounds every procedure whose alarms
without a step are spread evenly over the series: those of nine blocks of five points are exclusive, so that the test
of one has a ninth of the level, and none is better than the t-test that knows where the step is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

POINTS, FIRST, WINDOW = 60, 20, 50
STEP, NOISE, WITHIN = 0.05, 0.02, 5
ALARMS = 0.0075  # of falls
SHIFT = math.log(1 - STEP) / NOISE
BEFORE = (25, 40)
ENOUGH = 200_000  # draws of Student's t

Statistic = Callable[[Any], Any]


def likelihood(windows: Any) -> Any:
    """The log of the summed likelihood ratios of a fall before each of the last points."""
    afters = range(1, WITHIN + 1)
    return np.logaddexp.reduce([SHIFT * windows[:, -k:].sum(axis=1) - k * SHIFT**2 / 2 for k in afters], axis=0)


def t_test(windows: Any, degree: int) -> Any:
    """z of a fall before the last points, beside a polynomial: the root of n - 2 times a correlation."""
    count = windows.shape[1]
    basis = np.linalg.qr(np.vander(np.linspace(-1, 1, count), degree + 1))[0]
    step = (np.arange(count) >= count - WITHIN) * 1.0
    step -= basis @ (basis.T @ step)
    residuals = windows - (windows @ basis) @ basis.T
    return -(residuals @ step) / np.linalg.norm(step) / np.linalg.norm(residuals, axis=1) * math.sqrt(count - 2)


DETECTORS: dict[str, Statistic] = {
    "level, noise and size": likelihood,
    "normal noise, no drift": lambda windows: t_test(windows, 0),
    "normal noise": lambda windows: t_test(windows, 1),
}


def bounds(count: int, seed: int) -> list[dict[str, Any]]:
    """The power of each detector, and of ampcheck's, for each number of points before the step, with its interval."""
    from bench_trend import found_at

    random = np.random.default_rng(seed)
    quiet = random.standard_normal((count, POINTS))
    rows = []
    for before in BEFORE:
        stepped = random.standard_normal((count, before + WITHIN))
        stepped[:, before:] += SHIFT
        row: dict[str, Any] = {"before": before, "series": count, "at most": at_most(before, random)}
        for name, statistic in DETECTORS.items():
            looks = [statistic(quiet[:, max(0, n - WINDOW) : n]) for n in range(FIRST, POINTS + 1)]
            height = np.quantile(np.max(looks, axis=0), 1 - ALARMS)
            after = [statistic(stepped[:, max(0, n - WINDOW) : n]) for n in range(before + 1, before + WITHIN + 1)]
            after = after if statistic is likelihood else after[-1:]
            row[name] = _share(np.max(after, axis=0) > height)
        row["ampcheck"] = _share(found_at(NOISE * stepped, before) <= WITHIN)
        rows.append(row)
        print(row, flush=True)
    return rows


def at_most(before: int, random: np.random.Generator) -> float:
    """The power of the t-test at a ninth of the alarms, with drift."""
    count = before + WITHIN
    basis = np.linalg.qr(np.vander(np.linspace(-1, 1, count), 2))[0]
    step = (np.arange(count) >= before) * 1.0
    step -= basis @ (basis.T @ step)
    normal, scale = random.standard_normal((2, ENOUGH)), np.sqrt(random.chisquare(count - 3, ENOUGH) / (count - 3))
    height = np.quantile(normal[0] / scale, 1 - ALARMS / 9)
    return float(((normal[1] - SHIFT * np.linalg.norm(step)) / scale > height).mean())


def _share(found: Any) -> list[float]:
    """A share with its 95 per cent interval (Wilson)."""
    count, share, z = len(found), float(found.mean()), 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return [share, middle - reach, middle + reach]


def bounds_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table."""
    return [
        "",
        f"Bound: the power of detectors that know more, for a fall of {STEP:.0%} with a noise of {NOISE:.0%}, within "
        f"{WITHIN} points, all with alarms of a fall in {ALARMS:.2%} of series of {POINTS} points without a step; "
        f"{rows[0]['series']:,} series of each, 95 % intervals. The detector promises to report no drift and knows the "
        "shape of no noise; *normal noise* is the best test that allows for a drift. At most: any procedure whose "
        "alarms are spread evenly.",
        *("", "| before | " + " | ".join(DETECTORS) + " | at most | ampcheck | of *normal noise* |"),
        "|---|" + "---|" * (len(DETECTORS) + 3),
        *(
            f"| {row['before']} | {' | '.join(_text(row[name]) for name in DETECTORS)} | {row['at most']:.1%} | "
            f"{_text(row['ampcheck'])} | {row['ampcheck'][0] / row['normal noise'][0]:.0%} |"
            for row in rows
        ),
    ]


def _text(share: Sequence[float]) -> str:
    return f"{share[0]:.1%} ({share[1]:.1%} to {share[2]:.1%})"
