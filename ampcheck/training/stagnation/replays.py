"""What cures would do to the tensors that lose the most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ampcheck.training.stagnation.cures import measure_cures
from ampcheck.training.stagnation.forecast import FOLLOWS, SUM
from ampcheck.training.stagnation.updates import TensorUpdates

_LONGEST = 8192

_AVERAGED = 2048
"""Steps in which an average is replayed at most; three of its time constants otherwise."""

_MOST = 0.5


def replay_worst(tensors: Sequence[TensorUpdates]) -> None:
    """Cures are measured for the worst tensor of each role, of lost updates, of lost decay, and of those that stop."""
    worst: dict[int, TensorUpdates] = {}
    for role in {tensor.role for tensor in tensors}:
        here = [tensor for tensor in tensors if tensor.role == role and not tensor.compensates]
        ranks: tuple[Callable[[TensorUpdates], float], ...] = (
            lambda tensor: tensor.share if tensor.stop is None else 0.0,
            lambda tensor: tensor.decay.share if tensor.stop is None and tensor.share <= _MOST else 0.0,
            lambda tensor: tensor.stop.distance if tensor.stop is not None and tensor.stop.kind != SUM else 0.0,
            lambda tensor: float(tensor.stop is not None and tensor.stop.kind == SUM),
        )
        for rank, least in zip(ranks, (_MOST, _MOST, FOLLOWS, _MOST), strict=True):
            top = max(here, key=rank, default=None)
            if top is not None and rank(top) > least and top.samples:
                worst[id(top)] = top
    for tensor in worst.values():
        start, added, gain, steps = tensor.samples[0].old, [sample.update for sample in tensor.samples], 1.0, None
        if (stop := tensor.stop) is not None:
            added = [sample.added for sample in tensor.samples]
            gain, steps = stop.gain, min(_LONGEST, 2 * stop.steps)
            if stop.kind != SUM:  # the way from half of what it follows, as a change of that size is yet to come
                added = [
                    sample.added / (1.0 - factor) * (1.0 - gain)
                    for sample, factor in zip(tensor.samples, tensor.factors, strict=False)
                ]
                start, steps = added[-1] / (1.0 - gain) / 2, min(_AVERAGED, math.ceil(3.0 / (1.0 - gain)))
                start = torch.where(start == 0, tensor.samples[-1].old, start)
        elif tensor.share <= _MOST:
            added, gain = [torch.zeros_like(part) for part in added[:1]], tensor.decay.factor
            start = tensor.samples[-1].old
        elif (plan := tensor.plan) is not None:
            added = [sample.update * plan.tail / sample.rate for sample in tensor.samples if sample.rate > 0.0]
        tensor.cures = measure_cures(start, added, getattr(torch, tensor.dtype), gain=gain, steps=steps)
