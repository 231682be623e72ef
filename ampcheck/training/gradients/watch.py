"""Measures how much of each gradient low precision loses: element by element against its exact companion.

An element counts when it is known: nonzero in exact, and moving the data by the roundoff of the format leaves half of
it. So a gradient that is mathematically zero (the key's bias before a softmax) and shows nothing but rounding is left
out. Elements that are zero in exact and not here (a ReLU that falls otherwise) measure the noise, and are taken off.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.facts.memory import dtype_name, has_companions
from ampcheck.records.faults import FLUSH, OVERFLOW, ZERO
from ampcheck.records.gradients import GradientLoss, GradientStats, Underflow
from ampcheck.records.protocol import Act, Event
from ampcheck.records.results import JUDGED_UNIT, MOVE
from ampcheck.records.scales import FEW, LOWEST, GradientHistogram, is_usable
from ampcheck.shadow import Shadow
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.source import Hook
from ampcheck.torchtools.storage import local, placements
from ampcheck.training.loop import TrainingLoop, plain_values
from ampcheck.training.protocol.recorder import Recorder

FUNCTIONAL = "gradients came from torch.func, or from torch.autograd.grad of other tensors than parameters"

_LEAST_ERROR = 0.01
_CURED = 4.0
"""So many times smaller is an error that another loss scale cures; what rounding makes of it is the same at each."""


@dataclass(slots=True)
class FollowedGradient(GradientLoss):
    """A gradient while it is compared."""

    def add(
        self, grad: torch.Tensor, exact: torch.Tensor, known: torch.Tensor, *, half: bool, flushed: bool = False
    ) -> None:
        """One more pass. half: made in float16, by its history or under autocast. flushed: values on the way became
        zero or subnormal."""
        self.dtype = made_in = dtype_name(grad.dtype)
        if half and grad.dtype is torch.float32 and bool(((grad.half() == grad) | ~grad.isfinite()).all()):
            made_in = "float16"
        self.made_in = made_in if self.made_in in ("", made_in) else self.dtype
        is_zero = grad == 0
        gone = is_zero & known
        faint = (grad.abs() < format_of(made_in).smallest_normal) & known
        lost = int(gone.count_nonzero())
        self.numel += grad.numel()
        self.known += int(known.count_nonzero())
        self.zero += lost
        self.reverse += int(((exact == 0) & ~is_zero).count_nonzero())
        self.subnormal += int(faint.count_nonzero()) - lost
        self.nonfinite += grad.numel() - int(grad.isfinite().count_nonzero())
        self.squares += float((exact * known).square().sum())
        self.lost_squares += float(exact[gone].square().sum()) if lost else 0.0
        off = float(torch.where(known, grad.double() - exact, 0.0).square().sum())
        self.off_squares += off
        self.flushed_squares += off if flushed else 0.0


@contextmanager
def captured(loop: TrainingLoop, seen: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Give `seen` every gradient of a parameter in the backward passes inside, with its name, as autograd makes it:
    scaled, before it is added up. What it keeps it must copy. Of a sharded one it gets the reduced gradient, after it
    was added up."""

    def note(name: str, grad: torch.Tensor | None) -> None:
        with torch.no_grad(), without_modes():
            if grad is not None:  # as where a Function's backward returns None
                seen(name, grad.detach())

    def reduced(name: str, parameter: torch.Tensor) -> None:
        note(name, parameter.grad)

    with ExitStack() as stack:
        for name, parameter in loop.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle: Any
                if placements(parameter):  # FSDP2 gives it a gradient without autograd, and calls these hooks alone
                    register: Any = parameter.register_post_accumulate_grad_hook
                    handle = register(Hook(partial(reduced, name)))
                else:
                    handle = parameter.register_hook(Hook(partial(note, name)))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        yield


@dataclass(slots=True)
class _Step:
    """A step that runs. events: the number of calls before it; start: of ops before the passes that count. overflowed:
    the parameters with an infinite gradient that is finite in exact."""

    number: int
    shadow: Shadow
    events: int
    start: int
    losses: dict[str, FollowedGradient] = field(default_factory=dict)
    histograms: dict[str, GradientHistogram] = field(default_factory=lambda: defaultdict(GradientHistogram))
    overflowed: set[str] = field(default_factory=set)

    def begin_again(self) -> None:
        """Leave out what came before: its gradients overflowed, and the code has cleared them."""
        self.start = self.shadow.ops
        for record in (self.overflowed, self.losses, self.histograms):
            record.clear()


class GradientWatch:
    """Compares the gradients of parameters with exact, in each step.

    stats: those of the first step in which every optimizer was stepped; of the first one where every step was skipped.
    """

    def __init__(self, loop: TrainingLoop, recorder: Recorder) -> None:
        self.stats: GradientStats | None = None
        self._loop, self._recorder = loop, recorder
        self._attempts: list[tuple[float, float, bool]] = []
        self._later: list[GradientStats] = []
        self._settled = self._skipped_by_code = False

    @contextmanager
    def step(self, number: int, shadow: Shadow) -> Iterator[None]:
        """Compare the gradients of the step that runs inside."""
        step = _Step(number, shadow, len(self._recorder.events), shadow.ops)
        with captured(self._loop, partial(self._see, step, dict(self._loop.parameters()))):
            yield
        self._end(step)

    def _see(self, step: _Step, parameters: Mapping[str, torch.Tensor], name: str, grad: torch.Tensor) -> None:
        values = _parts(grad, step.shadow)
        if values is None:
            return
        value, exact, known, half, flushed = values
        of_overflowed = (parameters[other].grad for other in step.overflowed)
        if step.overflowed and not any(g is not None and bool(plain_values(g).any()) for g in of_overflowed):
            step.begin_again()
        if bool((~value.isfinite() & exact.isfinite()).any()):
            step.overflowed.add(name)
        loss = step.losses.setdefault(name, FollowedGradient(name))
        half = half or "float16" in self._recorder.low
        loss.add(value, exact, known, half=half, flushed=flushed)
        scale = self._scale(step.events)
        if (half or grad.dtype is torch.float16) and is_usable(scale):
            step.histograms[name] += histogram_of(exact[known] / scale)

    def _end(self, step: _Step) -> None:
        """Keep what a step showed, if it is one that is judged."""
        own = self._recorder.events[step.events :]
        acts = {event.act for event in own}
        if not step.losses and Act.BACKWARD not in acts:
            return  # torch.autograd.grad may have computed gradients of parameters
        scale = self._scale(step.events)
        share, overflows = _worst(step.losses.values())
        by_code = overflows and acts.isdisjoint((Act.OPTIMIZER_STEP, Act.SCALER_STEP))
        settled = not by_code and not any(event.act is Act.SCALER_STEP and event.skipped for event in own)
        if settled and self._skipped_by_code:  # a scale of the code's own, which it has lowered since
            self._attempts = [attempt for attempt in self._attempts if not attempt[2]]
        self._skipped_by_code = by_code
        if not self._settled:
            self._attempts.append((scale, share, overflows))
        if self.stats is None or settled:
            stats = self._stats(step, scale, own)
            if self._settled:
                self._later = [*self._later[-1:], stats]
            else:
                self.stats = stats
        self._settled = self._settled or settled

    def result(self, steps: int) -> GradientStats:
        """The gradients of the step that is judged. steps: how many came to their end."""
        name = self._loop.name
        if self.stats is None:
            hint = "let each step run a backward pass on its own batch"
            if not steps:
                return GradientStats(
                    name, 0, skipped="no step came to its end", hint="mend what the first step stops at"
                )
            functional = any(event.act is Act.GRAD for event in self._recorder.events)
            why = FUNCTIONAL if functional else f"no backward pass ran in {steps} steps"
            return GradientStats(name, 0, skipped=why, hint=hint)
        return replace(self.stats, later=tuple(self._later))

    def _scale(self, since: int) -> float:
        events = self._recorder.events[since:]
        scales = [e.scale for e in events if e.act is Act.SCALE and e.enabled and e.scale is not None]
        return scales[-1] if scales else 1.0

    def _stats(self, step: _Step, scale: float, events: Iterable[Event]) -> GradientStats:
        name = self._loop.name
        if not is_usable(scale):
            why = f"the loss scale is {scale:g} in step {step.number}, which leaves nothing of the gradients"
            hint = "give the scaler a positive finite scale: see loss-scale"
            return GradientStats(name, step.number, skipped=why, hint=hint)
        gradients = sorted(step.losses.values(), key=lambda loss: -loss.lost)
        halves = {g.name for g in gradients if "float16" in (g.dtype, g.made_in)}
        low = [dtype for event in events for dtype in event.low]
        low += [loss.made_in for loss in gradients if loss.made_in in ("float16", "bfloat16")]
        largest, at = _largest(step.shadow, step.start)
        return GradientStats(
            name,
            step.number,
            "float16" if "float16" in low else low[0] if low else "",
            scale,
            tuple(gradients),
            {n: histogram for n, histogram in step.histograms.items() if n in halves},
            largest / scale,
            at,
            _underflow(gradients, scale, largest) if halves else None,
            tuple(self._attempts),
            Coverage({"parameter gradients": len(gradients)}),
        )


def _parts(grad: torch.Tensor, shadow: Shadow) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool, bool] | None:
    """The values of a gradient, the exact ones, which are known, whether float16 made them, whether a flush did."""
    grad = local(grad)
    companions = shadow.store.known(grad) if has_companions(grad) else None
    if companions is None:
        return None
    exact, moved = shadow.exact(grad), shadow.moved(grad)
    if grad.is_complex():
        grad, exact, moved = (torch.view_as_real(t.resolve_conj()) for t in (grad, exact, moved))
    distance = (moved.double() - exact).abs() * (companions.unit / MOVE)
    known = exact.isfinite() & (exact != 0) & (distance <= exact.abs() / 2)
    if companions.unit < JUDGED_UNIT:  # where terms cancel, float64 sees how float32 rounded them: that is no underflow
        known &= (grad != 0) | (exact.abs() < torch.finfo(torch.float32).tiny)
    flushed = any(isinstance(key, tuple) and key[0] in (FLUSH, ZERO) for key in companions.faults)
    return grad, exact, known, companions.unit == MOVE, flushed


def _largest(shadow: Shadow, start: int) -> tuple[float, str]:
    """The largest magnitude of float16 in backward, be it what exact has where the step overflowed."""
    if shadow.judge is None:
        return 0.0, ""
    values = [(v[0], w) for (w, dtype), v in shadow.judge.results.largest.items() if dtype == "float16"]
    values += [(f.exact_amax, f.where) for f in shadow.faults if f.kind == OVERFLOW and f.index > start]
    backward: list[tuple[float, Where]] = [(value, where) for value, where in values if where.phase == "backward"]
    value, where = max(backward, key=lambda pair: pair[0], default=(0.0, Where()))
    return value, where.module or where.op


def _underflow(gradients: Iterable[GradientLoss], scale: float, largest: float) -> Underflow | None:
    """Return what the step would save at a larger loss scale; None where gradients are exact enough, or as bad
    there."""
    weights = list(gradients)
    size = math.sqrt(sum(loss.squares for loss in weights))
    off, flushed = (sum(getattr(loss, name) for loss in weights) for name in ("off_squares", "flushed_squares"))
    room = math.floor(math.log2(format_of("float16").max / largest)) if largest > 0 else 0
    if not size or room < 1 or not math.isfinite(off) or any(loss.nonfinite for loss in weights):
        return None
    rounding = format_of("float16").unit_roundoff  # remains at every scale
    error, cured = math.sqrt(off) / size, max(math.sqrt(max(off - flushed, 0.0)) / size, rounding)
    if error <= _LEAST_ERROR or cured * _CURED >= error:
        return None
    return Underflow(error, math.ldexp(scale, room), cured)


def _worst(losses: Iterable[GradientLoss]) -> tuple[float, bool]:
    """The worst share that a parameter lost, and whether any gradient overflowed."""
    losses = list(losses)
    weights = [loss for loss in losses if loss.known]
    known = sum(loss.known for loss in weights)
    pooled = sum(max(0, loss.zero - loss.reverse) for loss in weights) / known if known else 0.0
    worst = max([pooled, *(loss.lost for loss in weights if loss.known >= FEW)])
    return worst, any(loss.nonfinite for loss in losses)


def histogram_of(tensor: torch.Tensor) -> GradientHistogram:
    """The exact histogram of an unscaled gradient, a strided real tensor of any shape and floating dtype.

    Rounding noise must be left out (a key's bias before a softmax has no other gradient): no scale keeps it.
    """
    magnitudes = tensor.detach().reshape(-1).double().abs()
    finite = magnitudes[magnitudes < math.inf]  # false for NaN as well
    nonzero = finite[finite > 0]
    mantissa, exponent = torch.frexp(nonzero)
    counts = torch.bincount(exponent.long() - (mantissa == 0.5).long() - LOWEST).tolist()
    return GradientHistogram(
        {number + LOWEST: count for number, count in enumerate(counts) if count},
        float(nonzero.amax()) if nonzero.numel() else 0.0,
        magnitudes.numel() - finite.numel(),
    )
