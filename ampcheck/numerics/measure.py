"""Run a subject in low precision under a shadow, and record everything that the checks look at."""

from __future__ import annotations

import linecache
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ampcheck.autocast.emulate import active, arm_of
from ampcheck.autocast.missing import MissingKernels, lacking
from ampcheck.autocast.state import short
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.core.subject import Subject
from ampcheck.facts.memory import roundoff
from ampcheck.health import TensorHealth, health_of
from ampcheck.numerics.losses import comparable, is_floating
from ampcheck.numerics.record import Execution, arguments
from ampcheck.numerics.run import NO_GRADIENT, RunPlan, run_subject
from ampcheck.records.numerics import (
    COMPILED,
    OTHER_INFINITIES,
    OTHER_THREADS,
    UNCOMPARED,
    VALUELESS,
    Closeness,
    NumericsStats,
    Raised,
    Values,
    gradient_module,
)
from ampcheck.records.results import JUDGED_UNIT, LOST, Key, ResultError
from ampcheck.shadow import Reference, Shadow
from ampcheck.shadow.compare import compare_shadowed, examine_value, with_totals
from ampcheck.torchtools.copying import Prepared, modules_of, prepare, trains
from ampcheck.torchtools.private import FakeTensor, without_modes
from ampcheck.torchtools.pytree import is_plain
from ampcheck.torchtools.source import at_users_line, users_place

LOSS_SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
"""Where torch.amp.GradScaler starts, and what it backs off to; float16 is judged at the first without overflow."""

_SAMPLE = 4096
"""Elements of a module's result that its histogram shows, at most."""

_OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
"""The other dtype that autocast casts to."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The statistics of an eager run, and what it gave: its results where compiled code is compared."""

    stats: NumericsStats
    plan: RunPlan
    run: Execution
    masked: Collection[Key]


def measure_numerics(
    subject: Subject,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    native: bool = False,
    scales: Sequence[float] | None = None,
    compared: bool = False,
) -> Measured:
    """Run forward and backward in eager mode under autocast to `dtype`, or as the model is when it is `native`.

    float16 is run at the loss scales that GradScaler goes through, until no gradient overflows that is finite in exact;
    scales: at these instead. compared: keep the results, beside which compiled code is compared. Raises `UsageError`
    for a subject that raises in float32 too, and under autocast to any dtype.
    """
    plan = RunPlan(device, None if native else dtype, subject.loss)
    for scale in scales or (LOSS_SCALES if dtype is torch.float16 else (1.0,)):
        run = _ShadowedRun(prepare(subject, device=device), replace(plan, scale=scale), compared)
        run.execute()
        lost = {error.kind for error in run.errors if error.nonfinite}
        if "gradient" not in lost or "output" in lost:
            break  # a smaller loss scale mends a gradient, and no output
    if subject.loss is not None and run.outcome.no_backward == NO_GRADIENT:
        raise UsageError(
            f"the loss of {subject.name} must have a gradient, and it depends on no parameter or input that requires "
            "one: return it without detach(), and let the model run with gradients"
        )
    raised = _raised(subject, run) if run.outcome.error is not None else None
    if run.outcome.error is not None and raised is None and not run.outcome.gradients:  # forward has yet to end
        reason, prevented, grad = run.outcome.no_backward, run.outcome.prevented, run.outcome.phase != "forward"
        run = _ShadowedRun(prepare(subject, device=device), replace(run.plan, no_backward=reason, grad=grad), compared)
        run.execute()
        run.outcome.prevented = prevented
        raised = _raised(subject, run) if run.outcome.error is not None else None
    stats = replace(run.stats(subject, dtype, native), raised=raised)
    return Measured(stats, run.plan, run.outcome, run.masked)


def reference_run(subject: Subject, stats: NumericsStats) -> NumericsStats:
    """The run by which float64 is judged: without autocast, where values became infinite or NaN in low precision alone.

    Exact follows the decisions of its run. One that is taken on such values, as where the largest element is or which
    rows count, may leave it nothing but 0 / 0. A subject with 16-bit weights of its own has no other run.
    """
    if stats.native or not any(fault.examination.lost for fault in stats.faults):
        return stats
    try:
        wide = measure_numerics(subject, torch.float32, device=stats.device, native=True).stats
    except UsageError:  # it runs in 16 bits alone
        return stats
    return stats if wide.raised is not None else wide


class _ShadowedRun:
    """One run of a prepared subject under a shadow."""

    def __init__(self, prepared: Prepared, plan: RunPlan, compared: bool) -> None:
        self.prepared, self.plan = prepared, plan
        self.shadow = Shadow(prepared.root, freedom=compared)
        self.masked: set[Key] = set()
        self.errors: list[ResultError] = []
        self.missing = MissingKernels()
        self.lost_in: str | None = None
        self._unseen: Counter[str] = Counter()
        self._gradients: dict[str, torch.Tensor] = {}
        self._health: dict[tuple[str, str], TensorHealth] = {}
        self._closeness: dict[tuple[str, str], Closeness] = {}

    def execute(self) -> None:
        """Run it, and see what is left of the faults."""
        around: list[AbstractContextManager[Any]] = [self.missing] if active() is not None else []
        self.outcome = run_subject(
            self.prepared,
            self.plan,
            self._receive,
            keep=self.shadow.freedom is not None,
            limited=False,  # the shadow holds more than the results
            shadow=self.shadow,
            around=around,
            masked=self.masked,
            module_output=self._module_output,
        )
        if self.outcome.prevented and (inside := [r for r in self.shadow.unruled if r.startswith("what runs inside")]):
            self.outcome.no_backward += f", though {inside[0]} was not seen and may have one"
        buffers = dict(self.prepared.root.named_buffers()) if self.prepared.root is not None else {}
        self.shadow.reach({f"buffer {name}": buffer for name, buffer in buffers.items()}, self._gradients)
        self.errors = with_totals(self.errors)

    def _receive(self, key: Key, tensor: torch.Tensor) -> None:
        kind, name, _ = key
        if not comparable(tensor):
            reason = VALUELESS if tensor.is_meta or isinstance(tensor, FakeTensor) else UNCOMPARED
            self._unseen[reason] += kind == "output" and is_floating(tensor) and tensor.numel() > 0
            return
        reference = self.shadow.reference(tensor)
        error = compare_shadowed(key, tensor, reference)
        self.errors.append(error)
        if kind == "gradient":
            self._gradients[str(error)] = tensor
            with without_modes():
                self._note(("backward", gradient_module(name)), tensor, reference.exact, error)
            return
        if kind == "output" and error.seen.exact_nan + error.seen.exact_inf:
            self.masked.add(key)
        self.shadow.reach({f"the {error}": tensor})

    def _module_output(self, name: str, tensor: torch.Tensor) -> None:
        companions = self.shadow.store.known(tensor)
        if companions is None or companions.unit < JUDGED_UNIT:
            self._note(("forward", name), tensor)
            return
        reference = Reference(self.shadow.exact(tensor), self.shadow.moved(tensor), companions.unit)
        seen = examine_value(tensor, reference)
        error = ResultError(("output", name, 0), short(tensor.dtype), seen, companions.unit)
        self._note(("forward", name), tensor, reference.exact, error)
        lost = seen.error > LOST / 2 and seen.spread * roundoff(torch.float32) <= companions.unit * LOST / 2
        if lost and self.lost_in is None:
            self.lost_in = name

    def _note(
        self,
        key: tuple[str, str],
        tensor: torch.Tensor,
        exact: torch.Tensor | None = None,
        error: ResultError | None = None,
    ) -> None:
        """Add the magnitudes of a sample of a tensor to the histogram of a module, and how near it is to float64."""
        stride = max(1, -(-tensor.numel() // _SAMPLE))
        sample = tensor.reshape(-1)[::stride]
        health = health_of(sample, histogram=True)
        if isinstance(health, TensorHealth):
            self._health[key] = self._health[key] + health if key in self._health else health
        if exact is not None and error is not None:
            flushed = int(((sample == 0) & (exact.reshape(-1)[::stride] != 0)).sum())
            near = Closeness(sampled=sample.numel(), flushed=flushed)
            if error.known and not error.nonfinite:
                near = replace(near, error=error.error, limit=error.limit)
            self._closeness[key] = self._closeness.get(key, Closeness()) + near

    def stats(self, subject: Subject, dtype: torch.dtype, native: bool) -> NumericsStats:
        """The frozen record."""
        outcome = self.outcome
        judged, counts = judged_by(self.shadow)
        return NumericsStats(
            subject=subject.name,
            arm=arm_of(dtype, "eager", native=native),
            format=format_of(dtype).name,
            device=self.plan.device,
            native=native,
            errors=tuple(self.errors),
            data=tuple(_data(subject)),
            health=self._health,
            closeness=self._closeness,
            lost_in=self.lost_in,
            losses=tuple(map(short, outcome.losses)),
            module_dtypes={module: tuple(dtypes) for module, dtypes in outcome.modules.items()},
            declared_dtypes={pattern: format_of(d).name for pattern, d in subject.dtypes.items()},
            no_backward=outcome.no_backward,
            prevented=outcome.prevented,
            cut=_cut(self.prepared, outcome),
            masked=bool(self.masked) and subject.loss is None,
            left={name: (short(old), short(new)) for name, (old, new) in outcome.left.items()},
            coverage=Coverage(
                positive({**counts, "modules": len(outcome.modules), **counted_results(self.errors)}),
                {
                    **unruled(self.shadow),
                    **outcome.unseen,
                    **positive(self._unseen),
                    **substituted(self.missing.ran),
                    **_off(),
                },
            ),
            **(judged | {"scale": self.plan.scale}),  # the plan scales here, and no GradScaler
        )


def judged_by(shadow: Shadow) -> tuple[dict[str, Any], dict[str, int]]:
    """The fields of `NumericsStats` that a shadow with a judge fills, and what it looked at, for the coverage."""
    judge, faults = shadow.judge, shadow.faults
    assert judge is not None
    places = {fault.where for fault in faults} | set(judge.results.nonfinite)
    lines = {(where.file, where.line) for where in places if where.file and where.line}
    texts = {(file, line): linecache.getline(file, line or 0).strip() for file, line in lines}
    fields = {
        "faults": faults,
        "nonfinite": tuple(judge.results.nonfinite.items()),
        "chosen": tuple(judge.results.chosen),
        "largest": dict(judge.results.largest),
        "sources": {place: text for place, text in texts.items() if text},
        "ops": shadow.ops,
        "low": judge.results.low,
        "whole": judge.results.whole,
        "casts": dict(judge.casts),
        "scale": judge.scale,
    }
    return fields, {"ops": shadow.ops, "16-bit ops": judge.results.low, "tensors": judge.results.judged}


def unruled(shadow: Shadow) -> dict[str, int]:
    """Return what the shadow could not follow, for the coverage."""
    partly = {f"{op} of a large matrix (followed in the rows that ops read)": n for op, n in shadow.partly.items() if n}
    known = unfollowed(shadow)
    restarted = {reason: count for reason, count in shadow.unruled.items() if reason not in known}
    return {f"{reason} (followed from its results on)": n for reason, n in restarted.items()} | partly | known


def unfollowed(shadow: Shadow) -> dict[str, int]:
    """The parts of a run that a shadow does not follow at all: compiled code, and ops of other threads."""
    threads = {reason: shadow.unruled[reason] for reason in (OTHER_THREADS, OTHER_INFINITIES)}
    return positive({COMPILED: shadow.compiled, **threads})


def counted_results(errors: Iterable[ResultError]) -> dict[str, int]:
    """Return how many outputs and gradients were compared, for the coverage."""
    kinds = [error.kind for error in errors if not error.absent]
    return {f"{kind}s": kinds.count(kind) for kind in ("output", "gradient")}


def positive(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts that are not zero."""
    return {name: count for name, count in counts.items() if count}


def _raised(subject: Subject, run: _ShadowedRun) -> Raised | None:
    """Return what the run raised; None where float32 raises too by what we ask for: gradients, or those of the default
    loss.

    Raises `UsageError` where float32 and the other 16-bit dtype raise too: there is nothing to judge.
    """
    outcome, device = run.outcome, run.plan.device
    assert outcome.error is not None

    def outcome_of(plan: RunPlan, to: torch.dtype | None = None) -> Execution:
        around = [MissingKernels()] if active() is not None and to is None else []
        return run_subject(prepare(subject, device=device, to=to), plan, around=around)

    lack, message = lacking(outcome.error), brief(outcome.error)
    if outcome_of(run.plan).error is None:
        return Raised(_place(run, outcome), message, missing=True, ours=True)
    float32 = outcome_of(RunPlan(device, loss=subject.loss, no_backward=run.plan.no_backward), torch.float32)
    if float32.error is None:
        where = _place(run, outcome)
        return Raised(where, f"{where.op or 'an op'}: {lack}" if lack else message, missing=bool(lack))
    other = None if run.plan.autocast is None else _OTHER.get(run.plan.autocast)
    if other is not None and outcome_of(replace(run.plan, autocast=other, scale=1.0)).error is None:
        return Raised(_cast_or_place(run, outcome, short(other)), message, runs=f"under autocast to {short(other)}")
    reason = f"{outcome.phase} raises in float32 too"
    if outcome.phase == "forward" and run.plan.grad:
        reason = "forward raises with gradients"
        # A loss of the user's own is called again: what it raises is no matter of gradients.
        skipped = reason if subject.loss is None else ""
        ours = outcome_of(replace(run.plan, grad=False, no_backward=skipped)).error is None
    else:
        ours = outcome.phase == "backward" and float32.phase != "forward" and subject.loss is None
    if ours:
        outcome.no_backward, outcome.prevented = f"{reason}: {message}", trains(subject)
        return None
    place = at_users_line(float32.error)
    raise UsageError(
        f"{subject.name} raises in float32 too, in {float32.phase}{place} ({brief(float32.error)}); "
        "a model is judged in low precision once it runs in float32"
    ) from float32.error


def _cast_or_place(run: _ShadowedRun, outcome: Execution, dtype: str) -> Where:
    """The last cast of the code's own to the one dtype in which it runs; without one, where the run raised."""
    assert run.shadow.judge is not None
    place = _place(run, outcome)
    casts = [(file, line) for file, line, to in run.shadow.judge.casts if to == dtype]
    return replace(place, op="aten::_to_copy", file=casts[-1][0], line=casts[-1][1]) if casts else place


def _place(run: _ShadowedRun, outcome: Execution) -> Where:
    """Where the model raised: the op that failed, or the place in its own code where composite code gave up."""
    error, root = outcome.error, run.prepared.root
    assert error is not None
    if run.shadow.failed is not None:
        return run.shadow.failed
    names = {id(m): n for n, m in root.named_modules()} if root is not None else {}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [names[id(frame.f_locals.get("self"))] for frame in frames if id(frame.f_locals.get("self")) in names]
    return Where(outcome.phase, inside[-1] if inside else "", "", *users_place(error))


def _cut(prepared: Prepared, outcome: Execution) -> tuple[str, ...]:
    """The parameters of modules that ran while gradients were off, and of which none gets a gradient.

    A reentrant checkpoint whose inputs need none runs so, and so does a teacher under no_grad.
    """
    if outcome.no_backward or outcome.error is not None or prepared.root is None:
        return ()
    off = outcome.without_grad - {gradient_module(name) for name in outcome.gradients}
    named = prepared.root.named_parameters()
    return tuple(name for name, p in named if p.requires_grad and p.numel() and gradient_module(name) in off)


def _data(subject: Subject) -> Iterator[Values]:
    """Inputs, weights and buffers with a NaN, and weights with an infinity: a buffer of -inf is a mask."""
    for name, tensor in arguments(subject.calls):
        yield from _bad("input", name, tensor)
    modules = modules_of(subject.model)
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            yield from _bad("parameter", prefix + name, parameter)
        for name, buffer in module.named_buffers():
            yield from _bad("buffer", prefix + name, buffer)


def _bad(kind: str, name: str, tensor: torch.Tensor) -> Iterator[Values]:
    if not is_floating(tensor) or is_lazy(tensor) or not is_plain(tensor):
        return
    plain = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()  # float8 has no isnan
    values = Values(kind, name, int(plain.isnan().sum()), int(plain.isinf().sum()))
    if values.nan or (kind == "parameter" and values.infinite):
        yield values


def substituted(ran: Mapping[str, int]) -> dict[str, int]:
    """Return what ran in float32 for want of a kernel, for the coverage."""
    return {f"{op} has no 16-bit kernel on this CPU: run in float32 and rounded": n for op, n in ran.items()}


def _off() -> dict[str, int]:
    emulation = active()
    earlier = emulation.made_before if emulation is not None else 0
    text = "regions of torch.autocast that are off since they were made before the emulation"
    return {text: earlier} if earlier else {}
