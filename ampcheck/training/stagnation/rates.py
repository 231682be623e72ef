"""Learning rates, and the share of updates that is still lost at the end of a warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ampcheck.core.formats import FloatFormat
from ampcheck.torchtools.spacing import spacing
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.stagnation.forecast import Sample


class Rate(NamedTuple):
    """A learning rate: the one of now, NaN for no number, and the largest that the schedule of its group names.

    A warm-up begins far below the rate that an optimizer was made with.
    """

    now: float
    largest: float


def rates_of(loop: TrainingLoop) -> Mapping[str, Rate]:
    """The learning rates by the names of parameters."""
    names = {id(parameter): name for name, parameter in loop.parameters()}
    return {
        names[id(parameter)]: _rate(group)
        for optimizer in loop.optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def _rate(group: Mapping[str, Any]) -> Rate:
    values = [group.get(key) for key in ("lr", "initial_lr", "max_lr")]  # the others are written by schedulers
    rates = [float(value) if isinstance(value, (int, float, torch.Tensor)) else math.nan for value in values]
    return Rate(rates[0], max((rate for rate in rates if math.isfinite(rate)), default=math.nan))


def share_lost(samples: Sequence[Sample], largest: float, form: FloatFormat) -> float | None:
    """The share of updates like those of `samples` that is lost at the largest rate; None where theirs is steady."""
    known = [sample for sample in samples if sample.rate > 0.0]
    if not known or not known[0].rate < known[-1].rate:
        return None
    lost = [
        sample.update[moved].abs() * max(1.0, largest / sample.rate) <= spacing(sample.old[moved], form) / 2
        for sample in known
        if (moved := (sample.update != 0) & sample.update.isfinite() & sample.old.isfinite()).any()
    ]
    return float(torch.cat(lost).double().mean()) if lost else None
