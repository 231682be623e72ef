"""What a matrix of modes and precisions leaves behind, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.run import Scalar
from ampcheck.speed.startup.breakeven import BreakEven
from ampcheck.speed.stats import Ratio

SCHEMA = 1
"""Version of a `WorkloadStats` as data. 1: the first."""

PAYS, DOES_NOT, UNDECIDED, WRONG = "pays", "does not pay", "undecided", "no win: wrong numbers"

EAGER, FLOAT32 = "eager", "float32"

SLOW = 3.0
"""Arms that take more than so many times as long as eager float32 are timed apart, with it and its twin."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload in one mode and precision.

    reason: why there are no times; "" where there are. seconds: of the typical step. ratio: times faster than eager
    mode in float32; gain: than eager mode in the same precision, None for eager mode itself. verdict: `PAYS`,
    `DOES_NOT`, `UNDECIDED` or `WRONG` on the ratio. noise: how far the A/A twin of eager float32 was from it while the
    cell was timed, as a share. apart: timed in the measurement of what is much slower. accuracy: an `ampcheck.Verdict`,
    "" where nothing was judged, and why in words; error: the largest relative error of an output against float64. peak:
    bytes, None where it is unknown. compiling: seconds that the first call took beyond a typical one, with empty
    caches. breaks: graph breaks.
    """

    mode: str
    precision: str
    reason: str = ""
    failed: bool = False
    seconds: float = 0.0
    ratio: Ratio | None = None
    gain: Ratio | None = None
    verdict: str = ""
    noise: float = 0.0
    apart: bool = False
    accuracy: str = ""
    why: str = ""
    error: float | None = None
    peak: int | None = None
    compiling: float | None = None
    graphs: int = 0
    breaks: int = 0
    break_even: BreakEven | None = None

    @property
    def name(self) -> str:
        """Mode and precision."""
        return f"{self.mode}, {self.precision}"

    @property
    def right(self) -> bool:
        """Whether its numbers were judged, and are not wrong."""
        return self.accuracy in ("pass", "warn")


@dataclass(frozen=True, slots=True)
class WorkloadStats:
    """All cells of one workload, whose times are paired.

    noise: how far the A/A twin of eager float32 is from it at most, as a share. cycles: paired blocks of each arm;
    apart: of each arm that is much slower, 0 where there is none. spent: seconds of timed blocks. recompiled: graphs
    that were compiled while the arms were timed, which spoils a time.
    """

    workload: str
    cells: tuple[Cell, ...]
    device: str = "cpu"
    size: str = "small"
    noise: float = 0.0
    cycles: int = 0
    apart: int = 0
    spent: float = 0.0
    recompiled: int = 0
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)
    conditions: Mapping[str, Scalar] = field(default_factory=dict)

    def cell(self, mode: str, precision: str) -> Cell:
        """The cell of a mode and precision. Raises `UsageError` where there is none."""
        for cell in self.cells:
            if (cell.mode, cell.precision) == (mode, precision):
                return cell
        known = "; ".join(cell.name for cell in self.cells)
        raise UsageError(f"{self.workload} has no cell {mode}, {precision}; there are {known}")

    @property
    def best(self) -> Cell | None:
        """The fastest cell that surely pays and whose numbers are judged, and not wrong."""
        return next((cell for cell in self.paying if cell.right), None)

    @property
    def paying(self) -> list[Cell]:
        """The cells that surely pay and are not known to be wrong, judged or not, the fastest first."""
        found = [cell for cell in self.cells if cell.verdict == PAYS and cell.ratio is not None]
        return sorted(found, key=lambda cell: -cell.ratio.low if cell.ratio else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """These figures as data for `json.dumps`; what is infinite stands as None."""
        plain: dict[str, Any] = _finite(asdict(self))
        return {"schema": SCHEMA, **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkloadStats:
        """The figures that `to_dict` made. Raises `UsageError` for a newer schema or damaged data."""
        require_schema(data, "this", "matrix of ampcheck", SCHEMA)
        try:
            plain = {name: value for name, value in data.items() if name != "schema"}
            cells = tuple(_cell(one) for one in plain["cells"])
            return cls(**{**plain, "cells": cells, "noise": _infinite(plain.get("noise", 0.0))})
        except (KeyError, TypeError) as error:
            raise UsageError(f"this matrix of ampcheck is damaged ({error}): measure it anew") from error


@dataclass(frozen=True, slots=True)
class MatrixStats:
    """Workloads in every mode and precision asked for."""

    workloads: tuple[WorkloadStats, ...]

    @property
    def cells(self) -> Iterator[tuple[WorkloadStats, Cell]]:
        """Each cell with its workload."""
        return ((workload, cell) for workload in self.workloads for cell in workload.cells)


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Of ratios; None of none."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _cell(data: Mapping[str, Any]) -> Cell:
    held: dict[str, Any] = {**data, "noise": _infinite(data.get("noise", 0.0))}
    for name in ("ratio", "gain"):
        held[name] = Ratio(**{k: _infinite(v) for k, v in held[name].items()}) if held.get(name) else None
    if held.get("break_even"):
        held["break_even"] = BreakEven(**{k: _infinite(v) for k, v in held["break_even"].items()})
    return Cell(**held)


def _infinite(value: Any) -> Any:
    return math.inf if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value
