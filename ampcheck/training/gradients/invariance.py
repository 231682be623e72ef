"""Does the training depend on the loss scale? It must not: the scale is divided out before anything looks at gradients.

The same steps run at scale 1, at a large scale, and with a scale that grows in every step. Their exact companions are
compared, to which a power of two is exact: gradients and what the step returns must be equal to the last digits.
Weights go on with their exact values after a step, lest the next takes other branches where gradients flushed. Whatever
differs (clipping before unscale_, a penalty on scaled gradients, a loss divided by a scale of another time) differs in
training too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.snapshot import Snapshot
from ampcheck.torchtools.storage import local
from ampcheck.training.distributed.ranks import agreed
from ampcheck.training.loop import LoopShadow, StepError, TrainingLoop, parameters_of, plain_values, quiet
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.protocol.recorder import Recorder

LARGE = 65536.0
"""The scale at which torch.amp.GradScaler starts."""

STEPS = 3
"""Of each repetition: a scale that changes after the first step shows in the second, and in what the first returns."""

ACCUMULATED = 16
"""How many steps are tried where none of the first steps an optimizer."""

NEVER = 2**31 - 1
"""A number of steps that no repetition makes."""

FIRST = ("scale 1", 1.0)
_EQUAL = 1e-4
"""Relative, in the Euclidean norm. What differs by chance is 1e-7 at most; what a wrong scale does is a factor."""

_EQUAL_ON_BRANCHES = 1e-2
"""The same from the first later step that differs although all exact weights are equal: exact values take the branches
(the sign in a ReLU) of the real ones, and those of weights that no optimizer steps follow gradients that flushed."""

_NO_STEP = "let the mapping name the optimizer that steps these weights, and let it step within the observed steps"
_UNUSED = "write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(), or leave the scaler out"


@dataclass(frozen=True, slots=True)
class Difference:
    """What depends on the scale. what: `gradient` or `value`; name: the parameter's; step: the first in which it shows.

    runs: the two that differ. ratio: the norm (the value) in the second over that in the first; error: of their
    difference, relative to the first; limit: of that error.
    """

    what: str
    name: str
    step: int
    runs: tuple[str, str]
    ratio: float
    error: float
    limit: float


@dataclass(frozen=True, slots=True)
class InvarianceStats:
    """The same steps at several scales.

    runs: those that were compared; a step that a scaler skipped ends what can be compared. gradients, values, passes:
    how many of each were, over all steps; passes run backward. differences: the worst of each kind. penalties:
    `torch.autograd.grad` on a scaled loss with a graph of its own. skipped: why there is nothing; hint: what to change
    where the loop itself prevents it.
    """

    subject: str
    runs: tuple[str, ...] = ()
    gradients: int = 0
    values: int = 0
    passes: int = 0
    differences: tuple[Difference, ...] = ()
    penalties: tuple[Event, ...] = ()
    skipped: str = ""
    hint: str = ""

    @property
    def invariant(self) -> bool | None:
        """Whether gradients were equal at every scale; None where that was not seen."""
        if self.skipped or not self.gradients:
            return None
        return not any(d.what == "gradient" for d in self.differences)


@dataclass(slots=True)
class Repetition:
    """The steps at one scale.

    gradients: exact, unscaled, by step, call of an optimizer within it, and parameter. weights: exact, before such a
    call, of all that is trained, in float32. values: by step, what it returned. overflowed: the first step with a
    gradient that is infinite or NaN, where code may leave it out by itself.
    """

    name: str
    gradients: dict[tuple[int, int, str], torch.Tensor]
    values: dict[int, float]
    events: list[Event]
    stopped: StepError | None = None
    scaled: bool = True
    weights: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    overflowed: int | None = None

    @property
    def end(self) -> int:
        """The first step that a scaler or the code skipped: from there on runs are no longer in the same state."""
        skipped = [event.step for event in self.events if event.act is Act.SCALER_STEP and event.skipped]
        return min((*skipped, NEVER if self.overflowed is None else self.overflowed))


def measure_invariance(loop: TrainingLoop, start: Snapshot, steps: int = STEPS) -> InvarianceStats:
    """Run the first steps of a loop at scale 1, at 65536 (or the largest power of 16 below it that no step skips), and
    with a scale that doubles after every step. start: the state in which they begin.
    """

    def nothing(why: str, hint: str = "") -> InvarianceStats:
        return InvarianceStats(loop.name, skipped=why, hint=hint)

    def repeat(name: str, scale: float, interval: int = NEVER) -> Repetition:
        return _repeat(loop, start, name, steps, scale, interval)

    if not loop.scalers:
        return nothing("no GradScaler is in use")
    first = repeat(*FIRST)
    if first.stopped is not None:
        where = f" ({first.stopped.file}:{first.stopped.line})" if first.stopped.file else ""
        return nothing(f"a step did not come to its end: {first.stopped.message}{where}")
    if agreed(not first.gradients) and steps < ACCUMULATED:  # gradients accumulate over more steps
        return measure_invariance(loop, start, ACCUMULATED)
    if agreed(not first.gradients):
        return nothing(f"no optimizer stepped a gradient in {steps} steps", _NO_STEP)
    if agreed(not first.scaled):
        return nothing(f"the GradScaler is enabled, and nothing asks for its scale in {steps} steps", _UNUSED)
    again = repeat("scale 1 again", 1.0)
    if agreed(differ(first, again)):
        why = "the step is not reproducible: it reads data or random numbers that are not reset"
        return nothing(why, "let step(i) depend on i alone: index or seed the batch by i")
    return compare_scales(loop.name, first, repeat)


def compare_scales(name: str, first: Repetition, repeat: Callable[..., Repetition]) -> InvarianceStats:
    """Compare the steps at scale 1, `first`, with those at a large scale and at one that grows.

    repeat: runs them again, given a name, the scale and after how many steps the scale doubles.
    """
    large = repeat(f"scale {(scale := LARGE):g}", scale)
    while agreed(large.end < first.end) and scale > 16:
        large = repeat(f"scale {(scale := scale / 16):g}", scale)
    growing = repeat("a scale that doubles in each step", min(scale, 1024.0), 1)
    ends = ((other, min(first.end, other.end)) for other in (large, growing))
    compared = [(other, end) for other, end in ends if any(key[0] < end for key in first.gradients)]
    if not compared:
        why = "the first step with gradients was skipped at every scale: they are not finite"
        mend = "mend what is infinite or NaN: see overflow and nonfinite-gradient"
        return InvarianceStats(name, skipped=why, hint=mend)
    differences = [difference for other, end in compared for difference in differences_of(first, other, end)]
    last = max(end for _, end in compared)
    worst: dict[str, Difference] = {}
    for difference in sorted(differences, key=lambda d: -d.error):
        worst.setdefault(difference.what, difference)
    return InvarianceStats(
        name,
        (first.name, *(other.name for other, _ in compared)),
        sum(key[0] < last for key in first.gradients),
        sum(step < last for step in first.values),
        sum(event.act is Act.BACKWARD and event.step < last for event in first.events),
        tuple(worst.values()),
        tuple(e for e in large.events if e.act is Act.GRAD and e.scaled and e.create_graph),
    )


def _repeat(loop: TrainingLoop, start: Snapshot, name: str, steps: int, scale: float, interval: int) -> Repetition:
    start.restore()
    for scaler in loop.scalers.values():
        set_scale(scaler, scale, interval)
    recorder = Recorder(loop)
    with collected(loop, recorder, name) as run:
        for taken in recorder.run(steps):
            if not isinstance(taken, StepError):
                run.values[recorder.step] = taken
            elif taken.kind != "value":
                run.stopped = taken
                break
    return run


def set_scale(scaler: Any, scale: float, interval: int) -> None:
    """Let an enabled scaler go on with a scale that doubles after each `interval` steps that it does not skip."""
    wanted = {"scale": scale, "growth_interval": interval, "growth_factor": 2.0, "_growth_tracker": 0}
    scaler.load_state_dict({**scaler.state_dict(), **wanted})


@contextmanager
def collected(loop: TrainingLoop, recorder: Recorder, name: str) -> Iterator[Repetition]:
    """Collect the exact values of what the steps that run inside hand to optimizers."""
    run = Repetition(name, {}, {}, recorder.events)
    names: dict[int, str] = {}
    calls = Counter[int]()
    shadow = LoopShadow(judge=False, exactly=True)

    def keep(optimizer: torch.optim.Optimizer) -> None:
        calls[recorder.step] += 1
        owned = list(parameters_of(optimizer))
        if any(id(parameter) not in names for parameter in owned):
            names.update((id(parameter), path) for path, parameter in loop.parameters())
        factor = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its kernel
        inside = 1.0 if factor is None else float(factor)
        alone = (tensor for tensor in loop.reached.tensors.values() if tensor.requires_grad and tensor.is_leaf)
        trained = [*(parameter for _, parameter in loop.parameters()), *alone]
        run.weights[recorder.step, calls[recorder.step]] = [_exact(shadow, t.detach()).float() for t in trained]
        for parameter in owned:
            if parameter.grad is not None:
                key = (recorder.step, calls[recorder.step], names.get(id(parameter), "?"))
                run.gradients[key] = _exact(shadow, parameter.grad) / inside

    def step(optimizer: torch.optim.Optimizer, *_: object, **__: object) -> Iterator[None]:
        with torch.no_grad(), without_modes():
            keep(optimizer)
        yield
        for parameter in parameters_of(optimizer):
            shadow.correct(local(parameter))

    with subscribed(optimizer_step=step), quiet(), recorder.listening(), shadow:
        yield run
    run.scaled = recorder.scaled


def _exact(shadow: LoopShadow, gradient: torch.Tensor) -> torch.Tensor:
    """The exact values of a gradient; of one that has none, such as a sparse one, the real ones."""
    gradient, values = local(gradient), plain_values(gradient)
    known = gradient.layout is torch.strided and shadow.store.known(gradient) is not None
    return plain_values(shadow.exact(gradient)).clone() if known else values.double()


def differences_of(first: Repetition, other: Repetition, end: int) -> list[Difference]:
    """What differs before the step `end`, in the first step in which anything does, as later ones follow from it."""
    limit, updates = _EQUAL, _updates(first)
    for step in sorted({*(key[0] for key in first.gradients), *first.values}):
        if step >= end:
            break
        found = _of_step(first, other, step, limit)
        update = next((update for update in updates[1:] if update[0] >= step), None)  # no earlier one changes weights
        if found and limit == _EQUAL and update is not None and _have_equal_weights(first, other, update):
            limit = _EQUAL_ON_BRANCHES
            found = _of_step(first, other, step, limit)
        if found:
            return found
    return []


def _have_equal_weights(first: Repetition, other: Repetition, update: tuple[int, int]) -> bool:
    here, there = (run.weights.get(update, []) for run in (first, other))
    return len(here) == len(there) > 0 and all(
        x.shape == y.shape and float((y - x).norm()) <= _EQUAL * float(x.norm())
        for x, y in zip(here, there, strict=True)
    )


def _updates(run: Repetition) -> list[tuple[int, int]]:  # step, and number of the call within it
    return sorted({key[:2] for key in run.gradients})


def _of_step(first: Repetition, other: Repetition, step: int, later: float) -> list[Difference]:
    """What differs in one step. later: the limit after the first update."""
    runs, updates = (first.name, other.name), _updates(first)
    differences: list[Difference] = []
    gradients = {key: value for key, value in first.gradients.items() if key[0] == step}
    whole = math.sqrt(sum(float(value[value.isfinite()].square().sum()) for value in gradients.values()))
    for (_, call, name), value in gradients.items():
        limit = _EQUAL if (step, call) == updates[0] else later
        counterpart = other.gradients.get((step, call, name))
        finite = value.isfinite()
        if counterpart is None or counterpart.shape != value.shape or not torch.equal(finite, counterpart.isfinite()):
            differences.append(Difference("gradient", name, step, runs, math.nan, math.inf, limit))
            continue
        norm, size = (float(values[finite].norm()) for values in (value, counterpart))
        error = float((counterpart - value)[finite].norm())
        # A gradient that is nothing but rounding differs by chance: it is compared with the whole gradient of the step.
        if error > limit * norm and error > 1e-6 * whole:
            ratio, relative = (size / norm, error / norm) if norm else (math.inf, math.inf)
            differences.append(Difference("gradient", name, step, runs, ratio, relative, limit))
    if step in first.values:
        here, there = first.values[step], other.values.get(step, first.values[step])
        known = math.isfinite(here), math.isfinite(there)
        limit = later if updates[1:] and step >= updates[1][0] else _EQUAL
        if any(known) and not all(known):
            differences.append(Difference("value", "", step, runs, math.nan, math.inf, limit))
        elif all(known) and abs(there - here) > limit * abs(here):
            ratio, relative = (there / here, abs(there - here) / abs(here)) if here else (math.inf, math.inf)
            differences.append(Difference("value", "", step, runs, ratio, relative, limit))
    return differences


def differ(first: Repetition, again: Repetition) -> bool:
    """Whether two repetitions at one scale differ."""
    steps = {*(key[0] for key in first.gradients), *first.values}
    return any(_of_step(first, again, step, _EQUAL) for step in steps)
