"""Is the compiled model as good as the eager one? Three arms on equal data: eager mode, compiled code, and float64.

Eager mode is no oracle: fused kernels round less often than it does. Compiled code fails where it lies further from
float64 than eager mode does, by more than chance and another order of the sums explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from ampcheck.autocast.emulate import active
from ampcheck.autocast.missing import lacking
from ampcheck.compiled.accuracy.arms import Plan, input_leaves, run_plan
from ampcheck.compiled.accuracy.checks import check_accuracy, check_compiled_error, check_compiled_gradient, tables
from ampcheck.compiled.accuracy.compare import left_out
from ampcheck.compiled.accuracy.ladder import (
    Bench,
    Climb,
    compared,
    floating_inputs,
    holds_parameters,
    measure_bench,
    measure_rounding,
    run_rung,
)
from ampcheck.compiled.accuracy.stats import (
    AOT_EAGER,
    BACKWARD_AUTOCAST,
    EMULATED,
    AccuracyStats,
    Deviation,
    Exceptions,
    Trial,
)
from ampcheck.compiled.options import CompileOptions, Optimizer
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits, resolve_limits
from ampcheck.core.run import Coverage, Finding, Run, Where
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.numerics.arm_format import native_format
from ampcheck.numerics.compiled import eagerly
from ampcheck.numerics.findings import who
from ampcheck.numerics.measure import LOSS_SCALES
from ampcheck.numerics.rounding import REROUNDINGS
from ampcheck.numerics.stats import NumericsStats, TensorError
from ampcheck.torchtools.copying import NO_SCRIPT, is_scripted, prepare
from ampcheck.torchtools.source import users_place

KINDS = (Kind.FORWARD, Kind.COMPILE, Kind.REGIONAL)
RoundingErrors: TypeAlias = "Mapping[tuple[str, str], float]"
"""The usual error of eager mode in each output and gradient, by kind and name."""

STRIDE = 2.0**-7
"""How far the plain gradient descent that stands in for an optimizer moves the weights in one step, relative to their
norm: one step of bfloat16, the least that 16-bit weights can keep."""


def measure_accuracy(
    subject: Subject,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    steps: int = 1,
    optimizer: Optimizer | None = None,
    options: Mapping[str, Any] | None = None,
    factor: float = 2.0,
    backward: bool = True,
) -> AccuracyStats:
    """Run the arms, and after a failure the stages of the compiler.

    device: one that is there. dtype: what autocast casts to; None runs the model as it is. options: of `torch.compile`.
    factor: the `precision` limit, which decides what is tried again. backward: whether gradients are judged, where
    anything requires one. Dynamo is reset. Raises `UsageError` for a subject that cannot be copied.
    """
    native = native_format(subject)
    narrow = dtype or native or torch.float32
    if is_scripted(subject):
        plan = Plan(device=device, autocast=dtype)
        arm, name = _arm(plan, narrow), format_of(narrow).name
        return AccuracyStats(subject=subject.name, arm=arm, format=name, device=device, unsupported=NO_SCRIPT)
    found = [
        _measure(subject, plan, narrow, dict(options or {}), factor)
        for plan in plans(subject, device, dtype, narrow, steps, optimizer, backward=backward)
    ]
    stats = found[0]
    if len(found) > 1 and not found[1].exceptions.eager:
        more = found[1]
        stats = replace(
            stats if stats.exceptions.compiled or stats.incomparable else more,
            deviations=stats.deviations + tuple(d for d in more.deviations if d.kind == "gradient"),
            trials=stats.trials or more.trials,
            coverage=stats.coverage + more.coverage,
            no_gradients=more.no_gradients,
        )
    return stats


def judge_accuracy(
    subject: object,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    steps: int = 1,
    optimizer: Optimizer | None = None,
    options: CompileOptions | None = None,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
) -> Run:
    """Compare compiled code of a subject of the kinds forward, compile and regional with eager mode; nothing is raised
    or emitted.

    The arguments are those of `measure_accuracy`; this machine must have the device, see `ampcheck.autocast.device`.
    """
    made = as_subject(subject)
    if made.kind not in KINDS:
        raise UsageError(f"{made.name} is of kind '{made.kind.value}': compiled code is judged through its model")
    bounds = resolve_limits(limits).with_(made.limits, f"the subject {made.name}")
    stats = measure_accuracy(
        made,
        device=device,
        dtype=dtype,
        steps=steps,
        optimizer=optimizer,
        options=options.arguments() if options is not None else None,
        factor=bounds.precision,
    )
    findings = tuple(check_accuracy(stats, bounds, checks))
    return Run(findings=findings, coverage=stats.coverage, tables=tables(stats, bounds))


def plans(
    subject: Subject,
    device: str,
    autocast: torch.dtype | None,
    narrow: torch.dtype,
    steps: int,
    optimizer: Optimizer | None,
    *,
    backward: bool = True,
) -> list[Plan]:
    """How the subject is run: as the user runs it, and once more with gradients where nothing asks for any."""
    wanted = input_leaves(subject, every=False)
    plan = Plan(device=device, autocast=autocast, loss=subject.loss, steps=steps, optimizer=optimizer, leaves=wanted)
    plan = replace(plan, backward=backward)
    if not backward or wanted or holds_parameters(subject) or not floating_inputs(subject):
        return [_probed(subject, plan, narrow)]
    every = replace(plan, leaves=input_leaves(subject, every=True), optimizer=None)
    return [replace(plan, backward=False), _probed(subject, every, narrow)]


def _probed(subject: Subject, plan: Plan, narrow: torch.dtype) -> Plan:
    """The plan with what an eager step tells: the loss scale without overflow, the rate, whether all is finite."""
    for scale in LOSS_SCALES if narrow is torch.float16 else (1.0,):
        probe = replace(plan, steps=min(plan.steps, 2), optimizer=None, scale=scale)
        prepared = prepare(subject, device=plan.device)
        seen = run_plan(probe, prepared, around=[eagerly()])
        gradients = [t.double() for key, t in seen.values.items() if key[0] == "gradient" and key[2] == 0]
        if seen.error is not None or all(bool(g.isfinite().all()) for g in gradients):
            break
    if seen.error is not None and seen.phase == "backward" and plan.loss is None:
        return replace(plan, backward=False)  # the default loss is ours: a model for inference need not have a gradient
    outputs = [t for key, t in seen.values.items() if key[0] == "output" and t.is_floating_point()]
    if plan.loss is None and outputs and not any(bool(t.isfinite().any()) for t in outputs):
        return replace(plan, backward=False)  # the default loss leaves out what is not finite: nothing would be left
    rate = 0.0
    if plan.steps * len(subject.calls) > 1 and prepared.root is not None:
        weights = [p.detach().double() for p in prepared.root.parameters() if p.requires_grad and p.numel()]
        steepness = math.hypot(*(float(g.norm()) for g in gradients if bool(g.isfinite().all())))
        rate = STRIDE * math.hypot(*(float(w.norm()) for w in weights)) / steepness if steepness else 0.0
    return replace(plan, scale=scale, finite_loss=not all(bool(t.isfinite().all()) for t in outputs), rate=rate)


def _measure(
    subject: Subject, plan: Plan, narrow: torch.dtype, options: dict[str, Any], factor: float
) -> AccuracyStats:
    bench = measure_bench(subject, plan, narrow, options)
    climb = run_rung(bench)
    stats = AccuracyStats(
        subject=subject.name,
        arm=_arm(plan, narrow),
        format=format_of(narrow).name,
        device=plan.device,
        backend=_backend(options.get("backend", "inductor")),
        reference=bench.how,
        incomparable=_incomparable(bench, climb),
        autocast=plan.autocast is not None,
        steps=plan.steps * len(subject.calls),
        exceptions=_exceptions(bench, climb),
        eager_shapes=bench.eager.shapes,
        compiled_shapes=climb.arm.shapes,
        near_ties=bench.near_ties,
        chain=bench.chain,
        reduction=bench.reduction,
        graphs=climb.graphs,
        unsupported=climb.unsupported,
        no_gradients=_no_gradients(bench),
    )
    if climb.raised or bench.eager.error is not None or stats.incomparable:
        return stats
    stats = replace(stats, deviations=climb.deviations)
    if stats.excess(factor):
        climb = run_rung(bench, draws=range(len(bench.draws)))
        stats = replace(stats, deviations=climb.deviations)
    while stats.excess(factor) and measure_rounding(bench):
        stats = replace(stats, deviations=compared(bench, climb.arms), near_ties=bench.near_ties)
    if stats.excess(factor):
        stats = replace(stats, trials=_trials(bench, stats, factor))
    return replace(stats, coverage=_coverage(stats, climb, bench))


def _trials(bench: Bench, stats: AccuracyStats, factor: float) -> tuple[Trial, ...]:
    """What mends a failure: the setting for the backward pass alone if it does, else the stages of the compiler."""
    found = []
    if bench.plan.autocast is not None and stats.excess(factor, ("gradient", "update")):
        off = _trial(run_rung(bench, settings={BACKWARD_AUTOCAST: "off"}), BACKWARD_AUTOCAST, stats, factor)
        if off.mends:
            return (off,)
        found.append(off)
    if bench.options.get("backend", "inductor") == "inductor":
        found += [_trial(run_rung(bench, rung), rung, stats, factor) for rung in (EMULATED, AOT_EAGER)]
    return tuple(found)


def _trial(climb: Climb, rung: str, stats: AccuracyStats, factor: float) -> Trial:
    tried = replace(stats, deviations=climb.deviations)
    left = tried.excess(factor)
    return Trial(rung, not climb.raised and bool(climb.deviations) and not left, climb.raised)


def _incomparable(bench: Bench, climb: Climb) -> str:
    if bench.incomparable or bench.eager.error is not None or climb.raised:
        return bench.incomparable
    if bench.random and climb.arm.streams != bench.eager.streams:
        return "the model draws random numbers, and compiled code draws others than eager mode does"
    return ""


def _exceptions(bench: Bench, climb: Climb) -> Exceptions:
    error = bench.eager.error
    if error is None and not climb.raised:
        return Exceptions()
    float32 = ""
    if error is not None:
        wide: BaseException | None = error
        if bench.plan.autocast is not None:
            plain = replace(bench.plan, autocast=None, scale=1.0)
            wide = run_plan(plain, prepare(bench.subject, device=bench.plan.device), around=[eagerly()]).error
        float32 = brief(wide) if wide is not None else ""
    missing = lacking(error, kernels=True) if error is not None else ""
    if not missing and climb.arm.error is not None:
        missing = lacking(climb.arm.error)
    file, line = users_place(error) if error is not None else ("", None)
    phase = bench.eager.phase if error is not None else "compile"
    step = (bench.eager if error is not None else climb.arm).step
    where = Where(phase=phase, file=file, line=line, step=step or None)
    return Exceptions(brief(error) if error is not None else "", climb.raised, float32, missing, where)


def _no_gradients(bench: Bench) -> str:
    if any(kind == "gradient" for kind, _, _ in bench.eager.values):
        return ""
    if not (bench.plan.leaves or holds_parameters(bench.subject)):
        return "nothing requires a gradient"
    if bench.plan.backward:
        return "no floating output has a gradient"
    outputs = [t for key, t in bench.eager.values.items() if key[0] == "output" and t.is_floating_point()]
    finite = not outputs or any(bool(t.isfinite().any()) for t in outputs)
    return "backward raises in eager mode" if finite else "no output has a finite value to be differentiated"


def _coverage(stats: AccuracyStats, climb: Climb, bench: Bench) -> Coverage:
    seen: dict[str, int] = {"compiled graphs": stats.graphs}
    for deviation in stats.comparable:
        kind = "losses" if deviation.kind == "loss" else f"{deviation.kind}s"
        seen[kind] = seen.get(kind, 0) + 1
    return Coverage(seen, {**climb.unseen, **left_out(bench.draws[0], climb.arm, stats.deviations)})


def _backend(backend: object) -> str:
    return backend if isinstance(backend, str) else str(getattr(backend, "__name__", type(backend).__name__))


def _arm(plan: Plan, narrow: torch.dtype) -> str:
    name = format_of(narrow).name + (" native" if plan.autocast is None and narrow.itemsize <= 2 else "")
    emulation = active()
    return name + (f", {emulation.policy.device} emulated" if emulation is not None else "")


# From the records of an audit -------------------------------------------------------------------------------------


def check_compiled_against_eager(
    eager: NumericsStats,
    compiled: NumericsStats,
    limits: Limits,
    usual: Callable[..., RoundingErrors] | None = None,
) -> list[Finding]:
    """Outputs and gradients of the compiled arm lie no further from the reference than those of the eager arm.

    eager, compiled: of one subject in one dtype, from an audit. usual: measures eager mode so many `times` with other
    roundings (`ampcheck.numerics.rounding.usual_errors`); called only where its first error does not explain that of
    compiled code.
    """
    stats = paired(eager, compiled)
    for times in REROUNDINGS:
        if usual is None or stats.incomparable or not stats.excess(limits.precision):
            break
        stats = paired(eager, compiled, usual(times=times))
    findings = [*check_compiled_error(stats, limits), *check_compiled_gradient(stats, limits)]
    return [replace(finding, subject=who(compiled)) for finding in findings]


def paired(
    eager: NumericsStats, compiled: NumericsStats, usual: RoundingErrors = MappingProxyType({})
) -> AccuracyStats:
    """Two arms of one subject as one record."""
    twins = {(e.kind, e.name): e for e in eager.errors}
    pairs = [(twins[e.kind, e.name], e) for e in compiled.errors if (e.kind, e.name) in twins and e.kind != "module"]
    reason = "" if compiled.comparable else "the model draws random numbers, and compiled code draws others"
    return AccuracyStats(
        subject=compiled.subject,
        arm=compiled.arm.replace(", compiled", ""),
        format=compiled.format,
        device=compiled.device,
        reference=compiled.reference,
        incomparable=reason,
        autocast=not compiled.native,
        deviations=tuple(_deviation(*pair, usual) for pair in pairs),
        exceptions=Exceptions(
            eager="" if eager.raised is None else eager.raised.message,
            compiled="" if compiled.raised is None else compiled.raised.message,
        ),
        near_ties=len(eager.flips),
        chain=eager.chain,
        reduction=eager.reduction,
        graphs=compiled.graphs,
        unsupported=compiled.unsupported,
        no_gradients=compiled.no_backward,
        coverage=replace(compiled.coverage),
    )


def _deviation(eager: TensorError, compiled: TensorError, usual: RoundingErrors) -> Deviation:
    errors, float32 = (eager.error, compiled.error), compiled.float32
    if eager.kind == "gradient" and not all(map(math.isfinite, (*errors, float32))):
        errors, float32 = (eager.share, compiled.share), 0.0  # beside an exact zero only the whole is a measure
    return Deviation(
        kind=compiled.kind,
        name=compiled.name,
        step=0,
        dtype=eager.dtype,
        eager=errors[:1],
        compiled=errors[1:],
        grain=format_of(eager.dtype).unit_roundoff if eager.dtype != "missing" else 0.0,
        float32=float32,
        turned=compiled.excused,
        rounded=usual.get((eager.kind, eager.name), 0.0),
        share=compiled.share,
        eager_share=eager.share,
        between=abs(compiled.error - eager.error),
        lost=max(0, compiled.nonfinite - eager.nonfinite),
        nonfinite=compiled.nonfinite,
        eager_nonfinite=eager.nonfinite,
        numel=compiled.compared + compiled.nonfinite,
        judged=compiled.compared,
    )
