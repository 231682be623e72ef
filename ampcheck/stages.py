"""The stages of a model's audit: every eager one before the first that compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ampcheck.autocast import judge
from ampcheck.autocast.device import Placement
from ampcheck.autocast.emulate import arm_of
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.checks.compile.compiled_exception import CHECK as COMPILED_EXCEPTION
from ampcheck.compiled.accuracy import checks as accuracy_checks
from ampcheck.compiled.accuracy.beside import judge_compiled_run, measure_compiled_run
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.arm import armed
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.progress import Listener
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Kind, Subject
from ampcheck.numerics import (
    NumericsStats,
    check_numerics,
    check_reference,
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
class AuditContext:
    """Configuration of one audit.

    dtypes: 16-bit dtypes to run in. native: the model has 16-bit weights or inputs and runs without autocast. compile:
    also run under `torch.compile`; full: with other options of it, too. graphs: judge the graphs of the compiled
    subject, and compiled against eager code. checks: names of the selected checks, None for all. limits: as passed to
    `audit`; bounds: with those of the subject.
    """

    subject: Subject
    placement: Placement
    dtypes: tuple[torch.dtype, ...]
    native: bool
    compile: bool
    full: bool
    graphs: bool
    checks: tuple[str, ...] | None
    limits: Limits | None
    bounds: Limits

    @property
    def device(self) -> str:
        """The device that runs the subject."""
        return self.placement.device

    def only(self, run: Run) -> Run:
        """The run with the findings of selected checks, among which `coverage` always is."""
        if self.checks is None:
            return run
        return run.only((*self.checks, COVERAGE.slug))


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of an audit. optional: its `UsageError` is raised only if other stages find no failure. compiles: it runs
    compiled code."""

    title: str
    run: Callable[[], Run]
    optional: bool = False
    compiles: bool = False


def audit_stages(context: AuditContext) -> list[Stage]:
    """The stages of an audit in their order: the eager ones first."""
    subject, checks = context.subject, context.checks
    stages = list(_Numerics(context).stages())
    if not context.dtypes:
        text = "judged in its own dtypes; 16-bit autocast was not judged: pass dtype= (--dtype float16,bfloat16)"
        stages.append(Stage("dtypes", lambda: Run(findings=(COVERAGE.skip(subject.name, text),))))
    elif not context.native:
        kind = context.placement.emulated or torch.device(context.device).type
        policy = partial(judge.judge_policy, subject, kind, context.dtypes, checks)
        stages.append(Stage("autocast policy", policy, context.graphs))
    if context.graphs:
        graphs = partial(judge_graph, subject, device=context.device)
        stages.append(Stage("graphs", lambda: context.only(graphs()), compiles=True))
        accuracy = None if checks is None else [slug for slug in checks if slug in accuracy_checks.CHECKS]
        if accuracy or (accuracy is None and subject.kind is not Kind.FORWARD):
            judged = partial(judge_accuracy, subject, device=context.device, checks=accuracy, limits=context.limits)
            stages.append(Stage("compiled against eager", judged, compiles=True))
    if context.full and context.compile and not is_compiled_already(subject):  # which keeps its own options
        stages += _with_options(context)
    return sorted(stages, key=lambda stage: stage.compiles)


def _with_options(context: AuditContext) -> Iterator[Stage]:
    """Compiled against eager code, with each of the options and in each dtype."""
    subject = context.subject
    checks = None if context.checks is None else [slug for slug in context.checks if slug in accuracy_checks.CHECKS]
    if checks == []:
        return
    for what, options in _FULL.items():
        named = replace(subject, name=f"{subject.name}, {what}")
        judged = partial(judge_accuracy, named, device=context.device, steps=_STEPS, options=options, checks=checks)
        for dtype in (None,) if context.native or not context.dtypes else context.dtypes:
            title = f"{format_of(dtype).name}, compiled, {what}" if dtype is not None else f"compiled, {what}"
            yield Stage(title, partial(judged, dtype=dtype, limits=context.limits), compiles=True)


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

    def __init__(self, context: AuditContext) -> None:
        self._context = context
        self._subject = context.subject
        self._reference: list[Finding] = []
        self._eager: dict[torch.dtype, Measured] = {}

    def stages(self) -> Iterator[Stage]:
        """Every dtype, eager and compiled."""
        optional = self._context.graphs
        for dtype in self._context.dtypes:
            name = format_of(dtype).name
            yield Stage(f"{name}, eager", partial(self._judge_eager, dtype), optional)
            if self._context.compile:
                yield Stage(f"{name}, compiled", partial(self._judge_compiled, dtype), optional, compiles=True)

    def _judge_eager(self, dtype: torch.dtype) -> Run:
        context = self._context
        eager = measure_numerics(
            self._subject, dtype, device=context.device, native=context.native, compared=context.compile
        )
        if context.compile:
            self._eager[dtype] = eager
        stats, bounds = eager.stats, context.bounds
        findings = [*self._judge_reference(dtype, stats), *check_numerics(stats, bounds, context.checks)]
        return Run(
            findings=tuple(findings),
            coverage=stats.coverage,
            tables=tables.tables(stats, bounds),
            maps=model_map.maps(stats, bounds),
        )

    def _judge_reference(self, dtype: torch.dtype, stats: NumericsStats) -> list[Finding]:
        """The findings about float64, once: of the first dtype whose run reached its end."""
        if self._reference or (stats.raised is not None and dtype is not self._context.dtypes[-1]):
            return []
        self._reference = check_reference(stats)
        if any(finding.verdict not in (Verdict.PASS, Verdict.SKIP) for finding in self._reference):
            self._reference = check_reference(reference_run(self._subject, stats))  # of float64 alone
        return self._reference

    def _judge_compiled(self, dtype: torch.dtype) -> Run:
        context, subject = self._context, self._subject
        eager = self._eager.pop(dtype)  # with its exact values
        if eager.stats.raised is not None:
            name = armed(subject.name, arm_of(dtype, "compiled", native=context.native))
            text = "not compiled: the eager run raised, see low-precision-error"
            return Run(findings=(COMPILED_EXCEPTION.skip(name, text),))
        compiled = measure_compiled_run(subject, eager, dtype)
        return judge_compiled_run(compiled, context.bounds, context.checks)
