"""Random bits that an optimizer adds to a float32 value before it cuts the lowest ones off, to round at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ampcheck.catalog.training import STAGNATION
from ampcheck.core.run import Finding, Where
from ampcheck.torchtools.storage import StorageMap

_LEAST = 128
"""Draws that show their range: so many span less than 3/4 of it once in 1e14 times."""

_SHORT = 0.75
"""The range of the draws, relative to the spacing of what is rounded to. A wider one may be centred noise of two."""

_COMPARISONS = ("lt", "le", "gt", "ge")

_Drawn = tuple[int, int, int]
"""The smallest and the largest draw, and how many there are; of none where noise was added twice."""


@dataclass(slots=True)
class Noise:
    """Draws in one line, in units of the last bit of what is rounded. bits: how many are cut off."""

    bits: int
    smallest: int
    largest: int
    draws: int = 0

    @property
    def relative(self) -> float:
        """Their range relative to the spacing."""
        return (self.largest - self.smallest + 1) / float(2**self.bits)


class NoiseWatch:
    """Finds random integers that are added to the bits of values of the loop of which the lowest are cut off then, or
    that are compared with these. `places` holds them by line: an addition to a `Lineage`."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, int | None], Noise] = {}
        self.begin(None)

    def begin(self, lineage: Any) -> None:
        """A step begins."""
        self._noisy, self._cut = StorageMap[_Drawn](), StorageMap[int]()
        self._next: tuple[StorageMap[Any], Any] | None = None
        self._used: tuple[int, _Drawn] | None = None

    def before(self, call: Any, lineage: Any) -> None:
        """Look at the operands of an op."""
        self._next = self._used = None
        base, operands = call.name.removesuffix("_"), call.args[:2]
        if base in ("bitwise_and", "__and__") and len(operands) == 2 and isinstance(operands[1], int):
            kept = operands[1] & 0xFFFFFFFF
            if bits := _bits_below(kept ^ 0xFFFFFFFF):
                drawn = self._noisy.get(operands[0])
                self._used = None if drawn is None else (bits, drawn)
            elif bits := _bits_below(kept):
                self._next = self._cut, bits
        elif base == "add" or base in _COMPARISONS:
            first, second = operands if len(operands) == 2 else (None, None)
            for noise, value in ((first, second), (second, first)):
                if not (_is_integer(noise) and _is_integer(value)) or lineage.form(noise).mask != lineage.drawn:
                    continue
                cut = self._cut.get(value)
                if base == "add" and lineage.form(value).mask & ~lineage.drawn:
                    self._next = self._noisy, _drawn(noise) if self._noisy.get(value) is None else (0, 0, 0)
                elif base != "add" and cut is not None and lineage.form(value).mask & ~lineage.drawn:
                    self._used = cut, _drawn(noise)

    def after(self, call: Any, lineage: Any, place: tuple[str, int | None]) -> None:
        """Note its result."""
        if self._next is not None and isinstance(call.out, torch.Tensor):
            known, value = self._next
            known.put(call.out, value)
        if self._used is not None:
            bits, (smallest, largest, draws) = self._used
            noise = self.places.setdefault(place, Noise(bits, smallest, largest))
            noise.smallest, noise.largest = min(noise.smallest, smallest), max(noise.largest, largest)
            noise.draws += draws


def check_noise(places: Mapping[tuple[str, int | None], Noise], subject: str) -> Iterator[Finding]:
    """`stagnation`: random bits that round an update cover the bits that are cut off."""
    for (file, line), noise in places.items():
        if noise.draws < _LEAST or noise.relative >= _SHORT:
            continue
        message = (
            f"random bits that round a value must cover the {noise.bits} bits that are cut off, or the mean of what is "
            f"rounded is not the value; {noise.draws:,} draws were from {noise.smallest:,} to {noise.largest:,} of "
            f"{2**noise.bits:,}: updates of one direction arrive too rarely, or never"
        )
        hint = f"draw from 0 to 2**{noise.bits} (torch.randint excludes its upper end)"
        where = Where("update", file=file, line=line)
        yield STAGNATION.fail(
            subject, message, where=where, observed=noise.relative, limit=_SHORT, unit="of the range", hint=hint
        )


def _bits_below(number: int) -> int:
    """k of 2**k - 1, where a mask has so many ones and is no whole word; else 0."""
    bits = number.bit_length()
    return bits if 0 < bits < 32 and number == 2**bits - 1 else 0


def _is_integer(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.numel() > 0


def _drawn(noise: torch.Tensor) -> _Drawn:
    return int(noise.min()), int(noise.max()), noise.numel()
