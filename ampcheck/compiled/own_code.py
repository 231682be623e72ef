"""Judge what a training loop or a callable compiles itself: the graphs of another run, and the numbers of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ampcheck.catalog.compiled import COMPILED_DTYPE, COMPILED_ERROR, COMPILED_GRADIENT
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.checks import check_artifacts
from ampcheck.compiled.graph.judge import graph_run
from ampcheck.compiled.graph.own import accelerator, measure_own_code
from ampcheck.compiled.options import GraphLimits
from ampcheck.compiled.stale import StaleGraphs, steps_or_draws, with_copies
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, merge
from ampcheck.core.subject import Subject, name_of
from ampcheck.torchtools.dynamo import is_compiled
from ampcheck.torchtools.interception import CompiledCall
from ampcheck.torchtools.reachable import Reached
from ampcheck.torchtools.snapshot import preserved

_CALLABLES = 4
"""How many modules and functions of a loop are compared with eager mode; of those that share their code one."""

_COMPARED = tuple(map(str, (COMPILED_ERROR, COMPILED_GRADIENT, COMPILED_DTYPE)))


def judge_own_code(
    subject: Subject,
    reached: Reached,
    *,
    device: str = "cpu",
    steps: int = 1,
    limits: Limits | None = None,
) -> Run:
    """Judge the compiled code of a training loop, or of a callable without arguments, that ran in eager mode before.

    The code runs a second time, and what it reaches is restored. steps: of a loop that run. The user declares no
    warm-up: the first change of each value is no recompilation, and one more is allowed. The first calls of what it
    compiles are compared with eager mode and float64. Code that raises in eager mode too cannot run twice: a skip.
    """
    calls = _FirstCalls()
    stats = measure_own_code(
        subject, device, steps=steps, reached=reached, called=calls.add, ended=calls.graphs.compile_again
    )
    if stats.error is not None and stats.error.eager:
        message = f"compiled code was not judged: a second run in eager mode raised {stats.error.eager}"
        hint = "let the code run twice in one process, or judge what it compiles by itself: audit((model, inputs))"
        return Run(findings=(*check_artifacts(stats), COVERAGE.skip(subject.name, message, hint=hint)))
    run = graph_run(stats, GraphLimits(max_recompiles=1))
    # Nothing was compiled where what is compiled is called elsewhere.
    findings = [f for f in run.findings if f.check != COVERAGE.slug or f.verdict is Verdict.SKIP]
    runs = [replace(run, findings=(*findings, *calls.stale(subject.name)))]
    if stats.error is None and not stats.artifacts:  # artifacts of another compilation would be saved with the user's
        with preserved(reached):
            runs += calls.judged(subject.name, accelerator(device), limits)
    return merge(runs)


class _FirstCalls:
    """The first call of each module and function that is compiled, with copies of its arguments."""

    def __init__(self) -> None:
        self._calls: dict[object, CompiledCall] = {}
        self._more: set[object] = set()
        self.graphs = StaleGraphs()

    def add(self, call: CompiledCall) -> Callable[[object], None] | None:
        """Keep a call, if it is the first of its code; returns what gets its result."""
        original = call.original
        code = type(original) if isinstance(original, torch.nn.Module) else getattr(original, "__code__", original)
        if len(self._calls) == _CALLABLES and code not in self._calls:
            self._more.add(code)
            return None
        if code not in self._calls:
            self._calls[code] = with_copies(call)
        return self.graphs.begin(code, call)

    def stale(self, name: str) -> Iterator[Finding]:
        """The findings about graphs that are out of date."""
        for function, difference in self.graphs.found.items():
            message = f"compiled code must compute what {function} computes now; its graphs {difference}, and compiled "
            message += f"again it agrees: {function} changed after it was compiled, in a way that no guard sees"
            hint = "register hooks, replace layers and unfreeze weights before the first compiled call, or call "
            hint += "torch.compiler.reset() afterwards; torch._dynamo.config.skip_nnmodule_hook_guards = False guards "
            hint += "hooks"
            yield COMPILED_ERROR.fail(name, message, where=Where("compile"), hint=hint)

    def judged(self, name: str, device: str, limits: Limits | None) -> Iterator[Run]:
        """The findings about each of them beside eager mode; the coverage counts those that are not compared."""
        if self._more:
            unseen = {f"compiled code beyond the first {_CALLABLES} callables": len(self._more)}
            yield Run(coverage=Coverage(unseen=unseen))
        for call in self._calls.values():
            if steps_or_draws(call):
                yield _uncompared(call, "it steps an optimizer or draws on an iterator")
                continue
            shape = _compiled(call), [call.args], call.kwargs
            try:
                of_call = Subject(shape, name=f"{name}, {name_of(call.original)}")
                run = judge_accuracy(of_call, device=device, dtype=call.autocast, checks=_COMPARED, limits=limits)
            except UsageError as error:  # it cannot be copied
                yield _uncompared(call, brief(error))
                continue
            yield replace(run, findings=tuple(f for f in run.findings if f.check in _COMPARED))


def _uncompared(call: CompiledCall, why: str) -> Run:
    return Run(coverage=Coverage(unseen={f"{name_of(call.original)}, compiled, beside eager mode: {why}": 1}))


def _compiled(call: CompiledCall) -> Any:
    """What was called, compiled with its own settings."""
    return call.original if is_compiled(call.original) else call.compile(call.original)
