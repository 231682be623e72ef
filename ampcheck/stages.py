"""The stages of a model's audit: every eager one before the first that compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ampcheck.autocast import judge
from ampcheck.autocast.emulate import arm_of
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.compile.compiled_exception import CHECK as COMPILED_EXCEPTION
from ampcheck.checks.range.nonfinite_reference import reference
from ampcheck.compiled.accuracy import checks as accuracy_checks
from ampcheck.compiled.accuracy.judge import accuracy_run, judge_accuracy, measure_compiled_run
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.arm import Arm, armed
from ampcheck.core.errors import UsageError
from ampcheck.core.plan import Plan
from ampcheck.core.progress import Listener
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Kind
from ampcheck.numerics import (
    NumericsStats,
    check_numerics,
    measure_numerics,
    model_map,
    tables,
)
from ampcheck.numerics.measure import Measured, reference_run
from ampcheck.torchtools.copying import is_compiled_already
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.private import MissingNameError

_FULL = {
    "dynamic shapes": CompileOptions(dynamic=True),
    "max-autotune": CompileOptions(mode="max-autotune-no-cudagraphs"),
}
"""Options of `torch.compile` in a full audit, besides the defaults."""

_STEPS = 3
"""Calls in a full audit, with an update of the weights after each."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of an audit. optional: its `UsageError` is raised only if other stages find no failure. compiles: it runs
    compiled code."""

    title: str
    run: Callable[[], Run]
    optional: bool = False
    compiles: bool = False


def audit_stages(plan: Plan) -> list[Stage]:
    """The stages of an audit in their order: the eager ones first."""
    subject = plan.subject
    stages = list(_Numerics(plan).stages())
    if not plan.arms:
        text = "judged in its own dtypes; 16-bit autocast was not judged: pass dtype= (--dtype float16,bfloat16)"
        stages.append(Stage("dtypes", lambda: Run(findings=(COVERAGE.skip(subject.name, text),))))
    elif not plan.arms[0].native:
        stages.append(Stage("autocast policy", partial(judge.judge_policy, plan), plan.graphs))
    if plan.graphs:
        stages.append(Stage("graphs", lambda: plan.only(judge_graph(subject, device=plan.device)), compiles=True))
        if plan.among(accuracy_checks.CHECKS) or (plan.checks is None and subject.kind is not Kind.FORWARD):
            stages.append(Stage("compiled against eager", partial(judge_accuracy, _compared(plan)), compiles=True))
    if plan.full and plan.compile and not is_compiled_already(subject):  # which keeps its own options
        stages += _with_options(plan)
    return sorted(stages, key=lambda stage: stage.compiles)


def _with_options(plan: Plan) -> Iterator[Stage]:
    """Compiled against eager code, with each of the options and in each dtype."""
    if plan.among(accuracy_checks.CHECKS) == []:
        return
    for what, options in _FULL.items():
        named = replace(plan.subject, name=f"{plan.subject.name}, {what}")
        judged = partial(judge_accuracy, replace(_compared(plan), subject=named, steps=_STEPS), options=options)
        if not plan.arms or plan.arms[0].native:
            yield Stage(f"compiled, {what}", judged, compiles=True)
            continue
        for dtype in plan.dtypes:
            run = partial(judged, dtype=getattr(torch, dtype))
            yield Stage(f"{dtype}, compiled, {what}", run, compiles=True)


def _compared(plan: Plan) -> Plan:
    """The plan with the checks that compare compiled with eager code alone."""
    return replace(plan, checks=plan.among(accuracy_checks.CHECKS))


def run_stages(name: str, stages: Sequence[Stage], listener: Listener) -> list[Run]:
    """The runs of the stages. name: of the subject."""
    runs: list[Run] = []
    prevented: UsageError | None = None
    compiles = False
    for number, stage in enumerate(stages):
        if prevented is not None and stage.optional:
            continue
        if stage.compiles and not compiles:
            compiles = True
            listener.compiling()
        listener.progress(f"{name}: {stage.title}", number, len(stages))
        try:
            with preserved_state():  # what the model leaves behind is reported, and no other stage runs under it
                judged = stage.run()
        except MissingNameError as error:
            judged = Run(findings=(COVERAGE.skip(name, f"{stage.title} was not judged: {error}"),))
        except UsageError as error:
            if not stage.optional:
                raise
            prevented = error
            continue
        runs.append(judged)
        listener.judged(judged)
    if prevented is not None:
        if not any(run.failed for run in runs):
            raise prevented
        text = f"the numerics of the model could not be judged: {prevented}"
        runs.append(Run(findings=(COVERAGE.skip(name, text),)))
    listener.progress(f"{name}: done", len(stages), len(stages))
    return runs


class _Numerics:
    """The stages that compare each 16-bit run with its exact values; a compiled run with those of its eager run."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._subject = plan, plan.subject
        self._reference: list[Finding] = []
        self._eager: dict[torch.dtype, Measured] = {}

    def stages(self) -> Iterator[Stage]:
        """One of each arm."""
        judges = {"eager": self._judge_eager, "compiled": self._judge_compiled}
        for arm in self._plan.arms:
            judge = partial(judges[arm.mode], arm, getattr(torch, arm.dtype))
            yield Stage(f"{arm.dtype}, {arm.mode}", judge, self._plan.graphs, compiles=arm.mode == "compiled")

    def _judge_eager(self, arm: Arm, dtype: torch.dtype) -> Run:
        plan = self._plan
        eager = measure_numerics(self._subject, dtype, device=plan.device, native=arm.native, compared=plan.compile)
        if plan.compile:
            self._eager[dtype] = eager
        stats, bounds = eager.stats, plan.limits
        findings = [*self._judge_reference(arm, stats), *check_numerics(stats, bounds, plan.checks)]
        return Run(
            findings=tuple(findings),
            coverage=stats.coverage,
            tables=tables.tables(stats, bounds),
            maps=model_map.maps(stats, bounds),
        )

    def _judge_reference(self, arm: Arm, stats: NumericsStats) -> list[Finding]:
        """The findings about float64, once: of the first dtype whose run reached its end."""
        if self._reference or (stats.raised is not None and arm.dtype != self._plan.dtypes[-1]):
            return []
        self._reference = reference(stats)
        if any(finding.verdict not in (Verdict.PASS, Verdict.SKIP) for finding in self._reference):
            self._reference = reference(reference_run(self._subject, stats))  # of float64 alone
        return self._reference

    def _judge_compiled(self, arm: Arm, dtype: torch.dtype) -> Run:
        plan, subject = self._plan, self._subject
        eager = self._eager.pop(dtype)  # with its exact values
        if eager.stats.raised is not None:
            name = armed(subject.name, arm_of(dtype, "compiled", native=arm.native))
            text = "not compiled: the eager run raised, see low-precision-error"
            return Run(findings=(COMPILED_EXCEPTION.skip(name, text),))
        compiled = measure_compiled_run(subject, eager, dtype)
        return accuracy_run(compiled, plan.limits, plan.checks)
