"""Training after a step that a GradScaler skipped: in a run of its own, one gradient is made infinite."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ampcheck.catalog.training import SCALER_PROTOCOL
from ampcheck.core.run import Finding, Where
from ampcheck.core.text import counted, listed
from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.torchtools.snapshot import Snapshot
from ampcheck.training.distributed.ranks import agreed, world_size
from ampcheck.training.gradients.checks import nonfinite_parameters
from ampcheck.training.gradients.kept_numbers import (
    counts_of_optimizers,
    numbers_of_code,
    numbers_of_optimizers,
    set_numbers_of_code,
)
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
    """A run in which the gradient of one step was made infinite, or a scaler skipped the first steps by itself.

    overflowed: that step, or the last one of those; None where no gradient was looked at. injected: whether it was made
    infinite. events: the calls of the run. before: the numbers that the loop keeps, by path, after each step before
    that one, or after the first steps at a scale at which none is skipped; then: after it; last: after the last one.
    weights: those that have infinite or NaN elements at the end. decided: the first step after that one whose weights
    are others where `kept` numbers have their values of before; None where no step has, or that was not tried.
    """

    overflowed: int | None
    events: tuple[Event, ...]
    before: tuple[Mapping[str, float], ...] = ()
    then: Mapping[str, float] | None = None
    last: Mapping[str, float] | None = None
    weights: tuple[str, ...] = ()
    decided: int | None = None
    injected: bool = True

    @property
    def later(self) -> list[Event]:
        """The calls of `scaler.step` in later steps, for an optimizer whose step was skipped in that one."""
        steps = [event for event in self.events if event.act is Act.SCALER_STEP and event.enabled]
        skipped = {event.optimizers for event in steps if event.step == self.overflowed and event.skipped}
        over = math.inf if self.overflowed is None else self.overflowed
        return [event for event in steps if event.step > over and event.optimizers in skipped]

    @property
    def counted(self) -> list[str]:
        """Numbers of an optimizer that grow with each step, and grew as much in the one that was skipped.

        A step may try a batch again until the scaler does not skip it.
        """
        steps = [event for event in self.events if event.act is Act.SCALER_STEP and event.step == self.overflowed]
        taken = {event.optimizers for event in steps if not event.skipped}
        skipped = tuple(f"{event.optimizers[0]}." for event in self.later if event.optimizers not in taken)
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


def measure_skipped_step(
    loop: TrainingLoop, steps: int, *, after_backward: bool, plain: Sequence[Event] = (), start: Snapshot | None = None
) -> list[SkippedStep]:
    """Run steps until one was skipped, and those after it. after_backward: no scaler looks at the gradients.

    plain: the events of the loop by itself. A scaler that skips the first steps there begins at the scale of the first
    step that it took, lest numbers are infinite from the beginning; those of the loop by itself come second then.
    start: the state in which the loop was handed over, to run on with numbers that stayed infinite or NaN.
    """
    first = min(1, steps - 1) if after_backward else max(min(1, steps - 1), min(_BEFORE, steps // 4))
    repeats = start is not None and world_size() == 1
    scales = _scales_of_first_steps(plain) if repeats else {}
    recorder = Recorder(loop, overflow_from=first, after_backward=after_backward)
    _set_scales(loop, scales)
    seen = _run(loop, recorder, steps, after_backward=after_backward)
    if start is None or not repeats:
        return [seen]
    runs = [seen]
    if scales and (until := _first_taken(plain)):
        start.restore()
        natural = _run(loop, Recorder(loop), steps, until=until)
        runs.append(replace(natural, before=seen.before))
    return [_run_on(run, loop, steps, start, scales if run.injected else {}) for run in runs]


def _run(
    loop: TrainingLoop, recorder: Recorder, steps: int, *, after_backward: bool = False, until: int | None = None
) -> SkippedStep:
    """Run steps up to those that follow the skipped one. until: the first step that is taken, without injection."""
    before: list[Mapping[str, float]] = []
    then: Mapping[str, float] | None = None
    last: Mapping[str, float] | None = None
    over: int | None = None
    with in_eager_mode(), recorder.listening():
        for taken in recorder.run(steps):
            if isinstance(taken, StepError):
                break
            numbers = _numbers(loop)
            over = recorder.overflowed if until is None else until - 1
            if over is None or recorder.step < over:
                before.append(numbers)
            elif recorder.step == over:
                then = numbers
            else:
                last = numbers
            seen = SkippedStep(over, tuple(recorder.events))
            if agreed(over is not None and recorder.step > over and (after_backward or len(seen.later) >= _AFTER)):
                break
    events, weights = tuple(recorder.events), tuple(nonfinite_parameters(loop))
    return SkippedStep(over, events, tuple(before), then, last, weights, injected=until is None)


def _scales_of_first_steps(events: Sequence[Event]) -> dict[str, float]:
    """By scaler, the scale of the first step that it did not skip, where it skipped the first one of all."""
    steps = [event for event in events if event.act is Act.SCALER_STEP and event.enabled]
    first = {event.who: event for event in reversed(steps)}
    taken = {event.who: event.scale for event in reversed(steps) if not event.skipped}
    return {who: scale for who, scale in taken.items() if first[who].skipped and scale is not None}


def _first_taken(events: Sequence[Event]) -> int:
    return next(event.step for event in events if event.act is Act.SCALER_STEP and not event.skipped)


def _set_scales(loop: TrainingLoop, scales: Mapping[str, float]) -> None:
    for path, scaler in loop.scalers.items():
        if path in scales:
            scaler.load_state_dict({**scaler.state_dict(), "scale": scales[path]})


def _run_on(
    seen: SkippedStep, loop: TrainingLoop, steps: int, start: Snapshot, scales: Mapping[str, float]
) -> SkippedStep:
    """Run on to the last step where numbers stayed infinite or NaN: which come back, and do the others decide weights?

    The weights decide only where two runs of the same steps give the same ones.
    """
    over = seen.overflowed
    if over is None or not seen.kept or seen.weights or all(event.skipped for event in seen.later):
        return seen

    def norms_with(numbers: Mapping[str, float]) -> list[list[float]]:
        start.restore()
        _set_scales(loop, scales)
        return _weights_after(loop, steps, over, seen.injected, numbers)

    spoilt = norms_with({})
    seen = replace(seen, last=_numbers(loop))
    if not seen.kept:
        return seen
    mended = norms_with({path: seen.before[-1][path] for path in seen.kept})
    runs = enumerate(zip(spoilt, mended, strict=False), over + 1)
    differs = next((step for step, (here, there) in runs if here != there), None)
    return seen if differs is None or norms_with({}) != spoilt else replace(seen, decided=differs)


def _weights_after(
    loop: TrainingLoop, steps: int, over: int, injected: bool, numbers: Mapping[str, float]
) -> list[list[float]]:
    """The norms of all weights after each step that follows the skipped one. numbers: are written after that one."""
    recorder = Recorder(loop, overflow_from=over if injected else None)
    norms: list[list[float]] = []
    with in_eager_mode(), recorder.listening():
        for taken in recorder.run(steps):
            if isinstance(taken, StepError):
                break
            if recorder.step == over:
                set_numbers_of_code(loop, numbers)
            elif recorder.step > over:
                weights = (plain_values(weight.detach()).double() for _, weight in loop.parameters())
                norms.append([float(weight.norm().nan_to_num(nan=math.inf)) for weight in weights])
    return norms


def check_skipped_step(
    seen: SkippedStep, subject: str, plain: Sequence[Event], nonfinite: Collection[str]
) -> Iterator[Finding]:
    """`scaler-protocol`: training goes on after a step that was skipped.

    plain: the events of the loop by itself; nonfinite: the weights that have infinite or NaN elements there.
    """
    later, over = seen.later, seen.overflowed
    if over is None or not later:
        return
    how = injected_text(over) if seen.injected else f"(the scaler skipped the steps up to {over} by itself)"
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
    elif seen.decided is not None:
        message = (
            f"what a loop keeps must recover from a step that the scaler skipped, but {kept} since then, and training "
            f"goes by it: the weights of step {seen.decided} would be others with the value of before {how}"
        )
        where = Where("update", step=seen.decided)
        yield SCALER_PROTOCOL.fail(subject, message, where=where, observed=len(seen.kept), limit=0, hint=_KEPT)
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
