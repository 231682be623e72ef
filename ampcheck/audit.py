"""The main job: plan the checks for a subject, run them, and return one `Run` with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ampcheck import evidence
from ampcheck.autocast import judge
from ampcheck.environment import environment
from ampcheck.errors import UsageError
from ampcheck.formats import format_of
from ampcheck.numerics import (
    CHECKS,
    OBSERVABLE,
    NumericsStats,
    arm_name,
    check_numerics,
    measure_compiled,
    measure_numerics,
    measure_reference,
    native_format,
)
from ampcheck.numerics.ops import OpWatch
from ampcheck.placement import Placement, place
from ampcheck.record import Coverage, Finding, Run, Scalar, Verdict, emit, merge, verify
from ampcheck.settings import Limits, load_settings
from ampcheck.subject import Kind, Subject, as_subject
from ampcheck.trace import Trace

DTYPES = ("float16", "bfloat16")
USES = (Kind.TRAINING, Kind.CALL)
"""Kinds of which the use of autocast is judged: they run as they are, under the guards."""

Progress = Callable[[str, int, int], None]
"""Told before each stage: what begins, how many stages are done, how many there are."""


def audit(
    subject: Any,
    *,
    device: str = "cpu",
    dtype: str | torch.dtype | Sequence[str | torch.dtype] = DTYPES,
    autocast: bool | None = None,
    compile: bool = True,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Run:
    """Judge a subject in every dtype asked for, eager and compiled, forward and backward.

    subject: a `Subject` or one of its shapes. Of a callable without arguments and of a training loop the use of
    autocast is judged, and only `device` and `checks` have a meaning. device: where to run; one that this machine
    lacks is emulated on the CPU, which every verdict says. dtype: what autocast casts to. autocast: None decides by the
    model: one whose weights or inputs are 16-bit already is run as it is, in that dtype alone.
    compile: also run under `torch.compile`, which resets Dynamo. checks: slugs, all by default; `coverage` is always
    among them. limits: by default those of `[tool.ampcheck]` of the working directory.

    Raises `UsageError` for a subject that cannot be judged, an unknown check, and a device or dtype that is not there.
    """
    made = as_subject(subject)
    checks = (checks,) if isinstance(checks, str) else checks
    known = dict.fromkeys((*CHECKS, *judge.CHECKS))
    if unknown := sorted(set(checks or ()) - set(known)):
        raise UsageError(f"there is no check {unknown[0]!r}; there are {', '.join(known)}")
    dtypes = [dtype] if isinstance(dtype, (str, torch.dtype)) else list(dtype)
    placement = place(device)
    if made.kind in USES:
        with placement.entered():
            run = judge.judge_use(made, checks)
        return replace(run, environment=_environment(placement), title=f"audit of {made.name}")
    native = native_format(made) if autocast is None else None
    if autocast is False:
        native = native_format(made)
        if native is None:
            raise UsageError(f"{made.name} has no 16-bit weights or inputs, and autocast=False leaves nothing to judge")
    asked = list(dict.fromkeys(_low_dtype(name, placement.device) for name in dtypes))
    if not asked:
        raise UsageError(f"no dtype was asked for; there are {', '.join(DTYPES)}")
    wanted = [native] if native is not None else asked
    bounds = (limits or load_settings().limits).with_(made.limits, f"the subject {made.name}")
    stages = 1 + len(wanted) * (2 if compile else 1)
    tell = progress or (lambda stage, done, total: None)

    with placement.entered():
        runs = _numerics(made, placement.device, wanted, native is not None, compile, bounds, checks, tell, stages)
    if native is None:
        kind = placement.emulated or torch.device(placement.device).type
        runs.append(judge.judge_policy(made, kind, wanted, checks))
    tell(f"{made.name}: done", stages, stages)
    return replace(merge(runs), environment=_environment(placement), title=f"audit of {made.name}")


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
    tell(f"{made.name}: float64", 0, stages)
    reference = measure_reference(made, device=device)
    runs, done = [], 1
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

    checks: of `overflow`, `silent-zero`, `flush`, `integer-cast`, `headroom`; all by default. On leaving the block
    the run is emitted, and `AssertionError` raised for its failures unless the block raised itself. Raises
    `UsageError` for another check.
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
        tables=evidence.tables(stats, limits),
        charts=evidence.charts(stats),
    )


def _low_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    """A dtype that autocast can cast to on this device."""
    name = format_of(dtype).name
    if name not in DTYPES:
        raise UsageError(f"autocast casts to {' or '.join(DTYPES)}, not to {name}")
    if torch.device(device).type == "cuda" and name == "bfloat16" and not torch.cuda.is_bf16_supported():
        raise UsageError(f"device {device!r} has no bfloat16: use --dtype float16")
    low: torch.dtype = getattr(torch, name)
    return low
