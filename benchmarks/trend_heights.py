"""Where the detector's heights come from: eleven shapes of noise without a step, and how often a height is exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

POINTS = 60


def shapes(random: np.random.Generator, count: int) -> dict[str, Any]:
    """Noise of the eleven shapes from which the heights were taken, float64 [count, points]."""
    shape = (count, POINTS)
    normal = random.standard_normal(shape)

    def two(share: float, apart: float) -> Any:
        return normal + apart * (random.random(shape) < share)

    return {
        "normal": normal,
        "Laplace": random.laplace(size=shape),
        "uniform": random.random(shape),
        "Student's t with 3 degrees": random.standard_t(3, shape),
        "Student's t with 1 degree": random.standard_t(1, shape),
        "log-normal": np.exp(random.standard_normal(shape)),
        "every tenth point 5 times as wide": normal * np.where(random.random(shape) < 0.1, 5, 1),
        "two machines 3.3 apart, 50 %": two(0.5, 3.3),
        "two machines 10 apart, 50 %": two(0.5, 10),
        "two machines 5 apart, 30 %": two(0.3, 5),
        "two machines 5 apart, 15 %": two(0.15, 5),
    }


def heights(count: int, seed: int, at_once: int = 1000) -> list[dict[str, Any]]:
    """The share of series of which the statistic exceeds a height at any of the 60 points: no effect is asked for."""
    rows = []
    for name, series in shapes(np.random.default_rng(seed), count).items():
        detected = np.concatenate([_exceeding(series[k : k + at_once]) for k in range(0, count, at_once)], axis=1)
        rows.append(
            {"noise": name, "series": count, "alone": float(detected[0].mean()), "guarded": float(detected[1].mean())}
        )
        print(rows[-1], flush=True)
    return rows


def _exceeding(logs: Any) -> Any:
    """Whether each series exceeds a height, without and with the guards: bool [2, series]."""
    from ampcheck.speed.trend.detect import BEFORE, HEIGHTS, LEAST, WINDOW, heights_of, unguarded_statistics

    detected = np.zeros((2, len(logs)), dtype=bool)
    for count in range(LEAST, POINTS + 1):
        windows = logs[:, max(0, count - WINDOW) : count]
        afters = [k for k in HEIGHTS if k + BEFORE <= windows.shape[1]]
        z, bent, alike = unguarded_statistics(windows, afters)
        wanted, z = heights_of(z, afters), np.abs(z)
        guarded = np.where(z > bent, z * np.sqrt((1 - alike) / (1 + alike)), 0)
        detected |= np.stack([(z > wanted).any(axis=1), (guarded > wanted).any(axis=1)])
    return detected


def heights_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        "",
        f"Heights: the share of {rows[0]['series']:,} series of {POINTS} points of which the statistic exceeds a "
        "height after any point, no minimum effect being asked for; alone, as the heights were chosen (with other "
        "seeds), and with the two guards.",
        *("", "| noise | alone | with the guards |", "|---|---|---|"),
        *(f"| {row['noise']} | {row['alone']:.2%} | {row['guarded']:.2%} |" for row in rows),
    ]
