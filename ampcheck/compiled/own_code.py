"""Judge what a training loop or a callable compiles itself: the graphs of another run, and the numbers of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.compile import cache_artifacts
from ampcheck.checks.compile.compiled_error import CHECK as COMPILED_ERROR
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.judge import graph_run
from ampcheck.compiled.graph.own import accelerator, measure_own_code
from ampcheck.compiled.stale import StaleGraphs, steps_or_draws, with_copies
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.limits import GraphLimits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, merge
from ampcheck.core.subject import Subject, name_of
from ampcheck.torchtools.dynamo import is_compiled
from ampcheck.torchtools.interception import CompiledCall
from ampcheck.torchtools.reachable import Reached
from ampcheck.torchtools.snapshot import preserved

_CALLABLES = 4
"""Modules and functions of a loop that are compared with eager mode; of those that share their code one."""

_COMPARED = ("compiled-error", "compiled-gradient", "compiled-dtype")


def judge_own_code(plan: Plan, reached: Reached) -> Run:
    """Judge the compiled code of a training loop, or of a callable without arguments, that ran in eager mode before.

    The code runs a second time, and what it reaches is restored. Of a loop the steps of the plan run. The user declares
    no warm-up: the first change of each value is no recompilation, and one more is allowed. The first calls of what it
    compiles are compared with eager mode and float64. Code that raises in eager mode too cannot run twice: a skip.
    """
    subject, calls = plan.subject, _FirstCalls()
    stats = measure_own_code(
        subject, plan.device, steps=plan.steps or 1, reached=reached, called=calls.add, ended=calls.graphs.compile_again
    )
    if stats.error is not None and stats.error.eager:
        message = f"compiled code was not judged: a second run in eager mode raised {stats.error.eager}"
        hint = "let the code run twice in one process, or judge what it compiles by itself: audit((model, inputs))"
        return Run(findings=(*cache_artifacts.check(stats), COVERAGE.skip(subject.name, message, hint=hint)))
    run = graph_run(stats, GraphLimits(max_recompiles=1))
    # Nothing was compiled where what is compiled is called elsewhere.
    findings = [f for f in run.findings if f.check != COVERAGE.slug or f.verdict is Verdict.SKIP]
    runs = [replace(run, findings=(*findings, *calls.stale(subject.name), *calls.foreign(subject.name, reached)))]
    if stats.error is None and not stats.artifacts:  # artifacts of another compilation would be saved with the user's
        with preserved(reached):
            runs += calls.judged(replace(plan, device=accelerator(plan.device), checks=_COMPARED, steps=None))
    return merge(runs)


class _FirstCalls:
    """The first call of each module and function that is compiled, with copies of its arguments."""

    def __init__(self) -> None:
        self._calls: dict[object, CompiledCall] = {}
        self._more: set[object] = set()
        self.graphs = StaleGraphs()
        self._foreign: dict[int, torch.nn.Module] = {}

    def add(self, call: CompiledCall) -> Callable[[object], None] | None:
        """Keep a call, if it is the first of its code; returns what gets its result."""
        original = call.original
        if call.caller is not None and id(call.caller) not in self._foreign and _runs_another(call.caller, call):
            self._foreign[id(call.caller)] = call.caller
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
            hint = "register hooks, replace layers and unfreeze weights before the first compiled call, make a new "
            hint += "torch.autocast instead of changing one, or call "
            hint += "torch.compiler.reset() afterwards; torch._dynamo.config.skip_nnmodule_hook_guards = False guards "
            hint += "hooks"
            yield COMPILED_ERROR.fail(name, message, where=Where("compile"), hint=hint)

    def foreign(self, name: str, reached: Reached) -> Iterator[Finding]:
        """The findings about copies of modules whose call runs the compiled `forward` of the original."""
        paths = {
            id(p): ".".join(filter(None, (at, n))) for at, m in reached.modules.items() for n, p in m.named_modules()
        }
        for number, module in self._foreign.items():
            path, kind = paths.get(number, ""), type(module).__name__
            message = (
                f"a call of a module must run its own weights; {path or kind} runs those of another {kind}, whose "
            )
            message += (
                "weights differ: its forward is a result of torch.compile that is bound to the other, of which it "
            )
            message += "is a copy"
            hint = "compile in place, module.compile(), which a copy does not keep; or copy first, then set forward"
            yield COMPILED_ERROR.fail(name, message, where=Where("compile", module=path), hint=hint)

    def judged(self, plan: Plan) -> Iterator[Run]:
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
                of_call = Subject(shape, name=f"{plan.subject.name}, {name_of(call.original)}")
                run = judge_accuracy(replace(plan, subject=of_call), dtype=call.autocast)
            except UsageError as error:  # it cannot be copied
                yield _uncompared(call, brief(error))
                continue
            yield run.only(_COMPARED)


def _uncompared(call: CompiledCall, why: str) -> Run:
    return Run(coverage=Coverage(unseen={f"{name_of(call.original)}, compiled, beside eager mode: {why}": 1}))


def _compiled(call: CompiledCall) -> Any:
    """Return what was called, compiled with its own settings."""
    return call.original if is_compiled(call.original) else call.compile(call.original)


def _runs_another(module: torch.nn.Module, call: CompiledCall) -> bool:
    """Return whether the call of a module runs the compiled `forward` of another of its class, which has other weights.

    `copy.deepcopy` copies bound methods, and keeps the function that `torch.compile` makes of one. Copies whose weights
    are equal compute the same, and what a module shares with another or delegates to a part of it is as intended.
    """
    other = getattr(call.function, "__self__", None)
    if other is module or type(other) is not type(module) or "forward" not in vars(module):
        return False
    own, used = dict(module.named_parameters()), dict(other.named_parameters())
    if own.keys() != used.keys() or {*map(id, own.values())} & {*map(id, used.values())}:
        return False
    pairs = [(weight.data, used[name].data) for name, weight in own.items()]
    return any(
        type(a) is type(b) is torch.Tensor and not a.is_meta and a.device == b.device and not torch.equal(a, b)
        for a, b in pairs
    )
