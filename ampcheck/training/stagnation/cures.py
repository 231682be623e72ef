"""What a cure would do to updates that get lost, measured by replaying them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.torchtools.spacing import spacing

UNCURED = "without a cure"
WIDE = "float32"
KAHAN = "Kahan summation"
STOCHASTIC = "stochastic rounding"

_LONGEST = 512
_SPACINGS = 4.0
_REPLICATES = 4


@dataclass(frozen=True, slots=True)
class Cure:
    """What became of the same updates under one way to add them.

    arrives: the part of the true displacement that arrives, its projection on it (1.0 is all; of stochastic rounding
    the mean of 4 runs). error: the Euclidean norm of what is off, relative to the true displacement. steps: how many
    were replayed.
    """

    name: str
    arrives: float
    error: float
    steps: int

    def __str__(self) -> str:
        return f"{self.name} ({100 * self.arrives:.0f} %{' on average' if self.name == STOCHASTIC else ''})"


def measure_cures(
    start: torch.Tensor,
    added: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    gain: float = 1.0,
    steps: int | None = None,
) -> tuple[Cure, ...]:
    """Replay updates in the format `dtype` without a cure, in float32, with Kahan summation and stochastic rounding.

    start: values, float64 [elements]. added: what each of the observed steps adds to them, the same; they are repeated
    in order. gain: what a step multiplies the values by before. steps: how many; by default until the typical element
    should have moved by four spacings of its format, or, with a gain, until half of the value is replaced, 512 at most.

    Returns nothing where there is nothing to replay.
    """
    if not added:
        return ()
    start, updates = start.cpu().double(), [part.cpu().double() for part in added]
    keep = torch.stack([start, *updates]).isfinite().all(0)
    start, updates = start[keep], [update[keep] for update in updates]
    form, generator = format_of(dtype), torch.Generator().manual_seed(0)
    if steps is None and gain == 1.0:
        steps = _length(start, updates, form)
    elif steps is None:
        steps = max(1, min(_LONGEST, math.ceil(math.log(0.5) / math.log(gain))))

    def change(step: int, values: torch.Tensor) -> torch.Tensor:
        return updates[step % len(updates)] + (gain - 1.0) * values

    def replay(rounded: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor = start) -> torch.Tensor:
        for step in range(steps):
            values = rounded(values + change(step, values)).double()
        return values - start

    def kahan() -> torch.Tensor:
        """The compensation is kept in the same narrow format (Zamirai et al., arXiv:2010.06192, algorithm 3)."""
        values, missing = start, torch.zeros_like(start)
        for step in range(steps):
            wanted = (change(step, values + missing) + missing).to(dtype).double()
            reached = (values + wanted).to(dtype).double()
            missing = (wanted - (reached - values)).to(dtype).double()
            values = reached
        return values - start

    true = replay(lambda values: values)
    size = float(true.square().sum())
    if not size > 0.0:
        return ()
    wide = start.expand(_REPLICATES, -1)
    ends = {
        UNCURED: [replay(lambda values: values.to(dtype))],
        WIDE: [replay(lambda values: values.float())],
        KAHAN: [kahan()],
        STOCHASTIC: list(replay(lambda values: round_stochastically(values, form, generator), wide)),
    }
    cures = []
    for name, moved in ends.items():
        arrives = sum(float((end * true).sum()) for end in moved) / len(moved) / size
        error = sum(float((end - true).norm()) for end in moved) / len(moved) / math.sqrt(size)
        cures.append(Cure(name, arrives, error, steps))
    return tuple(cures)


def round_stochastically(values: torch.Tensor, form: FloatFormat, generator: torch.Generator) -> torch.Tensor:
    """Round float64 `values` to one of the two neighbours in a format, the nearer the likelier, right on average."""
    step = spacing(values, form)
    chance = torch.rand(values.shape, generator=generator, dtype=torch.float64)
    return (torch.floor(values / step + chance) * step).clamp(-form.max, form.max)


def _length(start: torch.Tensor, updates: Sequence[torch.Tensor], form: FloatFormat) -> int:
    total = torch.stack(list(updates)).sum(0).abs()
    moved = total > 0
    if not moved.any():
        return len(updates)
    rounds = float((_SPACINGS * spacing(start[moved], form) / total[moved]).median())
    return max(len(updates), min(_LONGEST, math.ceil(min(rounds, _LONGEST)) * len(updates)))
