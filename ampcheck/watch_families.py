"""The families of checks that a watch of a block consists of: what measures each, and what judges it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.guards.guard import GUARD_CHECKS, AutocastObservation, guard_run
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.compiled.graph.checks import COMPILER_CHECKS
from ampcheck.compiled.graph.judge import GraphObservation, graph_run
from ampcheck.core.arguments import parse_checks
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import GraphLimits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run
from ampcheck.numerics.checks import OBSERVABLE, observable
from ampcheck.numerics.observe import measure_block
from ampcheck.records.telemetry import EAGER_MODULES, TelemetryStats
from ampcheck.telemetry.checks import check_telemetry, telemetry_tables
from ampcheck.telemetry.sites import Level
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.interception import is_intercepted
from ampcheck.torchtools.private import (
    backward_node,
    excluded_keys,
    forcing_keys,
    included_keys,
    lack_of,
    register_scripted_op,
    scripted_op,
    scripted_ops,
    sequence_number,
    state_of_caller,
    storage_users,
    transforms,
)
from ampcheck.training.judge_running import OBSERVED, judge_block
from ampcheck.training.loop import STEPS, LoopShadow
from ampcheck.training.monitor.judge import MONITORED, monitor_run
from ampcheck.training.monitor.monitor import TrainingMonitor
from ampcheck.training.running import TrainingWatch

OP_CHECKS = OBSERVABLE
VALUE_CHECKS = ("overflow", "nonfinite-gradient", "silent-zero", "flush", "headroom", "coverage")
_OTHER_RELEASE = "watch it under a release of PyTorch that has the name, and report this one to ampcheck"
EXACTLY = "call watch() with exact=True, or without an optimizer or compiled model"

_OF_OPS = (included_keys, excluded_keys, forcing_keys, state_of_caller, backward_node, sequence_number)
_NEEDS: dict[str, tuple[object, ...]] = {
    "ops": (*_OF_OPS, transforms, storage_users, scripted_op, register_scripted_op, scripted_ops),
    "autocast": _OF_OPS,
    "training": (transforms,),
}
"""PyTorch's private names without which a family cannot be watched."""


@dataclass(frozen=True, slots=True)
class Monitor:
    """One family of checks over a block. block: the context that measures it. read: the statistics so far, None where
    they are complete only after the block. judge: the findings that follow from them."""

    block: AbstractContextManager[Any]
    read: Callable[[], Any]
    judge: Callable[[Any], Run]


@dataclass(frozen=True, slots=True)
class Block:
    """State that all monitors of a block share: the plan, whose subject is the block, the modules that are watched, and
    the sampling interval."""

    plan: Plan
    modules: Sequence[torch.nn.Module]
    every: int

    @property
    def name(self) -> str:
        """The block in findings."""
        return self.plan.subject.name


def left_out(families: Collection[str], name: str) -> dict[str, Finding]:
    """The families that need a private name which this PyTorch lacks. name: of the block."""
    reasons = {family: lack_of(_NEEDS.get(family, ())) for family in families}
    return {
        family: COVERAGE.incomplete(name, f"the watch of {family} was left out: {reason}", hint=_OTHER_RELEASE)
        for family, reason in reasons.items()
        if reason
    }


def graph_monitor(block: Block, graphs: GraphLimits) -> Monitor:
    """Return what Dynamo compiles."""
    observed = GraphObservation(block.name)
    return Monitor(observed, lambda: observed.stats, partial(graph_run, limits=graphs))


def first_steps(
    block: Block, model: object, optimizers: Sequence[object], scaler: object, horizon: int | None
) -> TrainingWatch:
    """The watch of every op, and of the first steps of the parts that the user named."""
    steps = TrainingWatch(block.name, STEPS, LoopShadow(), ends=False, horizon=horizon)
    for kind, part in (("model", model), *(("optimizer", part) for part in optimizers), ("scaler", scaler)):
        if part is not None:
            steps.loop.note(kind, part)
    return steps


def op_monitor(block: Block, steps: TrainingWatch) -> Monitor:
    """Every op against float64, and the first steps of an optimizer."""
    judge = partial(judge_block, steps, block.plan)
    return Monitor(steps.watching(), partial(measure_block, steps.shadow, block.name), judge)


def autocast_monitor(block: Block) -> Monitor:
    """The use of autocast."""
    use = AutocastObservation(block.plan.among(GUARD_CHECKS) or None)
    return Monitor(use, lambda: use.stats(block.name) if use.ended else None, partial(guard_run, use))


def value_monitor(block: Block, level: str, eager: int) -> Monitor:
    """Statistics inside compiled graphs. eager: how many modules of the model compute outside of them."""
    if is_intercepted():
        raise UsageError("a watch of compiled code cannot contain another: watch one model at a time")
    values = Telemetry(block.modules, level=Level(level), every=block.every)
    judge = partial(_values_run, block.plan, eager)
    return Monitor(_inside_graphs(values), partial(values.read, block.name), judge)


def step_monitor(block: Block, training: TrainingMonitor) -> Monitor:
    """Gradients, updates and the loss scale of measured steps."""
    judge = partial(monitor_run, block.plan)
    return Monitor(training.watching(), partial(training.read, block.name), judge)


def families_of(
    checks: Collection[str] | None, graphs: GraphLimits | None, *, exact: bool, compiled: bool, training: bool
) -> list[str]:
    """The families of checks that apply to the objects and contain a selected check. Raises `UsageError` where limits
    of graphs and checks of ops exclude each other."""
    families = _families(training, compiled, exact, checks)
    if graphs is not None and "graphs" not in families:
        if checks is not None:
            raise UsageError(f"graphs= limits the checks {', '.join(COMPILER_CHECKS)}; name one in checks=")
        families = [*(family for family in families if family != "ops"), "graphs"]
    if {"graphs", "ops"} <= set(families):
        raise UsageError(
            f"the checks {', '.join(OP_CHECKS)} follow ops in eager mode, where there are no graphs: watch "
            f"{', '.join(COMPILER_CHECKS)} in a block of their own"
        )
    return families


def _families(training: bool, compiled: bool, exact: bool, checks: Collection[str] | None) -> list[str]:
    """The families of checks that apply to the objects and contain a selected check."""
    applicable = {"autocast": GUARD_CHECKS, "graphs": COMPILER_CHECKS}
    present = {"autocast": exact, "ops": exact, "values": compiled, "training": training}
    default = [family for family, is_present in present.items() if is_present]
    slugs = {"training": MONITORED, "values": VALUE_CHECKS, "ops": (*observable(), *OBSERVED)}
    applicable |= {family: tuple(slugs[family]) for family in default if family in slugs}
    if checks is None:
        return default
    known = dict.fromkeys(slug for family in applicable.values() for slug in family)
    names = set(parse_checks(checks, known) or ()) - {COVERAGE.slug}
    return [family for family, members in applicable.items() if names & set(members)] or default


@contextmanager
def _inside_graphs(telemetry: Telemetry) -> Iterator[None]:
    try:
        dynamo.reset()
        with telemetry.watching():
            yield
    finally:
        telemetry.release()


def _values_run(plan: Plan, eager: int, stats: TelemetryStats) -> Run:
    """eager: how many modules of the model compute outside its graphs."""
    if eager and not stats.skipped:
        stats = replace(stats, unseen={**stats.unseen, EAGER_MODULES: eager})
    findings = tuple(check_telemetry(stats, plan.limits))
    return Run(environment(plan.device), findings, stats.coverage, telemetry_tables(stats))
