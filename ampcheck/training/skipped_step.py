"""Training after a step that a GradScaler skipped: in a run of its own, one gradient is made infinite."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ampcheck.catalog.training import SCALER_PROTOCOL
from ampcheck.core.run import Finding
from ampcheck.core.text import counted, listed
from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.training.distributed.ranks import agreed
from ampcheck.training.gradients.checks import nonfinite_parameters
from ampcheck.training.gradients.kept_numbers import counts_of_optimizers, numbers_of_code, numbers_of_optimizers
from ampcheck.training.loop import StepError, TrainingLoop, plain_values
from ampcheck.training.protocol.events import Act, Event, injected_text
from ampcheck.training.protocol.recorder import Recorder

_BEFORE = 3
"""Steps before the one that is skipped, where enough run: a number that falls in them is no running maximum or sum."""

_AFTER = 2
"""Scaler steps after it: a step with a delayed gradient may be skipped as well."""

_KEPT = "update it only with finite values (torch.isfinite), or only where the scaler did not skip the step"


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A run in which the gradient of one step was made infinite.

    overflowed: that step; None where no gradient was looked at. events: the calls of the run. before: the numbers that
    the loop keeps, by path, after each step before that one; then: after it; last: after the last one. weights: those
    that have infinite or NaN elements at the end.
    """

    overflowed: int | None
    events: tuple[Event, ...]
    before: tuple[Mapping[str, float], ...] = ()
    then: Mapping[str, float] | None = None
    last: Mapping[str, float] | None = None
    weights: tuple[str, ...] = ()

    @property
    def later(self) -> list[Event]:
        """The calls of `scaler.step` in later steps, for an optimizer whose step was skipped in that one."""
        steps = [event for event in self.events if event.act is Act.SCALER_STEP and event.enabled]
        skipped = {event.optimizers for event in steps if event.step == self.overflowed and event.skipped}
        over = math.inf if self.overflowed is None else self.overflowed
        return [event for event in steps if event.step > over and event.optimizers in skipped]

    @property
    def counted(self) -> list[str]:
        """Numbers of an optimizer that grow with each step, and grew as much in the one that was skipped."""
        skipped = tuple(f"{event.optimizers[0]}." for event in self.later)
        values = [*self.before, self.then or {}]
        series = {path: [numbers.get(path, math.nan) for numbers in values] for path in self.then or {}}
        grown = {path: {later - earlier for earlier, later in pairwise(series[path])} for path in series}
        several = len(self.before) > 1
        return [p for p, by in grown.items() if several and p.startswith(skipped) and len(by) == 1 and min(by) >= 1]

    @property
    def kept(self) -> list[str]:
        """Numbers that were finite before that step and are not since."""
        before, then, last = self.before, self.then or {}, self.last or {}
        paths = before[-1] if before else {}
        return [
            path
            for path in paths
            if all(math.isfinite(values.get(path, 0.0)) for values in before)
            and not math.isfinite(then.get(path, 0.0))
            and not math.isfinite(last.get(path, 0.0))
        ]


def measure_skipped_step(loop: TrainingLoop, steps: int, *, after_backward: bool) -> SkippedStep:
    """Run steps until one was skipped, and those after it. after_backward: no scaler looks at the gradients."""
    first = min(1, steps - 1) if after_backward else max(min(1, steps - 1), min(_BEFORE, steps // 4))
    recorder = Recorder(loop, overflow_from=first, after_backward=after_backward)
    before: list[Mapping[str, float]] = []
    then: Mapping[str, float] | None = None
    last: Mapping[str, float] | None = None
    with in_eager_mode(), recorder.listening():
        for taken in recorder.run(steps):
            if isinstance(taken, StepError):
                break
            over, numbers = recorder.overflowed, _numbers(loop)
            if over is None:
                before.append(numbers)
            elif recorder.step == over:
                then = numbers
            else:
                last = numbers
            seen = SkippedStep(over, tuple(recorder.events))
            if agreed(over is not None and recorder.step > over and (after_backward or len(seen.later) >= _AFTER)):
                break
    events, weights = tuple(recorder.events), tuple(nonfinite_parameters(loop))
    return SkippedStep(recorder.overflowed, events, tuple(before), then, last, weights)


def check_skipped_step(
    seen: SkippedStep, subject: str, plain: Sequence[Event], nonfinite: Collection[str]
) -> Iterator[Finding]:
    """`scaler-protocol`: training goes on after a step that was skipped.

    plain: the events of the loop by itself; nonfinite: the weights that have infinite or NaN elements there.
    """
    later, over = seen.later, seen.overflowed
    if over is None or not later:
        return
    how = injected_text(over)
    kept = listed(f"{path} = {(seen.last or {})[path]}" for path in seen.kept)
    skipped_anyway = {e.step for e in plain if e.act is Act.SCALER_STEP and e.skipped}
    weights = [name for name in seen.weights if name not in nonfinite]
    if weights:
        message = f"a skipped step must leave the weights finite, but {listed(weights)} became infinite or NaN {how}"
        hint = f"{kept} since the skipped step: {_KEPT}" if kept else "apply no gradient that the scaler did not check"
        yield SCALER_PROTOCOL.fail(subject, message, where=later[0].where, observed=len(weights), limit=0, hint=hint)
    elif len(later) >= _AFTER and all(e.skipped and e.step not in skipped_anyway for e in later):
        message = (
            f"training must go on after a step that the scaler skipped, but it skipped the next "
            f"{counted(len(later), 'steps')} of {later[0].optimizers[0]} as well {how}: "
        )
        if not _cleared(seen, later[0].optimizers[0]):
            message += "the gradients of the skipped step were not cleared"
            hint = "call optimizer.zero_grad() in each step, whether or not the scaler skipped it"
        else:
            message += (
                f"gradients were infinite or NaN again; {kept or 'a tensor that the code keeps'} holds the infinity"
            )
            hint = _KEPT
        yield SCALER_PROTOCOL.fail(subject, message, where=later[0].where, observed=len(later), limit=0, hint=hint)
    elif falling := _averages(seen):
        values = listed(f"{path} = {(seen.last or {})[path]}" for path in falling)
        message = (
            f"what a loop keeps must recover from a step that the scaler skipped, but {values} since then, "
            f"also after {counted(len({e.step for e in later}), 'more steps')} {how}"
        )
        yield SCALER_PROTOCOL.warn(subject, message, where=later[0].where, observed=len(falling), limit=0, hint=_KEPT)
    elif counts := seen.counted:
        message = (
            f"an optimizer must count the steps that it took; {listed(counts)} advanced at a step that the scaler "
            f"skipped too {how}: corrections by it are wrong after the skipped steps at the start of a training"
        )
        hint = "count inside optimizer.step(), or only where the scale did not fall in scaler.update()"
        yield SCALER_PROTOCOL.warn(subject, message, where=later[0].where, observed=len(counts), limit=0, hint=hint)


def _numbers(loop: TrainingLoop) -> dict[str, float]:
    def value(tensor: torch.Tensor) -> float:
        return float(plain_values(tensor).sum())

    return {
        **numbers_of_code(loop, value),
        **numbers_of_optimizers(loop, value),
        **counts_of_optimizers(loop, value),
    }


def _averages(seen: SkippedStep) -> list[str]:
    """The kept numbers that fell before; none of a holder that keeps a sum or a maximum as well, as a log does."""
    sums = {path.rpartition(".")[0] for path in seen.kept if not _falls(path, seen.before)}
    return [path for path in seen.kept if path.rpartition(".")[0] not in sums]


def _falls(path: str, before: Sequence[Mapping[str, float]]) -> bool:
    values = [numbers[path] for numbers in before if path in numbers]
    return any(later < earlier for earlier, later in pairwise(values))


def _cleared(seen: SkippedStep, optimizer: str) -> bool:
    """Whether the optimizer had no gradient when the first backward pass for it began after the skipped step."""
    start = next(n for n, e in enumerate(seen.events) if e.act is Act.SCALER_STEP and e.step == seen.overflowed)
    passes = (e for e in seen.events[start:] if e.act is Act.BACKWARD and optimizer in e.optimizers)
    return all(optimizer in event.cleared for event in [*passes][:1])
