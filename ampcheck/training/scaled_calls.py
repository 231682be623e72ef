"""Does the training in a callable depend on the loss scale? Its first steps run again, at other scales.

Nothing of the callable is taken apart: its GradScalers, those that it makes included, start at the scale of the run,
and what the callable reaches is restored between runs and afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ampcheck.core.errors import UsageError, as_result
from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.reachable import Reached, reach
from ampcheck.torchtools.snapshot import preserved
from ampcheck.training.distributed.ranks import world_size
from ampcheck.training.gradients import invariance
from ampcheck.training.gradients.invariance import FIRST, NEVER, InvarianceStats, Repetition
from ampcheck.training.loop import StepError, plain_values
from ampcheck.training.protocol.events import OF_STEPS, Act, Event
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.running import RunningLoop
from ampcheck.training.stopping import Stopper

_USES = (Act.SCALE, Act.UNSCALE, Act.SCALER_STEP)
_RANKS = "its ranks would have to run again together: hand over {'model': model, 'optimizer': optimizer, 'step': step}"


def measure_scaled_call(call: Callable[[], object], name: str, events: Sequence[Event]) -> InvarianceStats | None:
    """Run the first three steps of a callable in which a GradScaler is used again, at several scales.

    name: what findings call it. events: those of the observed steps; None where no enabled scaler scaled a loss in
    them, or looked at gradients. What differs between scales is measured a second time: code that draws data or random
    numbers which cannot be restored is not judged.
    """
    first = next((event.step for event in events if event.act in _USES and event.enabled), None)
    if first is None:
        return None
    passes = sum(e.act is Act.BACKWARD and e.step < first + invariance.STEPS for e in events)
    if not any(event.act in OF_STEPS for event in events):
        passes = min(passes, invariance.STEPS)
    if not passes:
        return InvarianceStats(name, skipped="no GradScaler is used with a backward pass")
    if world_size() > 1:
        return InvarianceStats(name, skipped=_RANKS)
    reached = reach({"": call})
    if reached.opaque or reached.unseen:
        what = next(iter(reached.opaque), "") or "more than 20,000 values, which"
        return InvarianceStats(name, skipped=f"it cannot run again: it reaches {what} and cannot be restored")
    try:
        with preserved(reached) as start:

            def repeat(name: str, scale: float, interval: int = NEVER) -> Repetition:
                start.restore()
                return _repeat(call, reached, passes, name, (scale, interval))

            return _measure(name, repeat)
    except UsageError as error:
        return InvarianceStats(name, skipped=f"it cannot run again: {error}")


def _measure(name: str, repeat: Callable[..., Repetition]) -> InvarianceStats:
    first = repeat(*FIRST)
    if first.stopped is not None:
        return InvarianceStats(name, skipped=f"it cannot run again: {first.stopped.message}")
    if not first.gradients:
        return InvarianceStats(name, skipped="no optimizer stepped a gradient at scale 1")
    stats = replace(invariance.compare_scales(name, first, repeat), hint="")
    if stats.differences:
        again = repeat("scale 1 again", 1.0)
        once_more = invariance.compare_scales(name, again, repeat)
        found = {(d.what, d.name, d.step) for d in once_more.differences}
        if invariance.differ(first, again) or any((d.what, d.name, d.step) not in found for d in stats.differences):
            return InvarianceStats(name, skipped="two runs at one scale differ: it draws what cannot be restored")
    return stats


def _repeat(
    call: Callable[[], object], reached: Reached, passes: int, name: str, growth: tuple[float, int]
) -> Repetition:
    """The steps up to the end of so many backward passes. growth: the scale, and after how many steps it doubles."""
    loop = RunningLoop(name)
    recorder, stopper = Recorder(loop), Stopper()
    end, since = id(sys._getframe()), 0

    def backward(*_: object, **__: object) -> Iterator[None]:
        nonlocal since
        before = len(recorder.events)
        if sum(event.act is Act.BACKWARD for event in recorder.events) >= passes:
            stopper.stop()
        if any(event.act in OF_STEPS for event in recorder.events[since:]):
            recorder.step, since = recorder.step + 1, before
        yield
        if any(event.act is Act.BACKWARD for event in recorder.events[before:]):
            loop.look(sys._getframe(1), end)
            if run.overflowed is None and _has_nonfinite(loop):
                run.overflowed = recorder.step

    def before_step(optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
        with torch.no_grad(), without_modes():
            loop.note("optimizer", optimizer)
            loop.look(sys._getframe(1), end)
            recorder.name_parts()

    for scaler in reached.scalers.values():
        if scaler.is_enabled():
            invariance.set_scale(scaler, *growth)
    with (
        _scaled(growth),
        _without_ranks(),
        subscribed(optimizer_step=before_step),
        invariance.collected(loop, recorder, name) as run,
    ):
        try:
            with subscribed(backward=backward):
                call()
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything
            if not stopper.raised:
                run.stopped = StepError.of(as_result(error), recorder.step)
    return run


def _has_nonfinite(loop: RunningLoop) -> bool:
    """Whether a gradient is infinite or NaN: code that looks at it leaves the step out, as a scaler does."""
    with torch.no_grad(), without_modes():
        gradients = (parameter.grad for _, parameter in loop.parameters())
        return not all(bool(plain_values(g).isfinite().all()) for g in gradients if g is not None)


@contextmanager
def _scaled(growth: tuple[float, int]) -> Iterator[None]:
    """Let every GradScaler that is made inside, or that is given its state, go on with another scale."""
    sets = False

    def changed(scaler: Any, *_: object, **__: object) -> Iterator[None]:
        nonlocal sets
        yield
        if not sets and scaler.is_enabled():
            sets = True
            try:
                invariance.set_scale(scaler, *growth)
            finally:
                sets = False

    with subscribed(scaler_made=changed, scaler_load_state_dict=changed):
        yield


@contextmanager
def _without_ranks() -> Iterator[None]:
    """Let code that sets up a process group raise: its other ranks do not run again."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(_RANKS)

    if not torch.distributed.is_available():
        yield
        return
    with replaced(torch.distributed, "init_process_group", lambda _: refuse):
        yield
