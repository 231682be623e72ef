"""`watch`: a context manager that checks a block of user code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ampcheck.autocast.emulate import arm_of
from ampcheck.checks.causes import with_causes
from ampcheck.checks.selection import broken_extensions
from ampcheck.compiled.graph.checks import COMPILER_CHECKS
from ampcheck.core.arguments import parse_choice, parse_integer, show
from ampcheck.core.arm import armed
from ampcheck.core.current_test import block_name
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.limits import GraphLimits, Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import FAIL_ON, Finding, Run, Verdict, merge
from ampcheck.core.settings import resolve_limits
from ampcheck.core.source import with_excerpts
from ampcheck.core.subject import Subject
from ampcheck.core.writer import Writer
from ampcheck.outcome.ending import end
from ampcheck.records.autocast import GuardStats
from ampcheck.records.graphs import GraphStats
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.telemetry import TelemetryStats
from ampcheck.shadow import Shadow, explain_error
from ampcheck.telemetry.sites import Level
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.copying import eager_modules, has_compiled_parts, modules_of, parameter_names
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.storage import device_of
from ampcheck.training.monitor.monitor import TrainingMonitor, sort_objects
from ampcheck.training.monitor.sums import MonitorStats
from ampcheck.training.monitor.views import StepValues
from ampcheck.training.values import with_measured
from ampcheck.watch_families import (
    EXACTLY,
    Block,
    Monitor,
    autocast_monitor,
    families_of,
    first_steps,
    graph_monitor,
    left_out,
    op_monitor,
    step_monitor,
    value_monitor,
)


@dataclass(frozen=True, slots=True)
class WatchedStats:
    """The statistics of a watched block. A field is None if its family was not watched; `autocast` and `graphs` are
    also None until the block ends.

    autocast: the use of autocast. graphs: what Dynamo compiled. ops: every op of the block. values: statistics inside
    compiled graphs. training: gradients, updates and the loss scale of each measured step.
    """

    autocast: GuardStats | None = None
    graphs: GraphStats | None = None
    ops: NumericsStats | None = None
    values: TelemetryStats | None = None
    training: MonitorStats | None = None


class Watched:
    """Watches a block and reports on it; `watch` yields it.

    `run` and `stats` can be read inside the block and after it. Reading them waits for the device. shadow: follows
    every op; None without float64. left_out: findings about what cannot be watched here.
    """

    def __init__(
        self,
        monitors: Mapping[str, Monitor],
        plan: Plan,
        training: TrainingMonitor | None,
        shadow: Shadow | None,
        left_out: Iterable[Finding] = (),
    ) -> None:
        self._left_out = Run(findings=tuple(left_out))
        self._monitors, self._plan, self._name = monitors, plan, plan.subject.name
        self._training, self.shadow = training, shadow
        self._stack, self._writers = ExitStack(), list[Writer]()
        self._raised = ""

    def __enter__(self) -> Watched:
        with ExitStack() as stack:
            for monitor in self._monitors.values():
                stack.enter_context(monitor.block)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raised = "" if error is None else brief(error)
        self._stack.__exit__(kind, error, trace)
        for writer in tuple(self._writers):
            self._guarded(writer, lambda to: to.write_run(self.run))

    def _guarded(self, writer: Writer, write: Callable[[Writer], object]) -> None:
        """Let a writer write, unless it failed before: the loop goes on, and an error of its own propagates."""
        try:
            if writer in self._writers:
                write(writer)
        except Exception as error:  # noqa: BLE001  # a full disk, a service that is gone
            self._writers.remove(writer)
            warnings.warn(f"{type(writer).__name__} gets nothing more, since it raised {brief(error)}", stacklevel=2)

    def follow(self, writer: Writer) -> None:
        """Write each step that is measured from now on, and when the block ends the findings.

        writer: such as `ampcheck.callbacks.tensorboard.TensorBoardWriter`; one that raises is left out with a warning.
        A measured step then waits for the device.
        """
        self._writers.append(writer)
        if self._training is None:
            return
        with without_modes():
            values = StepValues(partial(self._training.read, self._name))

        def write(step: int, loss_scale: float | None) -> None:
            with without_modes():
                self._guarded(writer, lambda to: to.write_step(step, values.next(loss_scale)))

        self._training.follow(write)

    def step(self, loss: torch.Tensor | float) -> None:
        """Record the loss of a training step, a number or a tensor of one element; the last must be finite."""
        if self._training is None:
            raise UsageError("step(loss) needs a watched optimizer: pass the optimizer to watch(...)")
        self._training.step(loss)

    def explain_error(self, tensor: torch.Tensor) -> str:
        """The ops that the error passed through, one per line, starting where it arose.

        Raises `UsageError` where the ops of the block are not watched.
        """
        if self.shadow is None:
            raise UsageError(f"explain_error needs a watch of every op: {EXACTLY}")
        return explain_error(self.shadow, tensor)

    @property
    def run(self) -> Run:
        """The findings of every selected check, with tables and charts."""
        runs = {}
        with without_modes():  # inside the block our own ops are none of it
            for family, monitor in self._monitors.items():
                if (stats := monitor.read()) is not None:
                    runs[family] = self._judged(family, monitor.judge(stats))
        run = merge((*runs.values(), self._left_out))
        findings = (*run.findings, *broken_extensions(self._name))
        if {"ops", "training"} <= runs.keys():
            of_ops = [f for family, part in runs.items() if family != "training" for f in part.findings]
            findings = (*with_measured(of_ops, runs["training"].findings), *broken_extensions(self._name))
        selected = with_causes(self._plan.only(replace(run, findings=tuple(findings))).findings)
        return replace(run, findings=with_excerpts(selected), title=f"watch of {self._name}")

    @property
    def stats(self) -> WatchedStats:
        """The statistics that the findings rest on."""
        with without_modes():
            return WatchedStats(**{family: monitor.read() for family, monitor in self._monitors.items()})

    def _judged(self, family: str, run: Run) -> Run:
        """The run of one family beside the others."""
        findings = run.findings
        if "training" in self._monitors and family != "training":  # the steps were measured, if nothing else
            findings = tuple(map(_without_coverage_failure, findings))
        if self._raised and family != "autocast":  # which says so itself
            findings = tuple(_cut_short(finding, self._raised) for finding in findings)
        coverage = run.coverage
        if family == "autocast" and self.shadow is not None and self.shadow.ops:  # the same ops
            coverage = coverage.without("ops")
        if family == "training" and self.shadow is not None:  # the same calls
            coverage = coverage.without("events")
        if family == "autocast" and "training" in self._monitors:  # the same steps
            coverage = coverage.without("optimizer steps")
        return replace(run, findings=findings, coverage=coverage)


def _cut_short(finding: Finding, error: str) -> Finding:
    """Return a pass as a skip: what had gone well when the block raised was not judged to its end."""
    if finding.verdict is not Verdict.PASS:
        return finding
    message = f"not judged: the block raised {error} before it came to its end; until then {finding.message}"
    return replace(finding, verdict=Verdict.SKIP, message=message, seen=0)


def _without_coverage_failure(finding: Finding) -> Finding:
    missing = finding.check == "coverage" and finding.verdict is Verdict.FAIL
    return replace(finding, verdict=Verdict.SKIP) if missing else finding


def watch(
    *objects: object,
    checks: Collection[str] | None = None,
    every: int = 1,
    exact: bool | None = None,
    fail_on: str | None = None,
    level: str = "casts",
    graphs: GraphLimits | None = None,
    limits: Limits | None = None,
    name: str = "",
    horizon: int | None = None,
) -> AbstractContextManager[Watched]:
    """Watch a block of your own code, without changing what it computes; report and raise when it ends.

    The objects decide what is watched:

    - nothing, or an eager model: every op, forward, backward and update, against float64 (`overflow`, `silent-zero`,
      `flush`, `integer-cast`, `precision-loss`, `headroom`, `nonfinite-reference`), and the use of autocast
      (`autocast-*`, `policy-banned`). Damage counts where it reaches a weight, a buffer, a gradient, a number that
      left the block, or a tensor that is in use when the block ends. Where an optimizer steps, the first 24 steps are
      judged as those of a training loop (`scaler-protocol`, `gradient-underflow`, `loss-scale`, `stagnation`, ...): its
      model, optimizer and scaler are found by what they do. Compiled functions run in eager mode until the block ends.
    - a compiled model or function: the values inside its graphs (`overflow`, `nonfinite-gradient`, `silent-zero`,
      `flush`, `headroom`). `coverage` warns of modules that are not compiled.
    - an optimizer or several, with the scaler if there is one, and the model: all that is said of an eager model, and
      of every step, not only the first 24, the gradients, the updates and the loss scale. Without `exact`, these alone
      (`overflow` of the loss, `nonfinite-gradient`, `gradient-underflow`, `loss-scale`, `stagnation`), the order of
      calls in the first 24 steps (`scaler-protocol`, `scheduler-skip`), and the values inside compiled graphs: what
      only a comparison with float64 proves is then a warning at most.

    exact: whether each op is followed in float64, which takes some ten times as long. By default it is, unless the
    model is compiled, or an optimizer is given with `every` above 1 or a check of graphs; a compiled model that is
    followed runs in eager mode.

    checks: names of checks, by default those above. The checks of autocast and of graphs (`graph-break`, `recompile`,
    `eager-fallback`, `cache-artifacts`, `cudagraph`) can be selected for any object. every: measure each N-th step
    and each N-th call of a graph, the first among them. fail_on: the mildest verdict that raises `AssertionError` when
    the block ends, `fail`, `warn`, `incomplete` or `never`; by default `fail` under pytest, else `never`. A line
    is always printed, and the findings where none raises. level: values of a graph to measure: `casts` (roundings to
    16 bits), `ops` (the result of every op) or `all` (every floating value). graphs: number of graph breaks and
    recompilations to allow; selects the checks of graphs in place of those of ops. limits: by default those of
    `[tool.ampcheck]`. horizon: planned training steps, by default 10,000 or those of the lr schedule.

    Training: a measured step needs memory for a copy of the weights and 64 MiB; weights of 16 bits need a second copy
    and one byte per element during the whole block. Steps inside compiled code cannot be measured. Compiled: entering
    resets Dynamo; the next call compiles statistics in, up to twice as long.

    An exception of the block propagates; the run is emitted first. Switches of autocast that the block changed are
    restored where it is watched. Raises `UsageError` for an object that is no model, optimizer or scaler, an unknown
    setting, a scaler without an optimizer, and a watch of compiled code inside another.
    """
    require_settings(every, level, fail_on)
    given = partial(watched, checks=checks, every=every, exact=exact, level=level, graphs=graphs)
    return _Block(partial(given, *objects, limits=limits, name=name, horizon=horizon), fail_on)


class _Block(ContextDecorator, AbstractContextManager[Watched]):
    """One block that is watched; as a decorator, each call of a function."""

    def __init__(self, begin: Callable[[], Watched], fail_on: str | None) -> None:
        self._begin, self._fail_on = begin, fail_on
        self._seen, self._entered = begin(), False

    def _recreate_cm(self) -> _Block:
        return _Block(self._begin, self._fail_on)

    def __enter__(self) -> Watched:
        if self._entered:
            raise UsageError("a watch is of one block: call ampcheck.watch(...) again for the next")
        self._entered = True
        return self._seen.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        try:
            self._seen.__exit__(kind, error, trace)
        except BaseException:
            end(self._seen.run, self._fail_on, raises=False)
            raise
        end(self._seen.run, self._fail_on, raises=error is None)


def watched(
    *objects: object,
    checks: Collection[str] | None = None,
    every: int = 1,
    exact: bool | None = None,
    level: str = "casts",
    graphs: GraphLimits | None = None,
    limits: Limits | None = None,
    name: str = "",
    horizon: int | None = None,
    compiled: bool = False,
) -> Watched:
    """The context behind `watch`, which neither emits nor raises. Arguments and errors as of `watch`.

    compiled: watch the values inside whatever the block compiles, as for a compiled model.
    """
    model, optimizers, scaler = sort_objects(objects)
    compiled = not exact and (compiled or (model is not None and has_compiled_parts(model)))
    wanted = None if checks is None else (checks,) if isinstance(checks, str) else tuple(checks)
    if exact is None:
        of_graphs = graphs is not None or not {*COMPILER_CHECKS}.isdisjoint(wanted or ())
        exact = not compiled and not (optimizers and (every > 1 or of_graphs))
    if not (exact or compiled or optimizers):
        raise UsageError("exact=False leaves nothing to watch: pass an optimizer, or a compiled model")
    if graphs is not None and not isinstance(graphs, GraphLimits):
        raise UsageError(f"graphs must be a GraphLimits; found {show(graphs)}")
    families = families_of(wanted, graphs, exact=exact, compiled=compiled, training=bool(optimizers))
    if horizon is not None and parse_integer(horizon, "horizon") and "ops" not in families:
        raise UsageError(f"horizon= needs a watch of every op: {EXACTLY}")
    plain = dynamo.uncompiled(model)
    modules = modules_of(plain) if plain is not None else ()
    measured = {"ops", "values", "training"} & set(families)
    plan = Plan(
        Subject(lambda: None, _shown(plain, name)),  # the block, which runs by itself
        wanted,
        resolve_limits(limits) if measured or limits is not None else Limits(),  # the settings are a file
        torch.device(next((str(device_of(p)) for root in modules for p in root.parameters()), "cpu")).type,
    )
    block = Block(plan, modules, every)
    monitors: dict[str, Monitor] = {}
    training, shadow, recorder = None, None, None
    lacks = left_out(families, block.name)
    families = [family for family in families if family not in lacks]
    if "graphs" in families:
        monitors["graphs"] = graph_monitor(block, graphs or GraphLimits())
    if "ops" in families:
        steps = first_steps(block, plain, optimizers, scaler, horizon)
        shadow, recorder = steps.shadow, steps.recorder
        monitors["ops"] = op_monitor(block, steps)
    if "autocast" in families:  # innermost: an op that the user calls must reach it before any other mode
        monitors["autocast"] = autocast_monitor(block)
    if "values" in families:
        eager = eager_modules(model) if compiled and model is not None else 0
        monitors["values"] = value_monitor(block, level, eager)
    if "training" in families:
        training = TrainingMonitor(optimizers, scaler, parameter_names(modules), every=every, recorder=recorder)
        monitors["training"] = step_monitor(block, training)
    return Watched(monitors, plan, training, shadow, lacks.values())


def _shown(model: Any, name: str) -> str:
    """Return what a block is called in findings."""
    shown = name or block_name("" if model is None else getattr(model, "__name__", type(model).__name__))
    return armed(shown, arm_of())


def require_settings(every: int, level: str, fail_on: str | None = None) -> None:
    """Raise `UsageError` for an invalid sampling interval, an unknown level and an unknown verdict to fail on."""
    if fail_on is not None:
        parse_choice(fail_on, "fail_on", FAIL_ON)
    parse_integer(every, "every")
    parse_choice(level, "level", [known.value for known in Level])
