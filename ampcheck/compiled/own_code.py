"""Judge what a training loop or a callable compiles itself: the graphs of another run, and the numbers of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, merge
from ampcheck.core.subject import Subject, name_of
from ampcheck.torchtools.dynamo import in_eager_mode, is_compiled, reset
from ampcheck.torchtools.interception import CompiledCall
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.reachable import Reached, reach
from ampcheck.torchtools.snapshot import preserved

_CALLABLES = 4
"""How many modules and functions of a loop are compared with eager mode; of those that share their code one."""

_STALE = 0.02
"""The relative difference to eager mode from which graphs are out of date, where new graphs are ten times nearer."""

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
    stats = measure_own_code(subject, device, steps=steps, reached=reached, called=calls.add, ended=calls.compile_again)
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
        self._trained: dict[object, list[torch.nn.Parameter]] = {}
        self._stale: dict[str, str] = {}

    def add(self, call: CompiledCall) -> None:
        """Keep a call, if it is the first of its code."""
        original = call.original
        code = type(original) if isinstance(original, torch.nn.Module) else getattr(original, "__code__", original)
        if len(self._calls) == _CALLABLES and code not in self._calls:
            self._more.add(code)
        elif code not in self._calls:
            args, kwargs = map_tensors(_copied, call.args), map_tensors(_copied, call.kwargs)
            self._calls[code] = replace(call, args=args, kwargs=kwargs)
            self._trained[code] = _trained(call)

    def compile_again(self) -> None:
        """Find callables whose graphs no longer compute what the callable computes now.

        A graph that was compiled before a hook was added, or an attribute replaced, may pass its guards; in PyTorch 2.9
        also one compiled before a weight required a gradient. The callable runs with the arguments of its first call:
        by the graphs that it has, compiled again, and in eager mode.
        """
        calls = [
            (call, _compiled(call), [w for w in _trained(call) if not any(w is known for known in self._trained[code])])
            for code, call in self._calls.items()
            if not _steps(call)
        ]
        known = [_outputs(*of_call) for of_call in calls]
        reset()
        for of_call, old in zip(calls, known, strict=True):
            if old is None or (new := _outputs(*of_call)) is None:
                continue
            with in_eager_mode():
                eager = _outputs(*of_call)
            if eager is None or not [t.shape for t in old] == [t.shape for t in new] == [t.shape for t in eager]:
                continue
            name, first = name_of(of_call[0].original), len(eager) - len(of_call[2])  # of what new weights get
            away, still = _distance(old[:first], eager[:first]), _distance(new[:first], eager[:first])
            if away > _STALE and away > 10 * still:
                self._stale[name] = f"give a result that lies {away:.2g} away from eager mode"
            elif lost := sum(
                bool(e == n and e > o) for o, n, e in zip(old[first:], new[first:], eager[first:], strict=True)
            ):
                self._stale[name] = f"give no gradient to {lost} weights that get one in eager mode"

    def stale(self, name: str) -> Iterator[Finding]:
        """The findings about graphs that are out of date."""
        for function, difference in self._stale.items():
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
            if _steps(call):
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


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _compiled(call: CompiledCall) -> Any:
    """What was called, compiled with its own settings."""
    return call.original if is_compiled(call.original) else call.compile(call.original)


def _steps(call: CompiledCall) -> bool:
    """Whether the callable steps an optimizer or draws on an iterator, which cannot be repeated on a copy."""
    inside = reach({"": call.original})
    return bool(inside.optimizers or inside.scalers or inside.opaque)


def _trained(call: CompiledCall) -> list[torch.nn.Parameter]:
    """The parameters of what is called that require a gradient now."""
    modules = reach({"": call.original}).modules.values()
    return list(dict.fromkeys(weight for m in modules for weight in m.parameters() if weight.requires_grad))


def _outputs(call: CompiledCall, function: Any, weights: Sequence[torch.nn.Parameter]) -> list[torch.Tensor] | None:
    """The floating results of a call, and for each of the weights whether it gets a gradient other than zero.

    None where the call raises or draws random numbers. What it changes is restored.
    """
    args, kwargs = map_tensors(_copied, call.args), map_tensors(_copied, call.kwargs)
    autocast = torch.autocast(call.device, call.autocast, enabled=call.autocast is not None)
    with preserved(reach({"": call.original})), torch.set_grad_enabled(call.grad), autocast:
        begun = torch.get_rng_state()
        try:
            result = function(*args, **kwargs)
            floating = [t for _, t in tensors(result) if t.is_floating_point()]
            roots = [t for t in floating if t.requires_grad]
            seeds = [torch.ones_like(t) for t in roots]
            gradients: Sequence[torch.Tensor | None] = [None] * len(weights)
            if roots and weights:
                gradients = torch.autograd.grad(roots, weights, seeds, allow_unused=True)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; it did not in its own run
            as_result(error)
            return None
        drawn = not torch.equal(begun, torch.get_rng_state())
        received = [torch.tensor(float(g is not None and bool(g.any()))) for g in gradients]
        return None if drawn else [*(t.detach().double().clone() for t in floating), *received]


def _distance(results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of results, relative to the largest element of each reference."""
    pairs = ((t, r) for t, r in zip(results, references, strict=True) if r.numel() and bool(r.isfinite().all()))
    return max((float((t - r).abs().amax() / r.abs().amax().clamp_min(1e-30)) for t, r in pairs), default=0.0)
