"""`assert_compiled`: the numbers and the graphs of a compiled model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ampcheck.autocast.asked import cuda_where_asked
from ampcheck.autocast.device import place
from ampcheck.compiled.accuracy.checks import CHECKS as ACCURACY_CHECKS
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.checks import GRAPH_CHECKS
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.compiled.options import AccuracyOptions, CompileOptions
from ampcheck.core.arguments import DType, parse_dtypes, parse_names
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import GraphLimits, Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Run, merge
from ampcheck.core.subject import MODELS, Subject, subject_of
from ampcheck.numerics.arm_format import native_format
from ampcheck.outcome.raising import verify
from ampcheck.torchtools.restore import restoring

_ALWAYS = ("compiled-exception", "coverage")
"""Checks that both families report, whichever are chosen."""


@cuda_where_asked
@restoring
def assert_compiled(
    model: Any,
    calls: Any = None,
    *,
    device: str | None = None,
    dtype: DType | Sequence[DType] | None = None,
    options: CompileOptions | None = None,
    graphs: GraphLimits | None = None,
    accuracy: AccuracyOptions | None = None,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
) -> Run:
    """Assert that `torch.compile(model)` is as accurate as `model`, and that it stays in its graphs.

    Accuracy: outputs, loss, gradients of every parameter and of the inputs that require one, updated weights and
    buffers, each compared with float64; dtypes and structure; exceptions. Graphs: no graph break, no recompilation
    after the warm-up, nothing that falls back to eager, caches and CUDA graphs that work.

    model, calls: a module or function and its arguments (a tuple, a mapping of keyword arguments, or the one argument;
    a list of these is as many successive calls); a list of blocks with a list of one set of arguments; or a `Subject`
    or one of its shapes alone. A callable without arguments and a training loop run as they are: their graphs alone are
    judged. A model that is compiled already, whole or in parts, runs with its own settings.
    dtype: what autocast casts to, several one after the other; None or float32 runs the model without autocast.
    options: arguments of `torch.compile`. graphs, accuracy: limits and options of the two families. checks: names of
    either family (`CHECKS`), all by default; a family of which none is named does not run.

    Dynamo is reset. Returns the run; raises `AssertionError` with every failure, and `UsageError` for a subject or
    argument that cannot be judged.
    """
    __tracebackhide__ = True
    subject = subject_of(model, calls, name)
    chosen = None if checks is None else parse_names(checks, "checks", CHECKS)
    accuracy, options = accuracy or AccuracyOptions(), options or CompileOptions()
    options.require_effect(subject)
    casts = _autocast_dtypes(subject, dtype, accuracy.autocast)
    runs_graphs = chosen is None or bool(set(chosen) & set(GRAPH_CHECKS) - set(_ALWAYS))
    runs_accuracy = subject.kind in MODELS
    if chosen is not None:
        runs_accuracy = bool(set(chosen) - set(GRAPH_CHECKS)) or not runs_graphs
    placement, runs = place(device or "cpu"), list[Run]()
    with placement.entered():
        for cast in casts:
            if runs_graphs:
                run = judge_graph(
                    subject, device=placement.device, dtype=cast, options=options, limits=graphs or GraphLimits()
                )
                runs.append(run if chosen is None else run.only((*chosen, *_ALWAYS)))
            if runs_accuracy:
                plan = Plan.of(subject, limits, checks=chosen, device=placement.device, steps=accuracy.steps)
                runs.append(judge_accuracy(plan, dtype=cast, optimizer=accuracy.optimizer, options=options))
    run = replace(merge(runs), environment=environment(placement.device), title=f"{subject.name}, compiled")
    return verify(run)


CHECKS = tuple(dict.fromkeys((*ACCURACY_CHECKS, *GRAPH_CHECKS)))
"""The names of all checks on compiled code."""


def _autocast_dtypes(
    subject: Subject, dtype: DType | Sequence[DType] | None, autocast: bool | None
) -> list[torch.dtype | None]:
    """Return what autocast casts to in each judgement; None for the model without autocast."""
    if dtype is None:
        if autocast:
            raise UsageError("autocast=True needs a dtype to cast to: float16 or bfloat16")
        return [None]
    names = parse_dtypes(dtype, choices=("float16", "bfloat16", "float32"))
    if native_format(subject) is not None and not autocast:
        return [None]
    if autocast is False and set(names) != {"float32"}:
        raise UsageError(f"{subject.name} has no 16-bit weights or inputs, and autocast=False leaves only float32")
    return [None if name == "float32" else getattr(torch, name) for name in names]
