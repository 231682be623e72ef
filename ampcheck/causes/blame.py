"""Name the cause of a failure: the stage, the first op at fault, the modules to keep in float32."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from ampcheck.autocast.asked import cuda_where_asked
from ampcheck.autocast.device import place
from ampcheck.causes.case import (
    Case,
    bisect,
    faults_to_blame,
    first_cause,
    passes_without,
    run_stage,
)
from ampcheck.causes.minimise import float32_code, smallest_set, subject_in_float32
from ampcheck.causes.tables import tables
from ampcheck.checks import findings
from ampcheck.compiled.accuracy.checks import check_accuracy
from ampcheck.compiled.accuracy.comparison import EagerRun
from ampcheck.compiled.accuracy.judge import CompiledRun, measure_compiled_run, run_eager
from ampcheck.compiled.options import BlameOptions
from ampcheck.core.arguments import LOW, DType, parse_dtypes
from ampcheck.core.environment import environment, quiet
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Run, Where, merge
from ampcheck.core.subject import MODELS, Kind, Subject, as_subject
from ampcheck.core.text import cannot_run
from ampcheck.numerics import Measured, NumericsStats, native_format
from ampcheck.numerics.compiled import Graphs, dynamo_warnings_suppressed
from ampcheck.records.accuracy import BACKWARD_AUTOCAST, EAGER, INDUCTOR, STAGES
from ampcheck.records.blame import BlameStats, Cost, StageResult
from ampcheck.records.results import ResultError
from ampcheck.records.threads import Threads
from ampcheck.speed.paired import PairedMeasurement
from ampcheck.speed.steps import StepConfig, step_of
from ampcheck.speed.verdict import CONFIDENCE, median_bounds
from ampcheck.torchtools.copying import is_compiled_already, prepare, trains
from ampcheck.torchtools.dynamo import configured, has_setting
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.source import naming_users_errors

COMPILED_RUNS = 24
"""Runs that a search under torch.compile may take, each of which compiles."""

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_AUTOCAST_OFF = {BACKWARD_AUTOCAST: "off"}

_PAIRS = 15
"""Ratios of step times that are measured, each from two blocks of either version."""


@cuda_where_asked
@restoring
@naming_users_errors
def blame(
    subject: object,
    *,
    device: str | None = None,
    dtype: DType | Sequence[DType] | None = None,
    compile: bool = True,
    search: BlameOptions | None = None,
    limits: Limits | None = None,
    name: str = "",
    progress: Progress = silent,
) -> Run:
    """Name the cause of the failures of a subject in low precision or under `torch.compile`.

    subject: a `Subject` of kind forward, compile or regional, or its shape. device: where to run; one that this
    machine lacks is emulated. dtype: what autocast casts to, or `float32` for the model without autocast; by default
    16-bit models run without autocast, others under autocast to float16 and bfloat16, and subjects to be compiled
    without autocast as well. compile: also run every stage of the compiler. search: how much is run and timed. name:
    of a shape, in findings.

    The run has one finding `blame` for each dtype: a failure that names the stage, the op and the modules, or a pass;
    its tables hold the stages, the ops at fault and the code to paste. Raises `UsageError` for other
    subjects, and as `audit` does.
    """
    judged, search = as_subject(subject, name or "subject"), search or BlameOptions()
    if judged.kind not in MODELS:
        raise UsageError(
            "blame takes (module, args), (module, args, kwargs), (callable, [args, args, ...]) and ([module, ...], "
            f"[args]); {judged.name} is a {judged.kind.value} subject"
        )
    placement, native = place(device or "cpu"), native_format(judged)
    plan = Plan.of(
        judged, limits, device=placement.device, emulated=placement.emulated, compile=compile, steps=search.steps
    )
    dtypes, runs = _dtypes(judged, dtype, native), list[Run]()
    with placement.entered():
        for done, low in enumerate(dtypes):
            as_is = native is not None or low is torch.float32
            case = Case(plan, low, as_is)
            title = f"{judged.name}: {format_of(low).name}"

            def report(stage: str, title: str = title, done: int = done) -> None:
                progress(f"{title}, {stage}", done, len(dtypes))

            stats = Search(case, search, report).measure()
            runs.append(
                Run(findings=tuple(findings(stats, plan.limits)), coverage=stats.coverage, tables=tables(stats))
            )
    facts = environment(placement.device)
    if placement.emulated:
        facts = {**facts, "autocast policy": f"{placement.emulated}, emulated"}
    return replace(merge(runs), environment=facts, title=f"blame of {judged.name}")


def _dtypes(subject: Subject, dtype: DType | Sequence[DType] | None, native: torch.dtype | None) -> list[torch.dtype]:
    if native is not None:
        return [native]
    if dtype is None:
        dtype = ("float32",) * (subject.kind is not Kind.FORWARD) + LOW
    return [getattr(torch, name) for name in parse_dtypes(dtype, choices=(*LOW, "float32"))]


@dataclass(slots=True)
class Search:
    """The search of one case for what is to blame; `stats` grows with every step of it."""

    case: Case
    options: BlameOptions
    report: Callable[[str], None]
    differentiates: bool = field(init=False, default=False)
    stats: BlameStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = BlameStats(self.case.name)

    def _add(self, **changes: Any) -> None:
        self.stats = replace(self.stats, **changes)

    def _count(self, **counts: int) -> None:
        seen = Coverage({name.replace("_", " "): count for name, count in counts.items() if count})
        self._add(coverage=self.stats.coverage + seen)

    def measure(self) -> BlameStats:
        """Run one stage after the other until one fails, then locate the failure and search for what avoids it."""
        eager: Measured | None = None
        if self.case.judges_eager:
            self.report("eager")
            eager, failures = self.case.eager(self.case.subject)
            self.differentiates = trains(self.case.subject) and not eager.stats.no_backward
            self._count(eager_runs=1, ops=eager.stats.ops)
            if eager.stats.raised is not None and eager.stats.raised.missing:
                self._add(unjudged=cannot_run(eager.stats.raised.message))
                return self.stats
            raised = eager.stats.raised.message if eager.stats.raised is not None else ""
            stage = _stage_result(EAGER, eager.stats.errors, bool(failures), raised=raised)
            self._add(failures=tuple(failures), stages=(stage,))
        if self.case.plan.compile and self.stats.stage != EAGER:
            self._run_stages()
        elif self.case.plan.compile and eager is not None and eager.stats.raised is None:
            self.report("compiled")
            self._add(stages=(*self.stats.stages, self._compiled_stage(self.case.subject, eager)))
        if not self.stats.stages:
            self._add(unjudged="in float32 there is nothing but torch.compile to judge, and it is left out")
        if self.stats.stage == EAGER and eager is not None:
            self._blame_eager(eager.stats)
        return self.stats

    # The format ------------------------------------------------------------------------------------------------------

    def _blame_eager(self, stats: NumericsStats) -> None:
        failures, cause = self.stats.failures, first_cause(stats, self.stats.failures)
        faults = faults_to_blame(stats, failures)
        self._add(cause=cause, source=_source(cause), faults=tuple(faults))
        modules = [[cause.module], [cause.module, *(f.where.module for f in failures)]]
        modules += [[cause.module, *(fault.where.module for fault in faults)], *_parents(cause.module)]

        def judge(changed: Subject) -> str:
            _, left = self.case.eager(changed)
            return f"{left[0].check} fails still, at {left[0].where}" if left else ""

        self._search(judge, modules, compiled=False)
        if self.stats.code and self.case.plan.compile:
            self._try_compiled()

    def _try_compiled(self) -> None:
        """Run the compiled model with the blamed code in float32, where that passes in eager mode."""
        case = self.case
        self.report("compiled with these modules in float32")
        changed = subject_in_float32(case.subject, self.stats.code, device=case.device)
        eager, _ = case.eager(changed)
        result = self._compiled_stage(changed, eager)
        self._add(compiled_too=result)
        if not result.failed:
            return
        note = "# Passes in eager mode; compiled the model still fails with these modules in float32"
        if not case.native and has_setting(BACKWARD_AUTOCAST):
            with configured(_AUTOCAST_OFF):
                result = self._compiled_stage(changed, eager)
            if result.verdict == "within":
                self._add(compiled_setting=f'{BACKWARD_AUTOCAST} = "off"')
                note += f", and passes with\n# {self.stats.compiled_setting}"
        self._add(code=f"{note}\n{self.stats.code}")

    def _compiled_stage(self, subject: Subject, eager: Measured) -> StageResult:
        """The compiled run of a subject that is to blame in eager mode already, judged by itself."""
        case = self.case
        stats = measure_compiled_run(subject, eager, case.low)
        self._count(compiled_runs=1, graphs=stats.graphs)
        failures = case.blamed(check_accuracy(stats, case.plan.limits))
        raised = stats.exceptions.missing or stats.exceptions.compiled
        graphs = Graphs(stats.graphs, stats.unsupported)
        return _stage_result(INDUCTOR, stats.errors, bool(failures), raised=raised, graphs=graphs)

    # The compiler ----------------------------------------------------------------------------------------------------

    def _run_stages(self) -> None:
        """Judge compiled code; where it fails, every stage of the compiler."""
        before = self.stats.stages
        self.report("compiled")
        for eager in self.case.shadowed(self.case.subject):
            run, failing = run_stage(eager, INDUCTOR)
            error = eager.outcome.error
            why = eager.incomparable or (f"eager mode raised {brief(error)}" if error is not None else "")
            if why:
                self._add(stages=(*before, StageResult(INDUCTOR, None, None, False, f"not judged: {why}")))
                continue
            results = {INDUCTOR: (run, failing)}
            if failing is not None:
                for name in STAGES[1:-1]:
                    self.report(name)
                    results[name] = run_stage(eager, name)
            self._count(compiled_runs=len(results), tensors=len(run.errors), graphs=run.graphs.count)
            stages = [
                _stage_result(name, stage.errors, beyond is not None, raised=stage.raised, graphs=stage.graphs)
                for name, (stage, beyond) in ((name, results[name]) for name in STAGES if name in results)
            ]
            self._add(stages=(*(before or [_plain_stage(run)]), *stages))
            if failing is not None:
                run, failing = results[self.stats.stage]
                if run.raised and is_compiled_already(self.case.subject):
                    self._add(unsought="compiled as the user has it, it raises; assert_compiled names graph breaks")
                else:
                    self._blame_compiler(eager, failing or ())
                return

    def _blame_compiler(self, eager: EagerRun, failing: Sequence[ResultError]) -> None:
        case, stage = self.case, self.stats.stage
        self.report("bisecting the graphs")
        bisected = bisect(eager, stage, failing)
        phase = "backward" if failing and all(e.kind == "gradient" for e in failing) else "forward"
        node = bisected.node
        cause = replace(node.where, phase=phase) if node is not None else Where(phase=phase)
        self._add(cause=cause, source=node.code if node is not None else "", bisected=bisected)
        self._count(compiled_runs=bisected.runs, graph_nodes=bisected.nodes)
        by_setting = phase == "backward" and not case.native and has_setting(BACKWARD_AUTOCAST)
        if by_setting and run_stage(eager, stage, settings=_AUTOCAST_OFF)[1] is None:
            self._add(setting=f'{BACKWARD_AUTOCAST} = "off"')
        elif cause.module and stage != INDUCTOR and passes_without(eager, stage, cause.module):
            self._add(left_out=True)
        if not case.judges_eager:
            self._add(unsought="it runs in float32 already")
            return

        def judge(changed: Subject) -> str:
            again = run_eager(changed, eager.plan, case.low)
            if again.outcome.error is not None:
                return f"eager mode raises {brief(again.outcome.error)}"
            return "" if run_stage(again, stage)[1] is None else f"{stage} fails still"

        self._search(judge, [[cause.module], *_parents(cause.module)], compiled=True)

    # What avoids it ---------------------------------------------------------------------------------------------------

    def _search(self, judge: Callable[[Subject], str], guesses: Sequence[Sequence[str]], *, compiled: bool) -> None:
        case, runs = self.case, self.options.runs
        if compiled:
            runs = min(runs, COMPILED_RUNS)
        root = prepare(case.subject, device=case.device).root
        if root is None:
            self._add(unsought="the subject is a function without modules")
            return
        reasons: dict[tuple[str, ...], str] = {}

        def passes(names: tuple[str, ...]) -> bool:
            self.report(f"set {len(reasons) + 1} of at most {runs} in float32")
            reasons[names] = judge(subject_in_float32(case.subject, self._code(names), device=case.device))
            return not reasons[names]

        modules = [name for name, module in root.named_modules() if not isinstance(module, _CONTAINERS)]
        minimised = smallest_set(modules, passes, guesses=guesses, budget=runs)
        self._count(sets_of_modules_tried=minimised.runs)
        self._add(minimised=minimised, rest=list(reasons.values())[-1] if minimised.names is None and reasons else "")
        if minimised.names is not None:
            self._add(code=self._code(minimised.names))
            self._time(compiled)

    def _code(self, names: Sequence[str]) -> str:
        code = float32_code(names, self.case.plan.emulated or self.case.device, native=self.case.native)
        if isinstance(self.case.subject.model, torch.nn.Module):
            return code
        return f"# model: torch.nn.ModuleList of the modules of this subject, in their order\n{code}"

    def _time(self, compiled: bool) -> None:
        case = self.case
        if not self.options.time:
            self._add(uncosted="Its cost was not asked for.")
        elif emulated := self.case.plan.emulated:
            self._add(uncosted=f"Its cost is not known: {emulated} is emulated, and its time cannot be measured.")
        else:
            self.report("timing the step")
            changed = subject_in_float32(case.subject, self.stats.code, device=case.device)
            precision = "float32" if case.native else format_of(case.low).name
            config = StepConfig("default" if compiled else EAGER, precision)
            subjects = case.subject, changed
            try:
                self._add(cost=measure_cost(*subjects, config, device=case.device, backward=self.differentiates))
            except UsageError as error:  # the user's model, as it fails without the change
                self._add(uncosted=f"Its cost is not known: the timed step raises {brief(error.__cause__ or error)}.")


def measure_cost(
    plain: Subject, changed: Subject, config: StepConfig, *, device: str = "cpu", backward: bool = True
) -> Cost:
    """Time a step of two versions of a subject in turns. Raises `UsageError` where one of them raises."""
    subjects, threads = {"plain": plain, "changed": changed}, torch.get_num_threads()
    steps = {name: step_of(subject, config, device=device, backward=backward) for name, subject in subjects.items()}
    measurement = PairedMeasurement(steps, device=device, threads=Threads(threads, threads))
    with seeded(device), quiet(), dynamo_warnings_suppressed():  # shown when the subject was judged
        measurement.warm_up()
        for _ in range(_PAIRS):
            measurement.run(0.0)
    without, _, with_change = measurement.stats().arms
    ratios = (b / a for a, b in zip(without.seconds, with_change.seconds, strict=True))
    return cost_of(without.median, tuple(ratios), "eager step" if config.mode == EAGER else "compiled step")


def cost_of(plain: float, ratios: Sequence[float], step: str) -> Cost:
    """The cost of a change, with an interval by order statistics (the sign test)."""
    return Cost(plain, median(ratios), median_bounds(np.asarray(ratios), CONFIDENCE), step)


def _stage_result(
    name: str,
    errors: Sequence[ResultError],
    failed: bool,
    *,
    raised: str = "",
    graphs: Graphs | None = None,
) -> StageResult:
    """A stage with its largest errors of an output and of a gradient, but for those that are zero but for rounding."""
    if raised:
        return StageResult(name, None, None, failed, f"raised {raised}")
    if graphs is not None and not graphs.count:
        why = f"not judged: nothing was compiled {graphs.unsupported}".rstrip()
        return StageResult(name, None, None, False, why)
    kinds, known = (("output", "loss"), ("gradient",)), [e for e in errors if e.nonfinite or not e.noise]
    outputs, gradients = (
        max((math.inf if e.nonfinite else e.whole for e in known if e.kind in of_kind), default=None)
        for of_kind in kinds
    )
    return StageResult(name, outputs, gradients, failed, "beyond" if failed else "within")


def _plain_stage(run: CompiledRun) -> StageResult:
    """Eager mode in float32, which nothing judges: with it, and float64, compiled code is compared."""
    eager = [replace(e, norm=e.eager_norm, seen=e.eager) for e in run.errors if e.eager is not None]
    return replace(_stage_result(EAGER, eager, False), verdict="what compiled code is compared with")


def _source(where: Where) -> str:
    return linecache.getline(where.file, where.line).strip() if where.file and where.line else ""


def _parents(module: str) -> list[list[str]]:
    """Return what holds a module, from the inside out."""
    parts = module.split(".")
    return [[".".join(parts[:depth])] for depth in range(len(parts) - 1, 0, -1)]
