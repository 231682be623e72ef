"""A matrix of modes and precisions, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Scalar
from ampcheck.records.speed import Ratio
from ampcheck.records.startup import BreakEven
from ampcheck.records.threads import Threads

PAYS, DOES_NOT, UNDECIDED, WRONG = "pays", "does not pay", "undecided", "no win: wrong numbers"

SLOW = 3.0
"""Arms that take more than so many times as long as eager float32 are timed apart, with it and its twin."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One mode and precision.

    reason: why there are no times, if so. seconds: of the typical step. ratio: times faster than eager float32; gain:
    than eager mode in the same precision, None for eager mode itself. verdict: `PAYS`, `DOES_NOT`, `UNDECIDED` or
    `WRONG`. noise: of the A/A twin of eager float32 while the cell was timed, as a share. apart: timed with the slow
    arms. accuracy: an `ampcheck.Verdict`, "" where nothing was judged, and why; error: the largest relative error of an
    output against float64. peak: bytes. compiling: seconds that the first call took beyond a typical one, with empty
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
        """True if its numbers were judged, and are not wrong."""
        return self.accuracy in ("pass", "warn")


@dataclass(frozen=True, slots=True)
class MatrixStats:
    """All cells of one subject, whose times are paired.

    noise: the largest of the cells. cycles: paired blocks of each arm; apart: of each slow arm, 0 where there is none.
    spent: seconds of timed blocks. recompiled: graphs that were compiled while the arms were timed. threads: of
    all arms; None where a device computes.
    """

    subject: str
    cells: tuple[Cell, ...]
    device: str = "cpu"
    size: str = ""
    noise: float = 0.0
    cycles: int = 0
    apart: int = 0
    spent: float = 0.0
    recompiled: int = 0
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)
    conditions: Mapping[str, Scalar] = field(default_factory=dict)
    threads: Threads | None = None

    def cell(self, mode: str, precision: str) -> Cell:
        """The cell of a mode and precision. Raises `UsageError` where there is none."""
        for cell in self.cells:
            if (cell.mode, cell.precision) == (mode, precision):
                return cell
        known = "; ".join(cell.name for cell in self.cells)
        raise UsageError(f"{self.subject} has no cell {mode}, {precision}; there are {known}")

    @property
    def best(self) -> Cell | None:
        """The fastest cell that surely pays and whose numbers are judged, and not wrong."""
        return next((cell for cell in self.paying if cell.right), None)

    @property
    def paying(self) -> list[Cell]:
        """The cells that surely pay and are not known to be wrong, judged or not, the fastest first."""
        cells = [cell for cell in self.cells if cell.verdict == PAYS and cell.ratio is not None]
        return sorted(cells, key=lambda cell: -cell.ratio.low if cell.ratio else 0.0)
