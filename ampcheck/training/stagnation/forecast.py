"""Where a tensor that builds on its own value will stop, derived from what steps keep of it and what they add.

A step makes `gain * m + added` of a value m. In a format with unit roundoff u the result is m again once the change is
at most half of the spacing at m, which lies between u / 2 and u of m:

- average (0 < gain < 1): the change is (1 - gain) times the distance to what it follows. A distance of half of the
  spacing by (1 - gain), between u / 2 and u of m by (1 - gain), is therefore never closed.
- mean of all values so far: the same with 1 - gain = 1 / n, which falls from step to step.
- sum (gain 1): addends of one size stop at 2^p of them, p the bits of the significand.

When that happens is replayed with the observed addends, over and over, on a few elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from ampcheck.core.formats import format_of
from ampcheck.records.stagnation import AVERAGE, FOLLOWS, MEAN, SUM, Stop
from ampcheck.torchtools.spacing import spacing

ONCE, APART, COARSE = "once", "apart", "coarse"
"""Ways to compute an average: rounded once, the product before the sum as well, or with a gain that was rounded too."""

_NOISE = 3.0
"""In standard deviations: by so much does what an average follows vary often enough to carry it on."""

_COUNTED = 0.01
"""The distance from consecutive numbers of the counts that the gains of a cumulative mean stand for."""

LOST = 0.9
"""The share of lost updates from which a tensor counts as standing still."""

_STEADY = 0.9
"""The share of the elements of a sum that grew in one direction all along, from which it is no walk to and fro."""

_FAR_BETTER = 0.25

_ELEMENTS = 64

_Name = TypeVar("_Name")


class Sample(NamedTuple):
    """A step of a tensor, the same elements (at most 512) in each, float64 [elements].

    old, new: the values before and after; update: what they should have changed by; added: the part of it that does not
    depend on them; rate: the learning rate in this step, NaN where there is none.
    """

    old: torch.Tensor
    new: torch.Tensor
    update: torch.Tensor
    added: torch.Tensor
    rate: float = math.nan


@dataclass(frozen=True, slots=True)
class Course:
    """State of a tensor that builds on itself, in its own direction; float64 [elements] (added: [steps, ...]).

    factor, apart: what the value is really multiplied by, and whether the product is rounded before anything is added.
    count: of a mean, the values so far. never: the distance that is never closed; of a mean, that of its values.
    """

    kind: str
    dtype: torch.dtype
    gain: float
    factor: float
    apart: bool
    count: float
    now: torch.Tensor
    added: torch.Tensor
    never: torch.Tensor


def course_of(
    samples: Sequence[Sample], gains: Sequence[float], dtype: torch.dtype, horizon: int, arithmetic: str = ONCE
) -> Course | None:
    """Return what is known of a tensor that will stop; None for one that goes to and fro, or that follows closely.

    gains: what its value was multiplied by in each step. arithmetic: what is likely, where the samples do not say.
    """
    pairs = [(sample, gain) for sample, gain in zip(samples, gains, strict=False) if gain != 0.0]
    samples, gains = [sample for sample, _ in pairs], [gain for _, gain in pairs]
    if len(samples) < 2:
        return None
    added, now = torch.stack([sample.added for sample in samples]), samples[-1].new
    kept = added.isfinite().all(0) & now.isfinite() & ((added != 0).any(0) | ((now != 0) & (gains[-1] != 1.0)))
    part = slice(None, None, max(1, int(kept.sum()) // _ELEMENTS))
    added, now = added[:, kept][:, part], now[kept][part]
    if not now.numel():
        return None
    if all(gain == 1.0 for gain in gains):
        steady = (added > 0).any(0) != (added < 0).any(0)
        if float(steady.double().mean()) < _STEADY:
            return None
        added, now = added[:, steady], now[steady]
        return Course(SUM, dtype, 1.0, 1.0, False, 0.0, now * added.sum(0).sign(), added.abs(), torch.zeros_like(now))
    if not all(0.0 < gain < 1.0 for gain in gains):
        return None
    counts = [1.0 / (1.0 - gain) for gain in gains]
    is_mean = all(abs(later - earlier - 1.0) < _COUNTED for earlier, later in pairwise(counts))
    gain = 1.0 - 1.0 / (counts[-1] + horizon) if is_mean else max(gains)
    weights = 1.0 - torch.tensor(gains, dtype=torch.float64)[:, None]
    targets = added / weights
    sign = torch.where(targets.mean(0) == 0, now.sign(), targets.mean(0).sign())
    targets, now = targets * sign, now * sign
    size = torch.maximum(targets.mean(0), now.abs())
    half = spacing(size, format_of(dtype)) / 2
    # Nothing takes away from a value whose decay rounds back to it, however much the addends vary.
    grows = ((1.0 - gain) * size < half) & (targets >= 0).all(0)
    never = (half / (1.0 - gain) - _NOISE * targets.std(0) * ~grows).clamp(min=0.0)
    if float((never / size).median()) <= FOLLOWS:
        return None
    if is_mean:
        return Course(MEAN, dtype, gain, gain, False, counts[-1], now, targets, (targets - now).abs().amax(0))
    return Course(
        AVERAGE, dtype, gain, *_arithmetic(samples, gains, dtype, arithmetic), 0.0, now, (1.0 - gain) * targets, never
    )


def _arithmetic(
    samples: Sequence[Sample], gains: Sequence[float], dtype: torch.dtype, likely: str
) -> tuple[float, bool]:
    """Return what a value is multiplied by in the end, and whether the product is rounded: as is likely, unless another
    way explains the samples far better. What was added had been rounded itself, so that none explains all of them."""
    narrow = [float(torch.tensor(gain, dtype=dtype)) for gain in gains]
    ways = {ONCE: (gains, False), APART: (gains, True), COARSE: (narrow, True)}
    errors = dict.fromkeys(ways, 0.0)
    for way in errors:
        factors, apart = ways[way]
        for sample, factor in zip(samples, factors, strict=True):
            product = factor * sample.old
            after = (product.to(dtype).double() if apart else product) + sample.added
            errors[way] += float((after.to(dtype).double() - sample.new).abs().nansum())
    best = min(errors, key=lambda way: errors[way])
    factors, apart = ways[best if errors[best] < _FAR_BETTER * errors[likely] else likely]
    return max(factors), apart


def stops(courses: Mapping[_Name, Course], horizon: int) -> dict[_Name, Stop]:
    """Where tensors stop within `horizon` steps. Tensors of one kind are replayed together."""
    groups: dict[object, list[_Name]] = {}
    for name, course in courses.items():
        groups.setdefault((course.dtype, course.apart, course.kind, len(course.added)), []).append(name)
    ended: dict[_Name, Stop] = {}
    for names in groups.values():
        group = [courses[name] for name in names]
        ends, steps = _of_means(group) if group[0].kind == MEAN else _replayed(group, horizon)
        sizes = [course.now.numel() for course in group]
        for name, course, end, left in zip(
            names, group, *(torch.split(part, sizes) for part in (ends, steps)), strict=True
        ):
            if float(left.median()) < horizon:
                stop = _stop(course, end, math.ceil(float(left.median())), horizon)
                if stop.kind != AVERAGE or stop.distance > FOLLOWS:
                    ended[name] = stop
    return ended


def _of_means(group: Sequence[Course]) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_replayed`. A value changes a mean of n by its distance divided by n."""
    steps = []
    for course in group:
        half = spacing(course.now, format_of(course.dtype)) / 2
        far = ((course.added - course.now).abs() / course.now.abs()).flatten().quantile(LOST) * course.now.abs()
        steps.append((far / half - course.count).clamp(min=0.0).nan_to_num(0.0))
    return torch.cat([course.now for course in group]), torch.cat(steps)


def _replayed(group: Sequence[Course], horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[elements] each: the values at which tensors stop, or at the horizon, and after how many steps."""
    now, added = torch.cat([course.now for course in group]), torch.cat([course.added for course in group], 1)
    gain = torch.cat([torch.full_like(course.now, course.factor) for course in group])
    dtype, apart, cycle = group[0].dtype, group[0].apart, len(added)
    steps = torch.zeros_like(now)
    for step in range(horizon):
        product = gain * now
        product = product.to(dtype).double() if apart else product
        after = (product + added[step % cycle]).to(dtype).double()
        steps = torch.where(after != now, step + 1.0, steps)
        now = after
        if step % cycle == 0 and float(steps.max()) + cycle < step:
            break
    return now, steps


def _stop(course: Course, end: torch.Tensor, steps: int, horizon: int) -> Stop:
    increment = course.added.mean(0)
    if course.kind == SUM:
        distance = 1.0 - end / (course.now + horizon * increment)
    else:
        target = increment if course.kind == MEAN else increment / (1.0 - course.gain)
        size = torch.maximum(target, course.now.abs())
        distance = torch.where(end == course.now, course.never, (target - end).abs()) / size
    missing, value, added = (float(part.median()) for part in (distance.clamp(min=0.0), end.abs(), increment))
    return Stop(course.kind, course.gain, missing, steps, value, added)
