"""Name the culprit of a failure: the stage, the first op beyond its bound, the modules to keep in float32."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.device import place
from ampcheck.compiled.accuracy.ladder import Bench, Climb
from ampcheck.compiled.accuracy.stats import BACKWARD_AUTOCAST, EAGER, INDUCTOR, LADDER, Deviation
from ampcheck.compiled.blame.arm import Arm
from ampcheck.compiled.blame.cost import measure_cost
from ampcheck.compiled.blame.locate import Step, first_cause, measure_steps, steps_beyond
from ampcheck.compiled.blame.minimise import float32_code, smallest_set, subject_in_float32
from ampcheck.compiled.blame.stats import BlameStats, Rung, check_blame, tables
from ampcheck.compiled.options import BlameOptions
from ampcheck.core.arguments import LOW, DType, parse_dtypes
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits, resolve_limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Where, merge
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.numerics import NumericsStats, measure_compiled, measure_reference, native_format
from ampcheck.numerics.measure import Eager
from ampcheck.numerics.stats import LOST
from ampcheck.torchtools.copying import is_compiled_already, prepare
from ampcheck.torchtools.dynamo import configured
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import naming_users_errors
from ampcheck.torchtools.unsupported import cannot_run

KINDS = (Kind.FORWARD, Kind.COMPILE, Kind.REGIONAL)
COMPILED_RUNS = 24
"""Runs that a search under torch.compile may take, each of which compiles."""


@restoring
@naming_users_errors
def blame(
    subject: object,
    *,
    device: str = "cpu",
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
    its tables hold the ladder, the ops beyond their bound and the code to paste. Raises `UsageError` for other
    subjects, and as `audit` does.
    """
    made, search = as_subject(subject, name or "subject"), search or BlameOptions()
    if made.kind not in KINDS:
        raise UsageError(
            "blame takes (module, args), (module, args, kwargs), (callable, [args, args, ...]) and ([module, ...], "
            f"[args]); {made.name} is a {made.kind.value} subject"
        )
    placement = place(device)
    native = native_format(made)
    bounds = resolve_limits(limits).with_(made.limits, f"the subject {made.name}")
    wanted = _dtypes(made, dtype, native)
    found = []
    with placement.entered():
        progress(f"{made.name}: float64", 0, len(wanted))
        reference = measure_reference(made, device=placement.device)
        for done, low in enumerate(wanted):
            as_is = native is not None or low is torch.float32
            arm = Arm(made, reference, low, as_is, placement.device, bounds, search.steps)
            title = f"{made.name}: {format_of(low).name}"
            report = partial(lambda title, done, stage: progress(f"{title}, {stage}", done, len(wanted)), title, done)
            stats = Search(arm, placement.emulated, compile, search.time, search.runs, report).measure()
            found.append(Run(findings=tuple(check_blame(stats)), coverage=stats.coverage, tables=tables(stats)))
            reference.forget()
    known = environment(placement.device)
    if placement.emulated:
        known = {**known, "autocast policy": f"{placement.emulated}, emulated"}
    return replace(merge(found), environment=known, title=f"blame of {made.name}")


def _dtypes(made: Subject, dtype: DType | Sequence[DType] | None, native: torch.dtype | None) -> list[torch.dtype]:
    if native is not None:
        return [native]
    if dtype is None:
        dtype = ("float32",) * (made.kind is not Kind.FORWARD) + LOW
    return [getattr(torch, name) for name in parse_dtypes(dtype, choices=(*LOW, "float32"))]


@dataclass(slots=True)
class Search:
    """The search of one arm for what is to blame; `stats` grows with every step of it."""

    arm: Arm
    emulated: str
    compile: bool
    time: bool
    runs: int
    report: Callable[[str], None]
    stats: BlameStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = BlameStats(self.arm.name)

    def _add(self, **changes: Any) -> None:
        self.stats = replace(self.stats, **changes)

    def _saw(self, **counts: int) -> None:
        seen = Coverage({name.replace("_", " "): count for name, count in counts.items() if count})
        self._add(coverage=self.stats.coverage + seen)

    def measure(self) -> BlameStats:
        """Climb the ladder until it fails, then locate the failure and search for what mends it."""
        eager: Eager | None = None
        if self.arm.judged_eager:
            self.report("eager")
            eager, failures = self.arm.eager(self.arm.subject)
            self._saw(eager_runs=1, ops=len(eager.stats.ops))
            if eager.stats.raised is not None and eager.stats.raised.missing:
                self._add(unjudged=cannot_run(eager.stats.raised.message))
                return self.stats
            self._add(failures=tuple(failures), rungs=(_judged_rung(EAGER, eager.stats, failures),))
        if self.compile and self.stats.stage != EAGER:
            self._climb()
        elif self.compile and eager is not None and eager.stats.raised is None:
            self.report("compiled")
            self._add(rungs=(*self.stats.rungs, self._compiled_rung(self.arm.subject, eager)))
        if not self.stats.rungs:
            self._add(unjudged="in float32 there is nothing but torch.compile to judge, and it is left out")
        if self.stats.stage == EAGER and eager is not None:
            self._blame_eager(eager)
        return self.stats

    # The format ------------------------------------------------------------------------------------------------------

    def _blame_eager(self, eager: Eager) -> None:
        arm, failures = self.arm, self.stats.failures
        beyond: list[Step] = []
        if eager.stats.raised is None:
            self.report("op by op")
            steps = measure_steps(arm.subject, arm.reference, eager, arm.low, device=arm.device, native=arm.native)
            beyond = steps_beyond(eager.stats, steps.steps, arm.limits.precision)
            self._saw(ops_beside_float64=len(steps.steps))
            self._add(coverage=self.stats.coverage + Coverage(unseen=steps.unseen))
        cause = first_cause(eager.stats, failures, beyond)
        limits = tuple((step, eager.stats.error_limit(step.as_error(), arm.limits.precision)) for step in beyond)
        self._add(cause=cause, source=_source(cause), steps=limits)
        modules = [[cause.module], [cause.module, *(f.where.module for f in failures)]]
        modules += [[cause.module, *(step.where.module for step in beyond)], *_parents(cause.module)]

        def judge(changed: Subject) -> str:
            _, found = arm.eager(changed)
            return f"{found[0].check} fails still, at {found[0].where}" if found else ""

        self._search(judge, modules, self.runs, compiled=False)
        if self.stats.code and self.compile:
            self._try_compiled()

    def _try_compiled(self) -> None:
        """What passes in eager mode now must pass compiled as well."""
        arm = self.arm
        self.report("compiled with these modules in float32")
        changed = subject_in_float32(arm.subject, self.stats.code, device=arm.device)
        eager, _ = arm.eager(changed)
        rung = self._compiled_rung(changed, eager)
        self._add(compiled_too=rung)
        if not rung.failed:
            return
        note = "# Mends eager mode; compiled the model still fails with these modules in float32"
        if not arm.native and self._passes_with({BACKWARD_AUTOCAST: "off"}, changed, eager):
            self._add(compiled_setting=f'{BACKWARD_AUTOCAST} = "off"')
            note += f", and passes with\n# {self.stats.compiled_setting}"
        self._add(code=f"{note}\n{self.stats.code}")

    def _passes_with(self, settings: Mapping[str, Any], subject: Subject, eager: Eager) -> bool:
        """Whether the compiled run of a subject passes under these settings of the compiler."""
        try:
            with configured(settings):
                return self._compiled_rung(subject, eager).said == "within"
        except UsageError:  # this release has no such setting
            return False

    def _compiled_rung(self, subject: Subject, eager: Eager) -> Rung:
        """The compiled run of a subject that is to blame in eager mode already, judged by itself."""
        arm = self.arm
        stats = measure_compiled(subject, arm.reference, eager, arm.low, device=arm.device, native=arm.native)
        self._saw(compiled_runs=1, graphs=stats.graphs)
        return _judged_rung(INDUCTOR, stats, arm.failures(stats))

    # The compiler ----------------------------------------------------------------------------------------------------

    def _climb(self) -> None:
        """Judge compiled code beside eager mode; where it fails, every stage of the compiler."""
        arm, below = self.arm, self.stats.rungs
        self.report("compiled")
        for bench in arm.benches(arm.subject):
            if bench.eager.error is not None or bench.incomparable or not bench.draws:
                raised = f"eager mode raised {brief(bench.eager.error)}" if bench.eager.error is not None else ""
                why = bench.incomparable or raised or "there is nothing to hold it against"
                self._add(rungs=(*below, Rung(INDUCTOR, None, None, False, f"not judged: {why}")))
                continue
            climbs = {INDUCTOR: arm.rung(bench, INDUCTOR)}
            climb, failing = climbs[INDUCTOR]
            if failing is not None:
                for name in LADDER[1:-1]:
                    self.report(name)
                    climbs[name] = arm.rung(bench, name)
            self._saw(compiled_runs=len(climbs), tensors=len(climb.deviations), graphs=climb.graphs)
            rungs = [_rung(name, *climbs[name]) for name in LADDER if name in climbs]
            self._add(rungs=(*(below or [_plain_rung(climb)]), *rungs))
            if failing is not None:
                climb, failing = climbs[self.stats.stage]
                if climb.raised and is_compiled_already(arm.subject):
                    self._add(unsought="compiled as the user has it, it raises; assert_compiled names graph breaks")
                else:
                    self._blame_compiler(bench, failing or [])
                return

    def _blame_compiler(self, bench: Bench, failing: Sequence[Deviation]) -> None:
        arm, stage = self.arm, self.stats.stage
        self.report("bisecting the graphs")
        bisected = arm.bisect(bench, stage, failing)
        phase = "backward" if failing and all(d.kind == "gradient" for d in failing) else "forward"
        node = bisected.node
        cause = replace(node.where, phase=phase) if node is not None else Where(phase=phase)
        self._add(cause=cause, source=node.code if node is not None else "", bisected=bisected)
        self._saw(compiled_runs=bisected.runs, graph_nodes=bisected.nodes)
        if phase == "backward" and not arm.native and arm.mended_by(bench, stage, {BACKWARD_AUTOCAST: "off"}):
            self._add(setting=f'{BACKWARD_AUTOCAST} = "off"')
        elif cause.module and stage != INDUCTOR and arm.passes_without(bench, stage, failing, cause.module):
            self._add(left_out=True)
        if not arm.judged_eager:
            self._add(unsought="it runs in float32 already")
            return

        def judge(changed: Subject) -> str:
            again = arm.again(bench, changed)
            if again.eager.error is not None:
                return f"eager mode raises {brief(again.eager.error)}"
            _, found = arm.rung(again, stage)
            return "" if found is None else f"{stage} fails still"

        module = self.stats.cause.module
        self._search(judge, [[module], *_parents(module)], min(self.runs, COMPILED_RUNS), compiled=True)

    # What mends it ---------------------------------------------------------------------------------------------------

    def _search(
        self, judge: Callable[[Subject], str], guesses: Sequence[Sequence[str]], runs: int, *, compiled: bool
    ) -> None:
        arm = self.arm
        root = prepare(arm.subject, device=arm.device).root
        if root is None:
            self._add(unsought="the subject is a function without modules")
            return
        said: dict[tuple[str, ...], str] = {}

        def passes(names: tuple[str, ...]) -> bool:
            self.report(f"set {len(said) + 1} of at most {runs} in float32")
            said[names] = judge(subject_in_float32(arm.subject, self._code(names), device=arm.device))
            return not said[names]

        modules = [name for name, module in root.named_modules() if not _only_holds(module)]
        minimised = smallest_set(modules, passes, guesses=guesses, budget=runs)
        self._saw(sets_of_modules_tried=minimised.runs)
        self._add(minimised=minimised, rest=list(said.values())[-1] if minimised.names is None and said else "")
        if minimised.names is not None:
            self._add(code=self._code(minimised.names))
            self._time(compiled)

    def _code(self, names: Sequence[str]) -> str:
        code = float32_code(names, self.emulated or self.arm.device, native=self.arm.native)
        if isinstance(self.arm.subject.model, torch.nn.Module):
            return code
        return f"# model: torch.nn.ModuleList of the modules of this subject, in their order\n{code}"

    def _time(self, compiled: bool) -> None:
        arm = self.arm
        if not self.time:
            self._add(uncosted="Its cost was not asked for.")
        elif self.emulated:
            self._add(uncosted=f"Its cost is not known: {self.emulated} is emulated, and its time cannot be measured.")
        else:
            self.report("timing the step")
            changed = subject_in_float32(arm.subject, self.stats.code, device=arm.device)
            dtype = None if arm.native else arm.low
            try:
                self._add(cost=measure_cost(arm.subject, changed, dtype, device=arm.device, compile=compiled))
            except UsageError:
                raise
            except BaseException as error:  # noqa: BLE001  # the user's model, as it fails without the change
                self._add(uncosted=f"Its cost is not known: the timed step raises {brief(as_result(error))}.")


def _judged_rung(name: str, stats: NumericsStats, failures: Sequence[Finding]) -> Rung:
    """A rung that is judged by itself, as the audit does."""
    if stats.raised is not None:
        return Rung(name, None, None, bool(failures), f"raised {stats.raised.message}")
    if stats.compiled and not stats.graphs:
        return Rung(name, None, None, False, f"not judged: nothing was compiled {stats.unsupported}".rstrip())
    known = [e for e in stats.errors if e.nonfinite or stats.known(e)]
    outputs, gradients = (
        max((math.inf if e.nonfinite else e.error for e in known if e.kind == kind), default=None)
        for kind in ("output", "gradient")
    )
    return Rung(name, outputs, gradients, bool(failures), "beyond" if failures else "within")


def _plain_rung(climb: Climb) -> Rung:
    """Eager mode in float32, which nothing judges: it is what compiled code is held against, beside float64."""
    outputs, gradients = _worst(climb, lambda d: d.eager[0])
    return Rung(EAGER, outputs, gradients, False, "what compiled code is held against")


def _rung(name: str, climb: Climb, failing: Sequence[Deviation] | None) -> Rung:
    if climb.raised:
        return Rung(name, None, None, failing is not None, f"raised {climb.raised}")
    if not climb.graphs:
        return Rung(name, None, None, False, f"not judged: nothing was compiled {climb.unsupported}".rstrip())
    outputs, gradients = _worst(climb, lambda d: d.compiled[0])
    said = "no worse than eager mode" if failing is None else "worse than eager mode"
    return Rung(name, outputs, gradients, failing is not None, said)


def _worst(climb: Climb, error: Callable[[Deviation], float]) -> tuple[float | None, float | None]:
    """The largest error of an output and of a gradient, but of those that are zero but for rounding."""
    kinds = (("output", "loss"), ("gradient",))
    known = [d for d in climb.deviations if d.kind != "gradient" or d.float32 <= LOST]
    outputs, gradients = (max((error(d) for d in known if d.kind in kind), default=None) for kind in kinds)
    return outputs, gradients


def _source(where: Where) -> str:
    return linecache.getline(where.file, where.line).strip() if where.file and where.line else ""


def _parents(module: str) -> list[list[str]]:
    """What holds a module, from the inside out."""
    parts = module.split(".")
    return [[".".join(parts[:depth])] for depth in range(len(parts) - 1, 0, -1)]


def _only_holds(module: torch.nn.Module) -> bool:
    return isinstance(
        module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
    )
