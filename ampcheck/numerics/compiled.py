"""The compiled run of a subject, compared with the exact values of its eager run; how many graphs were compiled."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.core.errors import brief
from ampcheck.core.run import Coverage, Where
from ampcheck.core.subject import Subject
from ampcheck.health import TensorHealth, health_of
from ampcheck.numerics.arm_format import arm_name
from ampcheck.numerics.measure import Measured, counted_results, positive
from ampcheck.numerics.run import Blocks, Outcome, run_subject
from ampcheck.numerics.stats import NumericsStats, Raised
from ampcheck.shadow.compare import PRECISION, Key, compare_results
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools.copying import NO_SCRIPT, Prepared, is_scripted, prepare, recompiled
from ampcheck.torchtools.dynamo import counters, reset


@dataclass(slots=True)
class Graphs:
    """count: graphs that were compiled; unseen: why code ran outside them, with how often; unsupported: that Dynamo
    declines the whole, in its own words."""

    count: int = 0
    unsupported: str = ""
    unseen: dict[str, int] = field(default_factory=dict)


def measure_compiled(subject: Subject, eager: Measured, dtype: torch.dtype) -> NumericsStats:
    """Run the same under `torch.compile`, or as the subject is compiled already.

    Outputs, loss and gradients are compared with the exact values of the eager run, at its loss scale, and what each
    cast inside the graphs loses is measured. Random numbers are drawn as eager mode draws them.
    """
    arm = arm_name(dtype, eager.stats.native, compiled=True)
    if is_scripted(subject):
        return replace(_of_compiled(eager.stats, arm), unsupported=NO_SCRIPT)
    prepared = prepare(subject, device=eager.plan.device)
    telemetry = Telemetry([prepared.root] if prepared.root is not None else [], aside=True)
    with measure_graphs() as graphs, telemetry.watching(), _drawing_as_eager():
        outcome, values, health = _run(eager, prepared, partial(recompiled, subject))
    raised = None
    if outcome.error is not None and not (eager.stats.prevented and outcome.phase == "backward"):
        lack = lacking(outcome.error)
        raised = Raised(Where(phase="compile"), lack or brief(outcome.error), missing=bool(lack))
    inside = telemetry.read()
    complete = {key: result for key, result in eager.results.items() if raised is None or key in values}
    errors = compare_results(complete, values, eager.freedom)
    stats = replace(_of_compiled(eager.stats, arm), errors=errors)
    repeatable = not stats.harm(PRECISION) or _repeats(subject, eager)
    return replace(
        stats,
        health=health,
        raised=raised,
        incomparable=""
        if repeatable
        else "two eager runs with equal seeds differ: nothing to compare compiled code with",
        no_backward=outcome.no_backward,
        prevented=outcome.prevented,
        graphs=graphs.count,
        unsupported=graphs.unsupported,
        inside=inside,
        coverage=Coverage(
            positive({"graphs": graphs.count, "values inside graphs": len(inside.sites), **counted_results(errors)}),
            {**graphs.unseen, **inside.unseen, **outcome.unseen},
        ),
    )


def _run(
    eager: Measured, prepared: Prepared, transform: Callable[[Prepared], Blocks] | None = None
) -> tuple[Outcome, dict[Key, torch.Tensor], dict[tuple[str, str], TensorHealth]]:
    """A run without a shadow: what happened, its results, and the health of its outputs."""
    values: dict[Key, torch.Tensor] = {}
    health: dict[tuple[str, str], TensorHealth] = {}

    def receive(key: Key, tensor: torch.Tensor) -> None:
        if key not in eager.results:
            return
        values[key] = tensor.detach().clone()
        if key[0] == "output" and isinstance(seen := health_of(tensor.detach(), histogram=True), TensorHealth):
            health["forward", f"output {key[1]}".strip()] = seen

    outcome = run_subject(prepared, eager.plan, receive, transform=transform, masked=eager.masked)
    return outcome, values, health


def _repeats(subject: Subject, eager: Measured) -> bool:
    """Whether a second eager run, without a shadow, gives what the first gave."""
    _, values, _ = _run(eager, prepare(subject, device=eager.plan.device))
    return not any(error.at_fault for error in compare_results(eager.results, values, eager.freedom))


def _of_compiled(stats: NumericsStats, arm: str) -> NumericsStats:
    """The record of a compiled run before anything is known of it."""
    return replace(
        stats, arm=arm, compiled=True, faults=(), nonfinite=(), largest={}, errors=(), health={}, raised=None,
        module_dtypes={}, graphs=0, unsupported="", coverage=Coverage(),
    )  # fmt: skip


@contextmanager
def _drawing_as_eager() -> Iterator[None]:
    """Inductor draws random numbers with the ops of eager mode inside, so that equal seeds give equal numbers."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch(fallback_random=True):
        yield


@contextmanager
def measure_graphs() -> Iterator[Graphs]:
    """Count the graphs that are compiled inside.

    Dynamo is reset on the way in and out: copies of one model share their code object, whose cache would fill up and
    then fall back to eager without a word. Functions that the caller had compiled are compiled again when next called.
    Dynamo's log is still inside.
    """
    reset()
    before = {group: counters(group) for group in ("stats", "graph_break", "unimplemented")}
    graphs = Graphs()
    try:
        with dynamo_still():
            yield graphs
    finally:
        since = {group: counters(group) - known for group, known in before.items()}
        graphs.count = since["stats"]["unique_graphs"]
        graphs.unseen = {f"graph break: {_first(reason)}": n for reason, n in since["graph_break"].items()}
        declined = [*since["unimplemented"], *since["graph_break"]]
        graphs.unsupported = _first(declined[0]) if declined and not graphs.count else ""
        reset()


@contextmanager
def dynamo_still() -> Iterator[None]:
    """Dynamo logs errors alone inside: of graph breaks and limits the findings tell.

    A level that somebody asked for (`TORCH_LOGS`, `torch._logging.set_logs`) stays as it is.
    """
    importlib.import_module("torch._dynamo")  # its import sets all levels
    log = logging.getLogger("torch._dynamo")
    level = log.level
    if level in (logging.NOTSET, logging.WARNING):
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def eagerly() -> AbstractContextManager[Any]:
    """What the user has compiled runs in eager mode inside (`torch.compiler.set_stance`, 2.6)."""
    stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")


def _first(reason: str) -> str:
    return reason.strip().splitlines()[0] if reason.strip() else "no reason given"
