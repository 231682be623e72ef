"""How much of each gradient low precision loses: element by element against the same step in float64.

An element counts when float64 knows it: nonzero there, and the same in float32 within one half. So a gradient that is
mathematically zero (the key's bias before a softmax) and shows nothing but rounding is left out. Elements that are zero
in float64 and not here (a ReLU that falls otherwise) measure the noise, and are taken off.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from ampcheck.formats import format_of
from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.record import Coverage, Finding, Table, Verdict, Where
from ampcheck.settings import Limits
from ampcheck.training.gradients.capture import Kept, Spot, captured, scaled_backward
from ampcheck.training.loop import Snapshot, StepError, TrainingLoop, same_loss
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.widen import shadowed
from ampcheck.training.window import FEW, GradientHistogram, histogram_of, is_usable

KEPT_BYTES = 4 << 30
"""How much of the shadow's gradients is kept; beyond it the rest is counted as unseen."""

SHARDED = "FSDP keeps its buffers in the format of the first step, so that none can run in float64; judge one process"

_REPLAYED = 1e-4
"""How far two runs of one step may lie apart, relatively: by kernels that add in another order each time."""

_LISTED = 5
_ROWS = 40


@dataclass(frozen=True, slots=True)
class GradientLoss:
    """One gradient beside float64, all its passes in the step together. Counts are of elements.

    kind: `parameter` or `output` (of a module). dtype: in which the gradient came; made_in: the same, or float16 where
    a float32 gradient of autocast's holds nothing but values of float16. known: nonzero in float64, and float32 agrees;
    of these zero: zero here, and subnormal: subnormal here in the format it was made in. reverse: zero in float64 and
    not here. nonfinite: infinite or NaN here. norm: which part of the Euclidean norm of the known elements became zero.
    """

    kind: str
    name: str
    module: str
    dtype: str
    made_in: str
    numel: int
    known: int
    zero: int
    reverse: int
    subnormal: int
    nonfinite: int
    norm: float

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


@dataclass(frozen=True, slots=True)
class GradientStats:
    """The gradients of one step beside float64.

    step: which one. format: the 16-bit format that gradients were made in, "" where none was. scale: the loss scale, 1
    without a scaler. gradients: parameters first. histograms: in float64 and unscaled, those that were made in float16,
    by name; outputs: which gradients are those of outputs. skipped: why there is nothing. bytes: what the shadow kept
    at the same time, at most.
    """

    subject: str
    step: int
    format: str = ""
    scale: float = 1.0
    gradients: tuple[GradientLoss, ...] = ()
    histograms: dict[str, GradientHistogram] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    coverage: Coverage = field(default_factory=Coverage)
    skipped: str = ""
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

    def beside(self, factor: float = 1.0) -> tuple[dict[tuple[str, str], GradientLoss], Recorder, float | StepError]:
        """The step as it is, each gradient beside float64. factor: of the loss scale, in addition to the loop's own."""
        found: dict[tuple[str, str], _Sum] = {}
        recorder = Recorder(self._loop)

        def compare(spot: Spot, grad: torch.Tensor) -> None:
            known = self._known.get(spot)
            if known is None or known[0].shape != grad.shape:
                return
            found.setdefault((spot.kind, spot.name), _Sum(spot)).add(grad, *known, "float16" in recorder.low)

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
        return {key: total.loss() for key, total in found.items()}, recorder, taken

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


class _Sum:
    def __init__(self, spot: Spot) -> None:
        self.spot, self.dtype, self.made_in = spot, "", ""
        self.counts = [0] * 6
        self.squares = [0.0, 0.0]

    def add(self, grad: torch.Tensor, exact: torch.Tensor, known: torch.Tensor, half: bool) -> None:
        self.dtype = made_in = str(grad.dtype).removeprefix("torch.")
        if half and grad.dtype is torch.float32 and bool(((grad.half() == grad) | ~grad.isfinite()).all()):
            made_in = "float16"
        self.made_in = made_in if self.made_in in ("", made_in) else self.dtype
        zero = grad == 0
        gone = zero & known
        faint = (grad.abs() < format_of(made_in).smallest_normal) & known
        lost = int(gone.count_nonzero())
        self.counts[0] += grad.numel()
        self.counts[1] += int(known.count_nonzero())
        self.counts[2] += lost
        self.counts[3] += int(((exact == 0) & ~zero).count_nonzero())
        self.counts[4] += int(faint.count_nonzero()) - lost
        self.counts[5] += grad.numel() - int(grad.isfinite().count_nonzero())
        self.squares[0] += float((exact * known).double().square().sum())
        self.squares[1] += float(exact[gone].double().square().sum()) if lost else 0.0

    def loss(self) -> GradientLoss:
        norm = (self.squares[1] / self.squares[0]) ** 0.5 if self.squares[0] > 0 else 0.0
        spot = self.spot
        numel, known, zero, reverse, faint, bad = self.counts
        told = (numel, known, zero, reverse, faint, bad, norm)
        return GradientLoss(spot.kind, spot.name, spot.module, self.dtype, self.made_in, *told)


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

    def nothing(why: str) -> tuple[GradientStats, None]:
        return GradientStats(loop.name, step, skipped=why), None

    if loop.sharded:
        return nothing(SHARDED)
    for number in range(step):
        with quiet():
            before = loop.take(number)
        if isinstance(before, StepError):
            return nothing(f"step {number} did not come to its end")
    shadow = GradientShadow(loop, step, loop.snapshot(), outputs=outputs)
    shadow.measure()
    if shadow.raised is not None:
        where = f" ({shadow.raised.file}:{shadow.raised.line})" if shadow.raised.file else ""
        return nothing(f"the step does not run in float64: {shadow.raised.message}{where}")
    losses, recorder, taken = shadow.beside()
    if isinstance(taken, StepError) and taken.kind != "value":
        return nothing(f"step {step} did not come to its end: {taken.message}")
    if not any(event.act is Act.BACKWARD for event in recorder.events):
        return nothing(f"no backward pass ran in step {step}")
    told = isinstance(taken, float) and observed is not None and not shadow.drew
    close = isinstance(taken, float) and observed is not None and math.isclose(taken, observed, rel_tol=_REPLAYED)
    if told and isinstance(taken, float) and observed is not None and not (close or same_loss(taken, observed)):
        return nothing(
            f"step {step} gave {observed:.6g} and, run again from the same state, {taken:.6g}: what it draws on "
            "(an iterator, a generator of its own) moves on; let step(i) depend on i alone"
        )
    scale = _scale(recorder.events)
    if not is_usable(scale):
        return nothing(f"the loss scale is {scale:g} in step {step}, which leaves nothing of the gradients")
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
            Coverage({name: count for name, count in seen.items() if count}, dict(shadow.unseen)),
            bytes=shadow.bytes,
        ),
        shadow,
    )


def _scale(events: Sequence[Event]) -> float:
    scales = [event.scale for event in events if event.act is Act.SCALE and event.enabled and event.scale is not None]
    return scales[-1] if scales else 1.0


def check_gradients(stats: GradientStats, limits: Limits) -> list[Finding]:
    """`gradient-underflow`: what is nonzero in float64 stays nonzero, in every parameter.

    Fails for a parameter that loses more than `limits.underflow` of its elements, and for the gradient of a module's
    output that loses more than that of its norm. An output that loses elements but little of its norm warns: the many
    tiny gradients of a softmax over a large vocabulary vanish in every healthy run.
    """
    slug = "gradient-underflow"
    if stats.skipped:
        return [Finding(slug, Verdict.SKIP, stats.subject, f"not judged: {stats.skipped}")]
    known = [one for one in stats.gradients if one.known]
    if not known:
        return [Finding(slug, Verdict.SKIP, stats.subject, "no gradient is nonzero in float64")]
    at = f"at loss scale {stats.scale:g}"
    hint = _hint(stats)
    found: list[Finding] = []
    weights = [one for one in known if one.kind == "parameter" and one.share > limits.underflow]
    outputs = [one for one in known if one.kind == "output" and one.lost > limits.underflow]
    if weights:
        worst = max(weights, key=lambda one: one.lost)
        names = ", ".join(f"{one.name} {one.lost:.1%}" for one in weights[1:_LISTED])
        more = f"; also {names}" if names else ""
        more += f" and {len(weights) - _LISTED} more" if len(weights) > _LISTED else ""
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of {worst.name} did "
            f"({worst.zero:,} of {worst.known:,} elements, {worst.subnormal:,} more are subnormal) {at}{more}"
        )
        found.append(_finding(slug, Verdict.FAIL, stats, worst, message, worst.lost, limits, hint))
    heavy = [one for one in outputs if one.norm > limits.underflow]
    if outputs and not weights:
        worst = max(heavy or outputs, key=lambda one: (one.norm, one.lost))
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of the output of "
            f"{worst.name or 'the model'} did ({worst.zero:,} of {worst.known:,} elements, {worst.norm:.1%} of its "
            f"norm) {at}"
            f"{'' if heavy else '; no parameter lost its own'}"
        )
        verdict = Verdict.FAIL if heavy else Verdict.WARN
        found.append(_finding(slug, verdict, stats, worst, message, worst.lost, limits, hint))
    if found:
        return found
    worst = max(known, key=lambda one: one.share)
    text = f"of {len(known)} gradients none lost more than {worst.share:.2%} of its elements {at} in step {stats.step}"
    where = Where("backward", worst.module, step=stats.step)
    return [
        Finding(slug, Verdict.PASS, stats.subject, text, where, worst.share, limits.underflow, "share of the elements")
    ]


def _hint(stats: GradientStats) -> str:
    if stats.scale == 1.0:
        return "scale the loss (torch.amp.GradScaler), or use bfloat16; `loss-scale` tells which scales serve"
    return "see `loss-scale` for the scales that serve; if none does, keep this module in float32 or bfloat16"


def _finding(
    slug: str,
    verdict: Verdict,
    stats: GradientStats,
    worst: GradientLoss,
    message: str,
    observed: float,
    limits: Limits,
    hint: str,
) -> Finding:
    where = Where("backward", worst.module, step=stats.step)
    unit = "share of the elements"
    return Finding(slug, verdict, stats.subject, message, where, observed, limits.underflow, unit, hint)


def gradient_table(stats: GradientStats) -> Table | None:
    """The gradients that lost most, at most 40."""
    worst = sorted((one for one in stats.gradients if one.known), key=lambda one: (-one.faint, one.kind))[:_ROWS]
    if not worst:
        return None
    columns = ("gradient of", "kind", "dtype", "known", "zero here", "lost", "zero or subnormal", "norm lost")
    rows = [(o.name or "the model", o.kind, o.dtype, o.known, o.zero, o.lost, o.faint, o.norm) for o in worst]
    note = f"step {stats.step}, loss scale {stats.scale:g}; known: nonzero in float64, and float32 agrees"
    return Table("gradients beside float64", columns, rows, "gradient-underflow", note)
