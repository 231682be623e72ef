"""How much of each gradient low precision loses: element by element against the same step in float64.

An element counts when float64 knows it: nonzero there, and the same in float32 within one half. So a gradient that is
mathematically zero (the key's bias before a softmax) and shows nothing but rounding is left out. Elements that are zero
in float64 and not here (a ReLU that falls otherwise) measure the noise, and are taken off.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage
from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.training.distributed.ranks import world_size
from ampcheck.training.float64_mode import shadowed
from ampcheck.training.gradients.capture import Kept, Spot, captured, scaled_backward
from ampcheck.training.loop import Snapshot, StepError, TrainingLoop, same_loss
from ampcheck.training.loss_scale_window import FEW, GradientHistogram, histogram_of, is_usable
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.protocol.recorder import Recorder

KEPT_BYTES = 4 << 30
"""How much of the shadow's gradients is kept; beyond it the rest is counted as unseen."""

SHARDED = "FSDP keeps its buffers in the format of the first step, so that none can run in float64; judge one process"

_REPLAYED = 1e-4
"""How far two runs of one step may lie apart, relatively: by kernels that add in another order each time."""

_LEAST_ERROR = 0.01
_CURED = 4.0
"""So many times smaller is an error that another loss scale cures; what rounding makes of it is the same at each."""

_ENDS = "let the step run again from the same state and return its loss: see coverage for what it raised"

_ROOM = 13
"""The largest gradient is moved to this power of two at most: the ops on the way may need more than it does."""

_FACTORS = (1023, 15, 10)
"""Powers of two that are tried, down to that at which nothing overflows: a loss in float16 is the first that does."""


@dataclass(slots=True)
class GradientLoss:
    """One gradient compared with float64, all its passes in the step together. Counts are of elements.

    kind: `parameter` or `output` (of a module). dtype: in which the gradient came; made_in: the same, or float16 where
    a float32 gradient of autocast's holds nothing but values of float16. known: nonzero in float64, and float32 agrees;
    of these zero: zero here, and subnormal: subnormal here in the format it was made in. reverse: zero in float64 and
    not here. nonfinite: infinite or NaN here. Sums of squares of the known elements: lost_squares of those that became
    zero, squares of all, in float64, and off_squares of what they differ by.
    """

    kind: str
    name: str
    module: str
    dtype: str = ""
    made_in: str = ""
    numel: int = 0
    known: int = 0
    zero: int = 0
    reverse: int = 0
    subnormal: int = 0
    nonfinite: int = 0
    lost_squares: float = 0.0
    squares: float = 0.0
    off_squares: float = 0.0

    def add(self, grad: torch.Tensor, exact: torch.Tensor, known: torch.Tensor, half: bool, factor: float) -> None:
        """One more pass. half: under autocast to float16. factor: of the loss scale of `grad`, relative to `exact`."""
        self.dtype = made_in = str(grad.dtype).removeprefix("torch.")
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
        self.squares += float((exact * known).double().square().sum())
        self.lost_squares += float(exact[gone].double().square().sum()) if lost else 0.0
        self.off_squares += float(torch.where(known, grad.double() / factor - exact, 0.0).square().sum())

    @property
    def norm(self) -> float:
        """Which part of the Euclidean norm of the known elements became zero."""
        return (self.lost_squares / self.squares) ** 0.5 if self.squares > 0 else 0.0

    @property
    def off(self) -> float:
        """The norm of what the known elements differ by, infinite if one is not finite."""
        return math.inf if self.nonfinite or not math.isfinite(self.off_squares) else math.sqrt(self.off_squares)

    @property
    def lost(self) -> float:
        """The share of the known elements that became zero, noise taken off."""
        return max(0, self.zero - self.reverse) / self.known if self.known else 0.0

    @property
    def share(self) -> float:
        """The share that is judged: of the elements, and of the norm where it is less and there are few elements.

        Of few, one that is nearly zero may become zero by cancellation alone.
        """
        return self.lost if self.known >= FEW else min(self.lost, self.norm)

    @property
    def faint(self) -> float:
        """The share of the known elements that became zero or subnormal."""
        return min(1.0, max(0, self.zero + self.subnormal - self.reverse) / self.known) if self.known else 0.0


def error_of(losses: Iterable[GradientLoss]) -> float:
    """What the gradients of all parameters together are off by, relative to their Euclidean norm; 0 without any."""
    weights = [one for one in losses if one.kind == "parameter"]
    size = math.hypot(*(math.sqrt(one.squares) for one in weights))
    return math.hypot(*(one.off for one in weights)) / size if size else 0.0


@dataclass(frozen=True, slots=True)
class Underflow:
    """What the gradients of all parameters lose at the loss scale in use and would not at another, `scale`.

    error, cured: their relative error in the Euclidean norm, at the one and at the other. A power of two as loss scale
    changes no digit, so that the difference is what vanished below the smallest number of the format.
    """

    error: float
    scale: float
    cured: float


@dataclass(frozen=True, slots=True)
class GradientStats:
    """The gradients of one step beside float64.

    step: which one. format: the 16-bit format that gradients were made in, "" where none was. scale: the loss scale, 1
    without a scaler. gradients: parameters first. histograms: in float64 and unscaled, those that were made in float16,
    by name; outputs: which gradients are those of outputs. underflow: what another loss scale would save. skipped: why
    there is nothing; prevented: whether the loop itself prevents it; hint: what to change about that. bytes: what the
    shadow kept at the same time, at most.
    """

    subject: str
    step: int
    format: str = ""
    scale: float = 1.0
    gradients: tuple[GradientLoss, ...] = ()
    histograms: dict[str, GradientHistogram] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    underflow: Underflow | None = None
    coverage: Coverage = field(default_factory=Coverage)
    skipped: str = ""
    prevented: bool = False
    hint: str = ""
    bytes: int = 0

    @property
    def lost(self) -> float | None:
        """The largest share that a parameter lost; None where nothing was measured."""
        return max((one.share for one in self.gradients if one.kind == "parameter"), default=None)


class GradientShadow:
    """One step of a loop, run in float64 and float32, and as it is as often as asked. Use it inside `preserved()`.

    start: the state before the step, which every run begins from.
    """

    def __init__(self, loop: TrainingLoop, step: int, start: Snapshot, *, outputs: bool = True) -> None:
        self._loop, self._step, self._start, self._outputs = loop, step, start, outputs
        self._known: dict[Spot, tuple[torch.Tensor, torch.Tensor]] = {}
        """The values in float64 and which of them are known."""
        self.unseen: dict[str, int] = {}
        self.drew = False
        self.bytes = 0
        self.raised: StepError | None = None

    def measure(self) -> None:
        """Run the shadows. `raised` tells if they did not come to the end."""
        wide = Kept(KEPT_BYTES)
        narrow: dict[Spot, torch.Tensor] = {}

        def agrees(spot: Spot, grad: torch.Tensor) -> None:
            value = wide.values.get(spot)
            if value is not None and value.shape == grad.shape:
                exact = value.double()
                narrow[spot] = (exact != 0) & ((grad.double() - exact).abs() <= exact.abs() / 2)

        for dtype, seen in ((torch.float64, wide), (torch.float32, agrees)):
            self._start.restore()
            with quiet(), shadowed(self._loop, dtype) as mode, captured(self._loop, seen, outputs=self._outputs):
                taken = self._loop.take(self._step)
            self.drew = self.drew or mode.drew
            self.unseen.update({f"ops without {dtype}": sum(mode.unseen.values())} if mode.unseen else {})
            if isinstance(taken, StepError) and taken.kind != "value":
                self.raised = taken
                return
        if wide.unseen:
            self.unseen["gradients beyond the memory that is kept"] = wide.unseen
        self.bytes = wide.bytes + sum(mask.numel() for mask in narrow.values())
        self._known = {spot: (value, narrow[spot]) for spot, value in wide.values.items() if spot in narrow}

    def compare(self, factor: float = 1.0) -> tuple[dict[tuple[str, str], GradientLoss], Recorder, float | StepError]:
        """The step unchanged, each gradient compared with float64. factor: of the loss scale, on top of the loop's."""
        losses: dict[tuple[str, str], GradientLoss] = {}
        recorder = Recorder(self._loop)

        def compare(spot: Spot, grad: torch.Tensor) -> None:
            known = self._known.get(spot)
            if known is None or known[0].shape != grad.shape:
                return
            loss = losses.setdefault((spot.kind, spot.name), GradientLoss(spot.kind, spot.name, spot.module))
            loss.add(grad, *known, "float16" in recorder.low, factor)

        self._start.restore()
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(recorder.listening())
            if self.drew:
                stack.enter_context(EqualRandom())
            if factor != 1.0:
                stack.enter_context(scaled_backward(factor))
            stack.enter_context(captured(self._loop, compare, outputs=self._outputs))
            taken = self._loop.take(self._step)
        return losses, recorder, taken

    def underflow(self, losses: Iterable[GradientLoss], scale: float) -> Underflow | None:
        """What the step would save at a larger loss scale, the largest that leaves room for its gradients in float16.

        losses: of the step at `scale`. None where they are exact enough, or no worse than there.
        """
        error = error_of(losses)
        largest = max((float(value.abs().amax()) for value, _ in self._known.values() if value.numel()), default=0.0)
        if not _LEAST_ERROR < error < math.inf or not 0 < largest < math.inf:
            return None
        highest = _ROOM - math.frexp(largest)[1]
        for exponent in sorted({min(highest, room) for room in _FACTORS}, reverse=True):
            factor = math.ldexp(1.0, exponent)
            cured = error_of(self.compare(factor)[0].values()) if factor > 1 else math.inf
            if math.isfinite(cured):
                return Underflow(error, scale * factor, cured) if cured * _CURED < error else None
        return None

    def histograms(self, scale: float, names: Collection[str]) -> dict[str, GradientHistogram]:
        """The named gradients in float64, unscaled; what float32 does not know is left out."""
        found: dict[str, GradientHistogram] = {}
        for spot, (value, known) in self._known.items():
            if spot.name not in names:
                continue
            one = histogram_of(value.double()[known] / scale)
            found[spot.name] = found[spot.name] + one if spot.name in found else one
        return found

    def names(self, kind: str) -> frozenset[str]:
        """Of parameters or of outputs."""
        return frozenset(spot.name for spot in self._known if spot.kind == kind)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of steps that are run again; the user's own run shows them once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measure_gradients(
    loop: TrainingLoop, step: int = 0, *, observed: float | None = None, outputs: bool = True
) -> tuple[GradientStats, GradientShadow | None]:
    """Run steps 0 to `step` of a loop, and the last one again in float64 and float32.

    observed: the loss that this step gave before; another one now means that the loop does not repeat itself, and then
    nothing can be compared. Use it inside `loop.preserved()`. The shadow, if there is one, can run the step at other
    scales.
    """

    def nothing(why: str, prevented: bool = True, hint: str = "") -> tuple[GradientStats, None]:
        return GradientStats(loop.name, step, skipped=why, prevented=prevented, hint=hint), None

    if loop.sharded:
        return nothing(SHARDED, False)
    for number in range(step):
        with quiet():
            before = loop.take(number)
        if isinstance(before, StepError):
            return nothing(f"step {number} did not come to its end", before.kind != "memory", _ENDS)
    shadow = GradientShadow(loop, step, loop.snapshot(), outputs=outputs)
    shadow.measure()
    if shadow.raised is not None:
        where = f" ({shadow.raised.file}:{shadow.raised.line})" if shadow.raised.file else ""
        return nothing(f"the step does not run in float64: {shadow.raised.message}{where}", False)
    losses, recorder, taken = shadow.compare()
    if isinstance(taken, StepError) and taken.kind != "value":
        return nothing(f"step {step} did not come to its end: {taken.message}", taken.kind != "memory", _ENDS)
    if not any(event.act is Act.BACKWARD for event in recorder.events):
        return nothing(
            f"no backward pass ran in step {step}", hint="let each step run a backward pass on its own batch"
        )
    if (
        isinstance(taken, float)
        and observed is not None
        and not (shadow.drew or math.isclose(taken, observed, rel_tol=_REPLAYED) or same_loss(taken, observed))
    ):
        return nothing(
            f"step {step} gave {observed:.6g} and, run again from the same state, {taken:.6g}: what it draws on "
            "(an iterator, a generator of its own) moves on",
            hint="let step(i) depend on i alone: index or seed the batch by i",
        )
    scale = _scale(recorder.events)
    if not is_usable(scale):
        why = f"the loss scale is {scale:g} in step {step}, which leaves nothing of the gradients"
        return nothing(why, hint="give the scaler a positive finite scale: see loss-scale")
    gradients = sorted(losses.values(), key=lambda one: (one.kind != "parameter", -one.lost))
    halves = {o.name for o in gradients if "float16" in (o.dtype, o.made_in if o.kind == "parameter" else "")}
    low = [name for event in recorder.events for name in event.low]
    low += [one.dtype for one in gradients if one.dtype in ("float16", "bfloat16")]
    seen = {
        "parameter gradients": sum(one.kind == "parameter" for one in gradients),
        "output gradients": sum(one.kind == "output" for one in gradients),
    }
    return (
        GradientStats(
            loop.name,
            step,
            "float16" if "float16" in low else low[0] if low else "",
            scale,
            tuple(gradients),
            shadow.histograms(scale, halves),
            shadow.names("output"),
            shadow.underflow(gradients, scale) if halves and world_size() == 1 else None,
            Coverage({name: count for name, count in seen.items() if count}, dict(shadow.unseen)),
            bytes=shadow.bytes,
        ),
        shadow,
    )


def _scale(events: Sequence[Event]) -> float:
    scales = [event.scale for event in events if event.act is Act.SCALE and event.enabled and event.scale is not None]
    return scales[-1] if scales else 1.0
