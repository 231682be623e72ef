"""Is compiled code right? A shadowed eager run gives the exact results of each call, and compiled code is compared with
them on equal data, weights and random streams: where it lies beyond what rounding explains and eager mode does not, it
is at fault. Other stages and settings of the compiler are tried then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.emulate import arm_of
from ampcheck.autocast.missing import lacking
from ampcheck.compiled.accuracy.checks import check_accuracy
from ampcheck.compiled.accuracy.comparison import EagerRun, compare_runs, lowered_ops, other_streams
from ampcheck.compiled.accuracy.plans import plans
from ampcheck.compiled.accuracy.tables import tables
from ampcheck.compiled.options import CompileOptions, Optimizer
from ampcheck.core.arm import Arm
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Coverage, Run, Where
from ampcheck.core.subject import MODELS, Subject
from ampcheck.numerics.arm_format import native_format
from ampcheck.numerics.compiled import Graphs, measure_graphs
from ampcheck.numerics.measure import Measured
from ampcheck.numerics.record import Execution
from ampcheck.numerics.run import Blocks, RunPlan, run_subject
from ampcheck.records.accuracy import (
    AOT_EAGER,
    BACKWARD_AUTOCAST,
    EMULATE,
    EMULATED,
    EQUAL_STREAMS,
    INDUCTOR,
    AccuracyStats,
    Exceptions,
    Trial,
    counted_errors,
)
from ampcheck.records.results import PRECISION, ResultError
from ampcheck.records.telemetry import TelemetryStats
from ampcheck.shadow import Shadow
from ampcheck.telemetry.checks import telemetry_tables
from ampcheck.telemetry.sites import Level, ops_in_16_bits
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools.copying import NO_SCRIPT, Prepared, is_compiled_already, is_scripted, prepare, recompiled
from ampcheck.torchtools.dynamo import configured, has_setting, in_eager_mode
from ampcheck.torchtools.interception import LoweredGraph, Runnable, intercepted, unsupported
from ampcheck.torchtools.source import users_place

_ROUNDINGS = frozenset(("aten::_to_copy", "aten::copy_", "aten::clone"))


@dataclass(frozen=True, slots=True)
class CompiledRun:
    """A compiled run: its results beside the exact ones, the exception that ended it, its graphs, ops that they compute
    in 16 bits and eager mode in float32, and what of the results was left out."""

    outcome: Execution
    graphs: Graphs
    errors: tuple[ResultError, ...] = ()
    raised: str = ""
    lowered: tuple[Where, ...] = ()
    inside: TelemetryStats | None = None
    left_out: Counter[str] = field(default_factory=Counter)


def measure_accuracy(
    subject: Subject,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    steps: int = 1,
    optimizer: Optimizer | None = None,
    options: Mapping[str, Any] | None = None,
    backward: bool = True,
) -> AccuracyStats:
    """Run the subject shadowed and compiled, and after a failure at the other stages of the compiler.

    device: one that is there. dtype: what autocast casts to; None runs the model without autocast. options: of
    `torch.compile`. backward: whether gradients are judged, where anything requires one; without it all
    runs under `torch.no_grad()`. Dynamo is reset. Raises
    `UsageError` for a subject that cannot be copied.
    """
    narrow = dtype or native_format(subject) or torch.float32
    asked = RunPlan(device, dtype, steps=steps, optimizer=optimizer, grad=backward)
    if is_scripted(subject):
        return _scripted(EagerRun(subject, asked, narrow, {}, Execution()))
    first, *more = (_measure(run_eager(subject, plan, narrow, options)) for plan in plans(subject, asked, narrow))
    if not more or more[0].exceptions.eager:
        return first
    (second,) = more
    return replace(
        first if first.exceptions.compiled or first.incomparable else second,
        errors=first.errors + tuple(e for e in second.errors if e.kind == "gradient"),
        trials=first.trials or second.trials,
        coverage=first.coverage + second.coverage,
        no_gradients=second.no_gradients,
    )


def judge_accuracy(
    plan: Plan,
    *,
    dtype: torch.dtype | None = None,
    optimizer: Optimizer | None = None,
    options: CompileOptions | None = None,
) -> Run:
    """Judge compiled code of a subject of the kinds forward, compile and regional; nothing is raised or emitted.

    The arguments are those of `measure_accuracy`; this machine must have the device, see `ampcheck.autocast.device`.
    """
    judged = plan.subject
    if judged.kind not in MODELS:
        raise UsageError(f"{judged.name} is of kind '{judged.kind.value}': compiled code is judged through its model")
    arguments, device, steps = options.arguments() if options is not None else None, plan.device, plan.steps or 1
    stats = measure_accuracy(judged, device=device, dtype=dtype, steps=steps, optimizer=optimizer, options=arguments)
    return accuracy_run(stats, plan.limits, plan.checks)


def accuracy_run(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about a compiled run, with its tables."""
    inside = stats.inside if stats.beside else None
    of_graphs = telemetry_tables(replace(inside, subject=stats.name)) if inside is not None else ()
    findings = tuple(check_accuracy(stats, limits, checks))
    return Run(findings=findings, coverage=stats.coverage, tables=(*tables(stats), *of_graphs))


def measure_compiled_run(subject: Subject, eager: Measured, dtype: torch.dtype) -> AccuracyStats:
    """Run the compiled form of a subject whose eager run is given; compile it unless it is compiled already.

    Outputs, loss, gradients, and what the calls change are compared with the exact values of the eager run, at its loss
    scale, and what each cast inside the graphs loses is measured. Random numbers are drawn as eager mode draws them.
    """
    run = EagerRun(subject, eager.plan, dtype, {}, eager.run, masked=eager.masked, beside=True)
    if is_scripted(subject):
        return _scripted(run)
    compiled = run_whole_or_parts(run, inside={"aside": True})
    if compiled.raised and eager.plan.no_backward:
        # AOTAutograd differentiates before forward runs, and raises then what eager mode raises in backward.
        compiled = run_compiled(replace(run, plan=replace(eager.plan, grad=False)), inside={"aside": True})
    compiled = with_places(run, compiled)
    run.incomparable = not_repeatable(run, compiled) if compiled.errors else "the calls give no tensor"
    return stats_of(run, compiled)


# The runs ---------------------------------------------------------------------------------------------------------


def run_eager(
    subject: Subject, plan: RunPlan, dtype: torch.dtype, options: Mapping[str, Any] | None = None
) -> EagerRun:
    """Run the subject in eager mode with companions. dtype: the narrowest format that the run computes in."""
    prepared = prepare(subject, device=plan.device)
    shadow = Shadow(prepared.root, freedom=True)
    outcome = run_subject(prepared, plan, keep=True, shadow=shadow, around=[in_eager_mode()])
    low = {where.op for where, _ in shadow.judge.results.largest} if shadow.judge is not None else set()
    plain = plan.autocast is None and dtype is torch.float32
    casts = plain and bool(low) and low <= _ROUNDINGS
    return EagerRun(subject, plan, dtype, options or {}, outcome, casts=casts)


def run_compiled(
    eager: EagerRun,
    stage: str = INDUCTOR,
    *,
    settings: Mapping[str, Any] | None = None,
    blocks: Callable[[Prepared], Blocks] | None = None,
    change: Callable[[Prepared], None] | None = None,
    inside: Mapping[str, Any] | None = None,
    seen: bool = False,
) -> CompiledRun:
    """Run the subject at one stage of the compiler, and compare. Dynamo is reset before and after.

    settings: more of the compiler. blocks: gives the compiled blocks in place of `torch.compile` at this stage. change:
    done to the prepared copy before. inside: keywords of `Telemetry`, by which values inside the graphs are measured.
    seen: intercept the graphs, which no cache of AOTAutograd's gives then, and name the ops that they lower.
    """
    changed = {**(settings or {}), **({EMULATE: True} if stage == EMULATED else {})}
    if eager.outcome.random:
        changed[EQUAL_STREAMS] = True
    prepared = prepare(eager.subject, device=eager.plan.device)
    if change is not None:
        change(prepared)
    telemetry = Telemetry([prepared.root] if prepared.root is not None else [], **inside) if inside else None
    with measure_graphs() as graphs, _ops_in_16_bits(telemetry, seen) as ops, configured(changed):
        compile = blocks or partial(_compiled, eager, stage)
        outcome = run_subject(prepared, eager.plan, keep=True, transform=compile, masked=eager.masked)
    read = telemetry.read() if telemetry is not None else None
    run = CompiledRun(outcome, graphs, raised=_describe(outcome.error), inside=read)
    if eager.outcome.error is not None:
        return run
    errors, left_out = compare_runs(eager, outcome)
    return replace(run, errors=errors, left_out=left_out, lowered=lowered_ops(eager.outcome.in_16_bits, ops))


@contextmanager
def _ops_in_16_bits(telemetry: Telemetry | None, seen: bool) -> Iterator[list[Where]]:
    """Collects the ops that the graphs of Inductor compute in 16 bits alone."""
    ops: list[Where] = []

    def collect(lowered: LoweredGraph) -> Runnable:
        ops.extend(ops_in_16_bits(lowered.module.graph, lowered.phase))
        return lowered.compiled()

    if telemetry is not None:
        with telemetry.watching():
            yield telemetry.in_16_bits
    else:
        with intercepted(collect) if seen and not unsupported() else nullcontext():
            yield ops


def _compiled(eager: EagerRun, stage: str, prepared: Prepared) -> Sequence[Any]:
    """The blocks as this stage compiles them; those that the user has compiled, as they are."""
    if stage != AOT_EAGER:
        return recompiled(eager.subject, prepared, **eager.options)
    options = {k: v for k, v in eager.options.items() if k not in ("mode", "options")} | {"backend": "aot_eager"}
    return [torch.compile(block, **options) for block in prepared.blocks]


# The record ---------------------------------------------------------------------------------------------------------


def _measure(eager: EagerRun) -> AccuracyStats:
    compiled = with_places(eager, run_whole_or_parts(eager))
    if eager.plan.autocast is not None and not compiled.raised:  # a run of its own: caches of graphs have defects too
        compiled = replace(compiled, lowered=run_whole_or_parts(eager, seen=True).lowered)
    eager.incomparable = other_streams(eager.outcome, compiled.outcome) or not_repeatable(eager, compiled)
    stats = stats_of(eager, compiled)
    if not stats.incomparable and (stats.failures() or stats.lowered):
        stats = replace(stats, trials=_trials(eager, stats))
    return stats


def stats_of(eager: EagerRun, compiled: CompiledRun) -> AccuracyStats:
    """The record of one compiled run."""
    plan, graphs = eager.plan, compiled.graphs
    backend = eager.options.get("backend", "inductor")
    incomparable = eager.incomparable
    return AccuracyStats(
        subject=eager.subject.name,
        arm=_arm(eager),
        format=format_of(eager.dtype).name,
        backend=backend if isinstance(backend, str) else str(getattr(backend, "__name__", type(backend).__name__)),
        incomparable=incomparable,
        autocast=plan.autocast is not None,
        steps=plan.steps * len(eager.subject.calls),
        scale=plan.scale,
        errors=compiled.errors,
        lowered=compiled.lowered,
        exceptions=_exceptions(eager, compiled),
        eager_shapes=eager.outcome.shapes,
        compiled_shapes=compiled.outcome.shapes,
        graphs=graphs.count,
        unsupported=graphs.unsupported,
        declined=graphs.declined,
        no_gradients=eager.outcome.no_backward,
        inside=compiled.inside,
        beside=eager.beside,
        coverage=_coverage(eager, compiled),
    )


def run_whole_or_parts(eager: EagerRun, **options: Any) -> CompiledRun:
    """The compiled run; where Dynamo declines the whole of `forward`, as for shapes that depend on values in a loop,
    that of its parts, each compiled in place."""
    whole = run_compiled(eager, **options)
    if whole.raised or not whole.graphs.unsupported or is_compiled_already(eager.subject):
        return whole
    parts = run_compiled(eager, blocks=partial(_parts, eager.options), **options)
    if parts.raised or not parts.graphs.count:
        return whole
    parts.graphs.declined = whole.graphs.declined
    parts.graphs.unseen[f"forward as a whole, whose parts were compiled: {whole.graphs.unsupported}"] = 1
    return parts


def _parts(options: Mapping[str, Any], prepared: Prepared) -> Sequence[Any]:
    """The blocks, of which each part that has a `forward` is compiled in place."""
    waiting = [block for block in prepared.blocks if isinstance(block, torch.nn.Module)]
    while waiting:
        for name, part in waiting.pop().named_children():
            if name == "_orig_mod":  # `torch.compiler.disable(module)` leaves out all of it
                continue
            if type(part).forward is torch.nn.Module.forward:  # a ModuleList
                waiting.append(part)
            else:
                # `part.compile()` compiles no module of PyTorch's own, whose files Dynamo leaves out.
                part.forward = torch.compile(part.forward, **options)
    return prepared.blocks


def with_places(eager: EagerRun, compiled: CompiledRun) -> CompiledRun:
    """The run with the ops in its graphs that first made inf or NaN of finite values, where it has some of its own.

    The graphs are compiled once more, with the statistics of each op inside: run one by one, ops round elsewhere.
    """
    inside, lost = compiled.inside, {e.kind for e in compiled.errors if e.nonfinite}
    bad = {site.where.phase for site in inside.sites if site.bad} if inside is not None else set()
    if not lost or "forward" in bad or (bad and lost == {"gradient"}):
        return compiled
    again = run_compiled(eager, inside={"level": Level.OPS}).inside
    assert again is not None
    more = tuple(site for site in again.sites if site.bad and site.where.phase not in bad)
    known = inside.sites if inside is not None else ()
    return replace(compiled, inside=replace(inside or again, sites=(*more, *known)))


def not_repeatable(eager: EagerRun, compiled: CompiledRun) -> str:
    """Why the runs differ by themselves, which have equal seeds; "" where a second eager run gives what the first gave,
    or nothing is at fault."""
    if not any(e.at_fault or e.beyond(PRECISION) for e in compiled.errors):
        return ""
    if other := other_streams(eager.outcome, compiled.outcome):
        return other
    prepared = prepare(eager.subject, device=eager.plan.device)
    errors, _ = compare_runs(eager, run_subject(prepared, eager.plan, keep=True, masked=eager.masked))
    differs = any(error.at_fault for error in errors)
    return "two eager runs with equal seeds differ: nothing to compare compiled code with" if differs else ""


def _trials(eager: EagerRun, stats: AccuracyStats) -> tuple[Trial, ...]:
    """Return what passes in place of a failure: the setting for the backward pass alone, else the stages of the
    compiler."""
    trials = []
    in_backward = eager.plan.autocast is not None and (stats.failures(("gradient", "update")) or stats.lowered)
    if in_backward and has_setting(BACKWARD_AUTOCAST):
        off = _trial(BACKWARD_AUTOCAST, eager, run_compiled(eager, settings={BACKWARD_AUTOCAST: "off"}, seen=True))
        if off.passes:
            return (off,)
        trials.append(off)
    if stats.failures() and eager.options.get("backend", "inductor") == "inductor":
        trials += [_trial(stage, eager, run_compiled(eager, stage)) for stage in (EMULATED, AOT_EAGER)]
    return tuple(trials)


def _trial(name: str, eager: EagerRun, compiled: CompiledRun) -> Trial:
    stats = stats_of(eager, compiled)
    return Trial(name, bool(compiled.errors) and not (stats.failures() or stats.lowered), compiled.raised)


def _exceptions(eager: EagerRun, compiled: CompiledRun) -> Exceptions:
    error = eager.outcome.error
    prevented = eager.beside and eager.outcome.prevented and compiled.outcome.phase == "backward"
    if prevented or (error is None and not compiled.raised):
        return Exceptions()
    float32 = ""
    if error is not None:
        wide: BaseException | None = error
        if eager.plan.autocast is not None:
            plain = replace(eager.plan, autocast=None, scale=1.0)
            prepared = prepare(eager.subject, device=eager.plan.device)
            wide = run_subject(prepared, plain, around=[in_eager_mode()]).error
        float32 = brief(wide) if wide is not None else ""
    missing = lacking(error, kernels=True) if error is not None else ""
    if not missing and compiled.outcome.error is not None:
        missing = lacking(compiled.outcome.error)
    file, line = users_place(error) if error is not None else ("", None)
    phase = eager.outcome.phase if error is not None else "compile"
    step = (eager.outcome if error is not None else compiled.outcome).step
    where = Where(phase=phase, file=file, line=line, step=step or None)
    return Exceptions(brief(error) if error is not None else "", compiled.raised, float32, missing, where)


def _describe(error: BaseException | None) -> str:
    """An exception in one line; of a compiler's that wraps another, both."""
    if error is None:
        return ""
    inner = getattr(error, "inner_exception", None)
    return brief(error) + (f" {brief(inner)}" if isinstance(inner, Exception) else "")


def _coverage(eager: EagerRun, compiled: CompiledRun) -> Coverage:
    if not eager.beside and (eager.incomparable or not compiled.errors):
        return Coverage()
    seen, unknown = counted_errors(compiled.errors)
    counts, unseen = Counter({"compiled graphs": compiled.graphs.count}), Counter(compiled.graphs.unseen)
    if eager.beside and (inside := compiled.inside) is not None:
        counts = Counter({"graphs": compiled.graphs.count, "values inside graphs": len(inside.sites)})
        unseen += Counter(inside.unseen) + compiled.outcome.unseen
    return Coverage(dict(counts + seen), dict(unseen + compiled.left_out + unknown))


def _scripted(eager: EagerRun) -> AccuracyStats:
    name = format_of(eager.dtype).name
    return AccuracyStats(eager.subject.name, _arm(eager), name, unsupported=NO_SCRIPT, beside=eager.beside)


def _arm(eager: EagerRun) -> Arm:
    return arm_of(eager.dtype, "compiled", native=eager.plan.autocast is None and eager.dtype.itemsize <= 2)
