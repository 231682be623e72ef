"""Run a subject in low precision beside its reference and record everything that the checks look at."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ampcheck.autocast.emulate import active
from ampcheck.autocast.missing import MissingKernels, lacking
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Where
from ampcheck.core.subject import Subject
from ampcheck.health import TensorHealth, health_of
from ampcheck.numerics.arm_format import arm_name
from ampcheck.numerics.arms import Outcome, run_arm
from ampcheck.numerics.compare import compare, without_counterpart
from ampcheck.numerics.compiled import measure_graphs
from ampcheck.numerics.decisions import Decisions
from ampcheck.numerics.distance import relative_error
from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.numerics.ops import OpWatch
from ampcheck.numerics.reference import Reference, WideRun
from ampcheck.numerics.rounded_inputs import RoundedInputs
from ampcheck.numerics.stats import LOST, NumericsStats, Raised, TensorError, gradient_module
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools.copying import NO_SCRIPT, Prepared, is_scripted, prepare, recompiled
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import users_place
from ampcheck.torchtools.trace import OpEvent, Trace

LOSS_SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
"""Where torch.amp.GradScaler starts, and what it backs off to; float16 is judged at the first without overflow."""


@dataclass(frozen=True, slots=True)
class Eager:
    """The eager run and what the compiled one is judged with."""

    stats: NumericsStats
    decisions: Decisions
    rounded: frozenset[str]


def measure_numerics(
    subject: Subject,
    reference: Reference,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    native: bool = False,
    scales: Sequence[float] | None = None,
) -> Eager:
    """Run forward and backward in eager mode under autocast to `dtype`, or as the model is when it is `native`.

    float16 is run at the loss scales that GradScaler goes through, until no gradient overflows that float64's does not;
    scales: at these instead.
    """
    for scale in scales or (LOSS_SCALES if dtype is torch.float16 else (1.0,)):
        prepared = prepare(subject, device=device)
        decisions, rounded = Decisions(), RoundedInputs(prepared)
        ops = OpWatch(histogram=True, integer_inputs=_integer_inputs(prepared))
        trace = Trace(prepared.root, observers=(decisions, ops, rounded))
        missing = MissingKernels()
        emulated = [missing] if active() is not None else []
        outcome = run_arm(
            prepared,
            device=device,
            dtype=None if native else dtype,
            loss=subject.loss,
            around=[*emulated, EqualRandom(), trace],
            scale=scale,
            finite_loss=reference.finite_loss,
            reached=ops.reach,
        )
        twins = reference.wide.outcome
        if not _overflowed(outcome.gradients, twins.gradients) or _overflowed(outcome.outputs, twins.outputs):
            break  # a smaller loss scale mends a gradient, and no output
    if outcome.prevented and trace.unseen:
        outcome.no_backward += f", though {', '.join(trace.unseen)} was not seen and may have one"
    raised = None
    if outcome.error is not None:
        if reference.reached == outcome.phase == "backward":
            outcome.no_backward = f"backward raises in float32 too: {brief(outcome.error)}"
            outcome.prevented = True
        else:
            raised = _raised(outcome, prepared, trace.failed)
            if lack := lacking(outcome.error):
                raised = replace(raised, missing=True, message=f"{raised.where.op or 'an op'}: {lack}")
    inputs = frozenset(rounded.names)
    moved, wide = reference.moved(dtype, inputs), reference.wide
    stats = NumericsStats(
        subject=subject.name,
        arm=arm_name(dtype, native, compiled=False),
        format=format_of(dtype).name,
        device=device,
        native=native,
        reference=reference.how,
        ops=ops.facts(),
        errors=compare(outcome, wide, moved, reference.moved(torch.float32, inputs), reference.float32_errors),
        flips=wide.decisions.flips(decisions, [run.decisions for run in moved], reference.float32),
        health=ops.health(),
        reference_nonfinite=sum(int((~t.isfinite()).sum()) for t in wide.outcome.outputs.values()),
        reference_produced=wide.produced,
        zeroed_buffers=_zeroed_buffers(prepared),
        raised=raised,
        losses=tuple(str(d).removeprefix("torch.") for d in outcome.losses),
        module_dtypes=_module_dtypes(outcome),
        declared_dtypes={pattern: format_of(d).name for pattern, d in subject.dtypes.items()},
        scale=outcome.scale,
        chain=max(1, ops.longest_chain),
        reduction=ops.longest_reduction,
        draws=wide.draws,
        no_backward=outcome.no_backward,
        prevented=outcome.prevented,
        cut=_cut(prepared, outcome),
        loss_nonfinite=_loss_overflowed(outcome, twins),
        low=ops.low,
        casts=ops.casts,
        left={name: (_plain(old), _plain(new)) for name, (old, new) in outcome.left.items()},
        coverage=Coverage(
            _positive(
                {
                    "ops": len(trace.events),
                    "16-bit ops": ops.low,
                    "tensors": ops.measured,
                    "modules": len({key[0] for key in outcome.modules if key in wide.outcome.modules}),
                    "outputs": len(outcome.outputs),
                    "gradients": len(outcome.gradients),
                }
            ),
            {**ops.unseen, **trace.unseen, **_unseen(outcome, wide, moved), **_substituted(missing), **_off()},
        ),
    )
    stats = _following(stats, outcome, reference, decisions, dtype, inputs)
    return Eager(replace(stats, unrepeated=_unrepeated(stats, reference)), decisions, inputs)


def _unrepeated(stats: NumericsStats, reference: Reference) -> float:
    """How far the reference lies from a second run of it, looked at where a tensor is beyond its limit or depends on
    its data so much that the limit says little; 0 where an error is larger than that explains."""
    factor, far = Limits().precision, 0.0
    beyond = {e for e in stats.errors if e.kind != "module" and stats.beyond(e, factor)}
    doubtful = [e for e in stats.errors if e in beyond or (e.kind != "module" and e.sensitivity > LOST / 2)]
    again = reference.repeated().outcome if doubtful else Outcome()
    for error in doubtful:
        twins, others = (
            (run.gradients if error.kind == "gradient" else run.outputs) for run in (reference.wide.outcome, again)
        )
        known = error.name in others and error.name in twins and not (error.nonfinite or error.misplaced)
        distance = relative_error(others[error.name], twins[error.name].double()) if known else 0.0
        if error in beyond and error.error > 10 * distance:
            return 0.0
        far = max(far, distance)
    return far


def _following(
    stats: NumericsStats,
    outcome: Outcome,
    reference: Reference,
    decisions: Decisions,
    dtype: torch.dtype,
    inputs: frozenset[str],
) -> NumericsStats:
    """Compare with a reference that takes the same decisions, where rounding explains that they fell otherwise.

    Beyond a near tie the values of two runs are other quantities; the reference that follows makes them the same again.
    """
    factor = Limits().precision
    jumps = decisions.kinks and any(e.kind == "gradient" and stats.beyond(e, factor) for e in stats.errors)
    if stats.flips and not stats.honest(stats.flips[0], factor):
        return stats
    if not stats.flips and not jumps:
        return stats
    wide = reference.following(decisions)
    if wide.outcome.error is not None or wide.decisions.flips(decisions):
        return stats
    moved = reference.moved(dtype, inputs, decisions)
    hair = reference.moved(torch.float32, inputs, decisions)
    errors = compare(outcome, wide, moved, hair, reference.float32_errors)
    if not stats.flips:  # a ReLU moves nothing but the gradient when it changes sides at zero
        errors = tuple(e for e in stats.errors if e.kind != "gradient") + tuple(
            e for e in errors if e.kind == "gradient"
        )
    return replace(stats, errors=errors, followed=True)


def measure_compiled(
    subject: Subject,
    reference: Reference,
    eager: Eager,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    native: bool = False,
) -> NumericsStats:
    """Run the same under `torch.compile`, or as the subject is compiled already.

    Outputs, loss and gradients are judged, and what each cast inside the graphs loses is measured.

    The loss scale, the chain of roundings and the sensitivities are those of the eager run. Where that one decided
    otherwise than float64, compiled code may do so too, and is excused as far as the decisions move the reference.
    """
    if is_scripted(subject):
        return _not_compiled(eager.stats, arm_name(dtype, native, compiled=True), NO_SCRIPT)
    prepared = prepare(subject, device=device)
    telemetry = Telemetry([prepared.root] if prepared.root is not None else [], aside=True)  # judged is what users run
    with measure_graphs() as graphs, telemetry.watching():
        blocks = iter(recompiled(subject, prepared))
        outcome = run_arm(
            prepared,
            device=device,
            dtype=None if native else dtype,
            loss=subject.loss,
            transform=lambda block: next(blocks),
            scale=eager.stats.scale,
            keep_modules=False,
            finite_loss=reference.finite_loss,
        )
    raised = None
    if outcome.error is not None and not reference.reached == outcome.phase == "backward":
        lack = lacking(outcome.error)
        raised = Raised(Where(phase="compile"), lack or brief(outcome.error), missing=bool(lack))
    moved, hair = reference.moved(dtype, eager.rounded), reference.moved(torch.float32, eager.rounded)
    errors = compare(outcome, reference.wide, moved, hair, reference.float32_errors)
    if eager.stats.followed:
        followed = {(e.kind, e.name): e for e in _followed_errors(outcome, reference, eager, dtype)}
        errors = tuple(min(e, followed.get((e.kind, e.name), e), key=lambda one: one.error) for e in errors)
    inside = telemetry.read()
    health = {}
    for path, tensor in outcome.outputs.items():
        seen = health_of(tensor, histogram=True)
        if isinstance(seen, TensorHealth):
            health["forward", f"output {path}".strip()] = seen
    return replace(
        eager.stats,
        arm=arm_name(dtype, native, compiled=True),
        compiled=True,
        ops=(),
        errors=errors,
        health=health,
        raised=raised,
        module_dtypes={},
        no_backward=outcome.no_backward,
        prevented=outcome.prevented,
        loss_nonfinite=_loss_overflowed(outcome, reference.wide.outcome),
        graphs=graphs.count,
        unsupported=graphs.unsupported,
        inside=inside,
        coverage=Coverage(
            _positive(
                {
                    "graphs": graphs.count,
                    "values inside graphs": len(inside.sites),
                    "outputs": len(outcome.outputs),
                    "gradients": len(outcome.gradients),
                }
            ),
            {**graphs.unseen, **inside.unseen, **_unseen(outcome, reference.wide, moved)},
        ),
    )


def _not_compiled(stats: NumericsStats, arm: str, why: str) -> NumericsStats:
    """The record of a compiled run that the compiler declined."""
    stats = replace(stats, arm=arm, compiled=True, ops=(), errors=(), health={}, raised=None, module_dtypes={})
    return replace(stats, graphs=0, unsupported=why, coverage=Coverage())


def _followed_errors(outcome: Outcome, reference: Reference, eager: Eager, dtype: torch.dtype) -> Iterator[TensorError]:
    """The errors against the reference that decides as eager mode did; what those decisions move is excused."""
    wide = reference.following(eager.decisions)
    moved = reference.moved(dtype, eager.rounded, eager.decisions)
    hair = reference.moved(torch.float32, eager.rounded, eager.decisions)
    twins = {**wide.outcome.outputs, **wide.outcome.gradients}
    plain = {**reference.wide.outcome.outputs, **reference.wide.outcome.gradients}
    for error in compare(outcome, wide, moved, hair):
        turned = error.name in twins and error.name in plain
        off = relative_error(twins[error.name], plain[error.name].double()) if turned else 0.0
        yield replace(error, excused=off)


def _unseen(outcome: Outcome, wide: WideRun, moved: Sequence[WideRun]) -> dict[str, int]:
    return _positive(
        {
            **outcome.unseen,
            "module outputs beyond the memory that one run keeps": outcome.dropped + wide.outcome.dropped,
            "module outputs without a counterpart in float64": without_counterpart(outcome, wide),
            "models that raise when their weights are moved by a rounding": int(not moved),
            "results that have 16 bits in float64 too, by casts of the model's own": wide.low,
        }
    )


def _substituted(missing: MissingKernels) -> dict[str, int]:
    return {f"{op} has no 16-bit kernel on this CPU: run in float32 and rounded": n for op, n in missing.ran.items()}


def _off() -> dict[str, int]:
    emulation = active()
    made = emulation.made_before if emulation is not None else 0
    return {"regions of torch.autocast that are off since they were made before the emulation": made} if made else {}


def _overflowed(values: Mapping[str, torch.Tensor], twins: Mapping[str, torch.Tensor]) -> bool:
    """Whether an element is not finite that is finite in the reference."""
    return any(
        bool((~tensor.isfinite() & twins[name].isfinite()).any())
        for name, tensor in values.items()
        if name in twins and tensor.shape == twins[name].shape
    )


def _loss_overflowed(outcome: Outcome, twins: Outcome) -> bool:
    return any(
        not bool(loss.isfinite().all()) and bool(twin.isfinite().all())
        for loss, twin in zip(outcome.totals, twins.totals, strict=False)
    )


def _raised(outcome: Outcome, prepared: Prepared, failed: OpEvent | None) -> Raised:
    """Where the model raised: the op that failed, or the place in its own code where composite code gave up."""
    assert outcome.error is not None
    message = brief(outcome.error)
    if failed is not None:
        return Raised(failed.where, message)
    names = {id(m): n for n, m in prepared.root.named_modules()} if prepared.root is not None else {}
    frames = (frame for frame, _ in traceback.walk_tb(outcome.error.__traceback__))
    inside = [names[id(frame.f_locals.get("self"))] for frame in frames if id(frame.f_locals.get("self")) in names]
    module = inside[-1] if inside else ""
    file, line = users_place(outcome.error)
    return Raised(Where(phase=outcome.phase, module=module, file=file, line=line), message)


def _cut(prepared: Prepared, outcome: Outcome) -> tuple[str, ...]:
    """The parameters of modules that ran while gradients were off, and of which none gets a gradient.

    A reentrant checkpoint whose inputs need none runs so, and so does a teacher under no_grad.
    """
    if outcome.no_backward or outcome.error is not None or prepared.root is None:
        return ()
    off = outcome.without_grad - {gradient_module(name) for name in outcome.gradients}
    named = prepared.root.named_parameters()
    return tuple(name for name, p in named if p.requires_grad and p.numel() and gradient_module(name) in off)


def _integer_inputs(prepared: Prepared) -> frozenset[int]:
    """The storages of the integers that the model is given."""
    data = (t for call in prepared.calls for _, t in tensors((call.args, dict(call.kwargs))))
    whole = (t for t in data if not (t.is_floating_point() or t.is_complex()) and t.layout is torch.strided)
    return frozenset(t.untyped_storage().data_ptr() for t in whole)


def _zeroed_buffers(prepared: Prepared) -> tuple[str, ...]:
    buffers = prepared.root.named_buffers() if prepared.root is not None else ()
    return tuple(
        n for n, b in buffers if b.is_floating_point() and b.dtype.itemsize <= 2 and b.numel() and bool((b == 0).any())
    )


def _positive(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def _module_dtypes(outcome: Outcome) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for (module, _, _), tensor in outcome.modules.items():
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in found.setdefault(module, []):
            found[module].append(name)
    return {module: tuple(names) for module, names in found.items()}
