"""Data that lie exactly at a tie or a kink, where nothing says which of several results is the right one.

`relu` and `clamp` have other derivatives at 0, equal values have no order, a pool of equal values passes its gradient
to any of them. Beside such a point two implementations of one function agree, and what they give jumps there. So both
run twice more, with all data moved by the same little to one side and to the other: a result that agrees at both
places, and is not the same at both, or is made of what is not, is decided by a tie. Whatever else differs at a point
differs beside it as well.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ampcheck.core.errors import UsageError
from ampcheck.facts.sides import Change
from ampcheck.parity.calls import Side
from ampcheck.parity.execution import Execution, execute
from ampcheck.parity.functions import ALIKE, NONFINITE, SAME, is_mask, relate
from ampcheck.parity.trail import Trail
from ampcheck.records.results import Key

_NUDGE = 2.0**-42
"""Distance by which data are moved, relative to their typical size: far beyond the roundings of float64, which are of
2**-53, and too little for a smooth function to show it, see `FLOAT64_NOISE` and `FLOAT64_ALIKE`."""


class _Beside:
    """Moves data of the same values by the same, however often and in which order they enter. constants: also single
    numbers, and what holds zeros and ones alone; stayed: there was such."""

    def __init__(self, sign: int, *, constants: bool) -> None:
        self._sign, self._constants, self._seen = sign, constants, Counter[int]()
        self.stayed = False

    def __call__(self, exact: torch.Tensor) -> torch.Tensor:
        finite = exact.where(exact.isfinite(), 0.0)
        if not self._constants and (exact.numel() == 1 or is_mask(finite)):
            self.stayed = True
            return exact
        content = zlib.crc32(exact.numpy().tobytes())
        self._seen[content] += 1
        generator = torch.Generator().manual_seed(content + self._seen[content])
        noise = torch.rand(exact.numel(), generator=generator, dtype=torch.float64) - 0.5
        return exact + noise * (self._sign * _NUDGE * (float(finite.square().mean().sqrt()) or 1.0))


def decided_by_ties(
    sides: Sequence[Side], differing: Mapping[Key, str], changes: Sequence[Change] = (), *, constants: bool = False
) -> tuple[list[Key], list[Execution]]:
    """Those of the results in which two functions part that a tie or a kink decides, and both executions beside such;
    what is finite in one alone is no such.

    changes: of the data of both, before they are moved. constants: move masks and single numbers as well, which is done
    where nothing is found without.
    """
    places: list[list[Execution]] = []
    keys = [key for key, how in differing.items() if how != NONFINITE]
    beside = [_Beside(sign, constants=constants) for sign in (1, 1, -1, -1)]
    for moves in (beside[:2], beside[2:]):
        try:
            runs = [
                execute(
                    side, independent=True, trail=Trail(), change=partial(_changed, (*changes[i : i + 1], moves[i]))
                )
                for i, side in enumerate(sides)
            ]
        except UsageError:  # a function need not be defined there
            return [], []
        keys = [key for key in keys if all(key in run.results for run in runs) and _agree(runs, key)]
        places.append(runs)
        if not keys:
            break
    keys = [key for key in keys if any(_jumps(runs, key) for runs in zip(*places, strict=True))]
    if not keys and not constants and any(move.stayed for move in beside):
        return decided_by_ties(sides, differing, changes, constants=True)
    return keys, places[0]


def _changed(changes: Sequence[Change], exact: torch.Tensor) -> torch.Tensor:
    for change in changes:
        exact = change(exact)
    return exact


def _jumps(runs: Sequence[Execution], key: Key) -> bool:
    """Return whether a result, or a value on the way to it, is another on both sides of a point."""
    trails = [run.trail for run in runs if run.trail is not None and key in run.records]
    if len(trails) < 2 or not _agree(runs, key):
        return not _agree(runs, key)
    one, other = trails
    behind = one.behind([runs[0].records[key]])
    return len(one.records) != len(other.records) or any(
        one.records[number].differs(other.records[number]) for number in behind
    )


def _agree(runs: Sequence[Execution], key: Key) -> bool:
    a, b = (run.results[key] for run in runs)
    return relate(a, b) in (SAME, ALIKE)
