"""The main job: plan the checks for a subject, run them, and return one `Run` with the evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast import judge
from ampcheck.autocast.device import Placement, place
from ampcheck.autocast.guards.guard import judge_call
from ampcheck.compiled.accuracy import checks as accuracy_checks
from ampcheck.compiled.accuracy.judge import check_compiled_against_eager, judge_accuracy
from ampcheck.compiled.graph import checks as hygiene_checks
from ampcheck.compiled.graph.judge import judge_graph, observe_graphs
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits, load_settings
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Verdict, collect, emit, merge, passed, verify
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.numerics import (
    CHECKS,
    OBSERVABLE,
    NumericsStats,
    arm_name,
    check_numerics,
    check_reference,
    measure_compiled,
    measure_nonfinite,
    measure_numerics,
    measure_reference,
    native_format,
    tables,
)
from ampcheck.numerics.ops import OpWatch
from ampcheck.numerics.rounding import usual_errors
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import naming_users_errors
from ampcheck.torchtools.trace import Trace
from ampcheck.training import calls as call_checks
from ampcheck.training import judge as training

DTYPES = ("float16", "bfloat16")
GRAPH_CHECKS = ("graph-break", "recompile", "eager-fallback", "cache-artifacts", "cudagraph")
"""What is judged of the graphs of a subject that is to be compiled."""

USES = (Kind.TRAINING, Kind.CALL)
"""Kinds that run as they are: no copy of them can be made."""


@restoring
@naming_users_errors
def audit(
    subject: Any,
    *,
    device: str = "cpu",
    dtype: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    autocast: bool | None = None,
    compile: bool = True,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    steps: int | None = None,
    progress: Progress = silent,
) -> Run:
    """Judge a subject in every dtype asked for, eager and compiled, forward and backward.

    subject: a `Subject` or one of its shapes. Of a training loop everything is judged that `ampcheck.training` knows,
    and its use of autocast; of a callable without arguments its use of autocast and of compiler caches, and the sums,
    norms and float32 products that it computes: there only `device`, `checks`, `limits` and, of a loop, `steps` (how
    many are observed) have a meaning. What comes with a list
    of calls, or as a list of blocks, is to be compiled: its graphs are judged, and compiled code beside eager mode,
    both as the model is; under autocast as well where a dtype is named. What is compiled already runs plain where
    eager mode is judged, else with its own settings.
    device: where to run; one that this machine lacks is emulated on the CPU, which every verdict says. dtype: what
    autocast casts to, by default float16 and bfloat16. autocast: None decides by the model: one whose weights or inputs
    are 16-bit already is run as it is, in that dtype alone. compile: also run under `torch.compile`, which resets
    Dynamo. checks: slugs, all by default; `coverage`, `nonfinite-reference` and whether it ran at all are always among
    them. limits: by default those of `[tool.ampcheck]` of the working directory.

    Raises `UsageError` for a subject that cannot be judged, an unknown check, and a device or dtype that is not there.
    """
    made = as_subject(subject)
    if steps is not None and made.kind is not Kind.TRAINING:
        raise UsageError(f"steps are those of a training loop; {made.name} is of kind '{made.kind.value}'")
    checks = (checks,) if isinstance(checks, str) else checks
    known = dict.fromkeys((*CHECKS, *judge.CHECKS, *accuracy_checks.CHECKS, *GRAPH_CHECKS, *training.CHECKS))
    if unknown := sorted(set(checks or ()) - set(known)):
        raise UsageError(f"there is no check {unknown[0]!r}; there are {', '.join(known)}")
    placement = place(device)
    if made.kind in USES:
        with placement.entered():
            run = _use(made, checks, limits, steps, placement.device, progress)
        return replace(run, environment=_environment(placement), title=f"audit of {made.name}")
    native = native_format(made) if autocast is None else None
    if autocast is False:
        native = native_format(made)
        if native is None:
            raise UsageError(f"{made.name} has no 16-bit weights or inputs, and autocast=False leaves nothing to judge")
    given_to_compile = compile and made.kind in (Kind.COMPILE, Kind.REGIONAL)
    to_compile = given_to_compile or (compile and bool(set(checks or ()) & set(GRAPH_CHECKS)))
    of_graphs = {*accuracy_checks.CHECKS, *GRAPH_CHECKS, "coverage"}
    as_it_is = given_to_compile and dtype is None and not autocast and set(checks or ()) <= of_graphs
    wanted = [native] if native is not None else [] if as_it_is else _low_dtypes(dtype, placement.device)
    bounds = (limits or load_settings().limits).with_(made.limits, f"the subject {made.name}")
    stages = 1 + len(wanted) * (2 if compile else 1) + (2 if to_compile else 0)

    with placement.entered():
        runs = _graphs(made, placement.device, limits, checks, progress, stages) if to_compile else []
        broken = any(run.failed for run in runs)
        try:
            if wanted:
                native_run = native is not None
                runs += _numerics(made, placement.device, wanted, native_run, compile, bounds, checks, progress, stages)
        except UsageError as error:
            if not broken:
                raise
            text = f"the numerics of the model as it is could not be judged: {error}"
            runs.append(Run(findings=(Finding("coverage", Verdict.SKIP, made.name, text),)))
            wanted = []
    if as_it_is and native is None:
        text = "judged as it is; 16-bit autocast was not judged: name a dtype (--dtype float16,bfloat16)"
        runs.append(Run(findings=(Finding("coverage", Verdict.SKIP, made.name, text),)))
    if native is None and wanted:
        kind = placement.emulated or torch.device(placement.device).type
        runs.append(judge.judge_policy(made, kind, wanted, checks))
    progress(f"{made.name}: done", stages, stages)
    return replace(merge(runs), environment=_environment(placement), title=f"audit of {made.name}")


def _use(
    made: Subject,
    checks: Collection[str] | None,
    limits: Limits | None,
    steps: int | None,
    device: str,
    progress: Progress,
) -> Run:
    """A training loop under every eye; of a callable its use of autocast, of the compiler's caches, its sums."""
    if made.kind is Kind.TRAINING:
        return training.judge_training(made, checks, limits, steps=steps, device=device, progress=progress)
    own = (*call_checks.CHECKS, "cache-artifacts", "coverage")
    guards = None if checks is None else [slug for slug in checks if slug not in own]
    if guards and not set(guards) & set(judge.GUARD_CHECKS):
        judge.judge_use(made, guards)  # raises, and names what can be judged
    runs: list[Run] = []

    def call() -> None:
        runs.append(judge.judge_use(made, guards) if guards != [] else _called(made))

    def noted() -> None:
        with collect(), observe_graphs(subject=made.name, raises=False) as seen:
            call()
        found = hygiene_checks.check_artifacts(seen.stats) if seen.stats is not None else []
        told = [f for f in found if checks is not None or f.verdict is not Verdict.SKIP]  # most have no caches
        runs.append(Run(findings=tuple(told)))

    caches = checks is None or "cache-artifacts" in checks
    if caches and checks is not None and set(checks) <= {"cache-artifacts", "coverage"}:
        run = judge_graph(made)
        return replace(run, findings=tuple(f for f in run.findings if f.check in ("cache-artifacts", "coverage")))
    sums = call_checks.judge_call(noted if caches else call, made.name, limits or load_settings().limits, checks)
    return merge([*runs, sums])


def _called(made: Subject) -> Run:
    """Call it once, and count its ops."""
    run = judge_call(made.run_call, made.name, (), must_run=True)
    if not run.findings:
        seen = passed("coverage", made.name, f"looked at {run.coverage}", run.coverage.total)
        run = replace(run, findings=(seen,))
    return run


def _graphs(
    made: Subject, device: str, limits: Limits | None, checks: Collection[str] | None, tell: Progress, stages: int
) -> list[Run]:
    """A subject that is to be compiled, as it is: its graphs, and compiled code beside eager mode and float64."""
    tell(f"{made.name}: graphs", 0, stages)
    graphs = judge_graph(made, device=device)
    kept = tuple(f for f in graphs.findings if checks is None or f.check in (*checks, "coverage"))
    runs = [replace(graphs, findings=kept)]
    wanted = None if checks is None else [slug for slug in checks if slug in accuracy_checks.CHECKS]
    if wanted is None or wanted:
        tell(f"{made.name}: compiled beside eager", 1, stages)
        runs.append(judge_accuracy(made, device=device, checks=wanted, limits=limits))
    return runs


def _numerics(
    made: Subject,
    device: str,
    wanted: Sequence[torch.dtype],
    native: bool,
    compile: bool,
    bounds: Limits,
    checks: Collection[str] | None,
    tell: Progress,
    stages: int,
) -> list[Run]:
    """Beside float64: every dtype, eager and compiled."""
    done = stages - 1 - len(wanted) * (2 if compile else 1)
    tell(f"{made.name}: float64", done, stages)
    reference = measure_reference(made, device=device)
    runs, done = [Run(findings=tuple(check_reference(measure_nonfinite(made, reference))))], done + 1
    for low in wanted:
        tell(f"{made.name}: {format_of(low).name}, eager", done, stages)
        eager = measure_numerics(made, reference, low, device=device, native=native)
        runs.append(_judged(eager.stats, bounds, checks))
        done += 1
        if compile:
            tell(f"{made.name}: {format_of(low).name}, compiled", done, stages)
            if eager.stats.raised is None:
                compiled = measure_compiled(made, reference, eager, low, device=device, native=native)
                runs.append(_judged(compiled, bounds, checks))
                usual = partial(usual_errors, made, reference, eager, low, device=device, native=native)
                found = check_compiled_against_eager(eager.stats, compiled, bounds, usual)
                runs.append(Run(findings=tuple(f for f in found if checks is None or f.check in checks)))
            else:
                text = "not compiled: the eager run raised, see low-precision-error"
                arm = arm_name(low, native, compiled=True)
                runs.append(Run(findings=(Finding("compiled-exception", Verdict.SKIP, f"{made.name} [{arm}]", text),)))
            done += 1
        reference.forget()
    return runs


def _environment(placement: Placement) -> dict[str, Scalar]:
    found = environment(placement.device)
    return {**found, "autocast policy": f"{placement.emulated}, emulated"} if placement.emulated else found


def assert_numerics(
    model: Any,
    inputs: Any = None,
    *,
    dtype: str | torch.dtype | Sequence[str | torch.dtype] = DTYPES,
    device: str = "cpu",
    autocast: bool | None = None,
    compile: bool = False,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
    **subject: Any,
) -> Run:
    """Assert that `model(*inputs)` is numerically safe in low precision, forward and backward.

    model, inputs: a module or function and its arguments (a tuple, a mapping of keyword arguments, or the one
    argument); or a `Subject` alone. subject: what `Subject` takes besides: `loss`, `dtypes`. Returns the run; raises
    `AssertionError` with every failure, and `UsageError` as `audit` does.
    """
    __tracebackhide__ = True
    made = model if inputs is None else (model, inputs)
    if isinstance(made, Subject):
        if subject or name:
            raise UsageError(f"a Subject says itself what it is: {', '.join(subject) or 'name'} belongs into it")
    else:
        made = Subject(made, name=name or getattr(model, "__name__", type(model).__name__), **subject)
    return verify(
        audit(made, device=device, dtype=dtype, autocast=autocast, compile=compile, checks=checks, limits=limits)
    )


@contextmanager
def observe(checks: Sequence[str] = (), subject: str = "this block") -> Iterator[None]:
    """Judge every op that runs inside, forward and backward, without a reference.

    checks: of `nonfinite-reference`, `overflow`, `silent-zero`, `flush`, `integer-cast`, `headroom`; all by default. On
    leaving the block the run is emitted, and `AssertionError` raised for its failures unless the block raised itself.
    Raises `UsageError` for another check.
    """
    __tracebackhide__ = True
    if unknown := sorted(set(checks) - set(OBSERVABLE)):
        raise UsageError(f"{unknown[0]!r} cannot be judged by observing; there are {', '.join(OBSERVABLE)}")
    limits = load_settings().limits
    watch = OpWatch()
    trace = Trace(observers=(watch,))
    try:
        with trace:
            yield
    except BaseException:
        emit(_observed(trace, watch, subject, checks, limits))
        raise
    verify(_observed(trace, watch, subject, checks, limits))


def _observed(trace: Trace, watch: OpWatch, subject: str, checks: Sequence[str], limits: Limits) -> Run:
    stats = NumericsStats(
        subject=subject,
        arm="",
        format=min((f.dtype for f in watch.facts()), key=lambda name: format_of(name).bits, default="float32"),
        device="",
        judged=False,
        keeps_nan=watch.keeps_nan(),
        ops=watch.facts(),
        low=watch.low,
        casts=watch.casts,
        coverage=Coverage({"ops": len(trace.events), "tensors": watch.measured}, dict(watch.unseen)),
    )
    findings = check_numerics(stats, limits, checks or OBSERVABLE)
    return Run(environment("cpu"), tuple(findings), stats.coverage)


def _judged(stats: NumericsStats, limits: Limits, checks: Collection[str] | None) -> Run:
    findings: list[Finding] = check_numerics(stats, limits, checks)
    return Run(
        findings=tuple(findings),
        coverage=stats.coverage,
        tables=tables.tables(stats, limits),
        charts=tables.charts(stats),
    )


def _low_dtypes(dtype: str | torch.dtype | Sequence[str | torch.dtype] | None, device: str) -> list[torch.dtype]:
    """The dtypes asked for, each once; the two that autocast knows where none is named."""
    named = DTYPES if dtype is None else [dtype] if isinstance(dtype, (str, torch.dtype)) else list(dtype)
    if not named:
        raise UsageError(f"no dtype was asked for; there are {', '.join(DTYPES)}")
    return list(dict.fromkeys(_low_dtype(name, device) for name in named))


def _low_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    """A dtype that autocast can cast to on this device."""
    name = format_of(dtype).name
    if name not in DTYPES:
        raise UsageError(f"autocast casts to {' or '.join(DTYPES)}, not to {name}")
    if torch.device(device).type == "cuda" and name == "bfloat16" and not torch.cuda.is_bf16_supported():
        raise UsageError(f"device {device!r} has no bfloat16: use --dtype float16")
    low: torch.dtype = getattr(torch, name)
    return low
