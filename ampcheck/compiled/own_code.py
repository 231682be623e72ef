"""Judge what a training loop or a callable compiles itself: the graphs of another run, and the numbers of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ampcheck.catalog.compiled import COMPILED_DTYPE, COMPILED_ERROR, COMPILED_GRADIENT
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.judge import graph_run
from ampcheck.compiled.graph.own import accelerator, measure_again
from ampcheck.compiled.options import GraphLimits
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Run, Verdict, merge
from ampcheck.core.subject import Subject, name_of
from ampcheck.torchtools.dynamo import is_compiled
from ampcheck.torchtools.interception import CompiledCall
from ampcheck.torchtools.pytree import map_tensors
from ampcheck.torchtools.reachable import Reached, reach
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
    compares: bool = True,
) -> Run:
    """Judge a training loop, or a callable without arguments, that ran in eager mode before and compiles.

    It runs once more as it is, a loop for so many steps, and what it reaches is restored. There is no warm-up that the
    user declares: the first time that a value varies is none of the recompilations, and one more is allowed. Code that
    raises in eager mode as well, since it cannot run twice, is not judged. compares: compare the first call of what it
    compiled with eager mode and float64.
    """
    calls = _FirstCalls()
    stats = measure_again(subject, reached, device, steps, calls.add if compares else lambda call: None)
    if stats.error is not None and stats.error.eager:
        message = f"compiled code was not judged: a second run in eager mode raised {stats.error.eager}"
        hint = "let the code run twice in one process, or judge what it compiles by itself: audit((model, inputs))"
        return Run(findings=(COVERAGE.skip(subject.name, message, hint=hint),))
    run = graph_run(stats, GraphLimits(max_recompiles=1))
    # Nothing was compiled where what is compiled is called elsewhere.
    findings = [f for f in run.findings if f.check != COVERAGE.slug or f.verdict is Verdict.SKIP]
    runs = [replace(run, findings=tuple(findings))]
    if stats.error is None and not stats.artifacts:  # artifacts of another compilation would be saved with the user's
        with preserved(reached):
            runs += calls.judged(subject.name, accelerator(device), limits)
    return merge(runs)


class _FirstCalls:
    """The first call of each module and function that is compiled, with copies of its arguments."""

    def __init__(self) -> None:
        self._calls: dict[object, CompiledCall] = {}

    def add(self, call: CompiledCall) -> None:
        """Keep a call, if it is the first of its code."""
        original = call.original
        code = type(original) if isinstance(original, torch.nn.Module) else getattr(original, "__code__", original)
        if code not in self._calls and len(self._calls) < _CALLABLES:
            args, kwargs = map_tensors(_copied, call.args), map_tensors(_copied, call.kwargs)
            self._calls[code] = replace(call, args=args, kwargs=kwargs)

    def judged(self, name: str, device: str, limits: Limits | None) -> Iterator[Run]:
        """The findings about each of them, compared with eager mode."""
        for call in self._calls.values():
            inside = reach({"": call.original})
            if inside.optimizers or inside.scalers or inside.opaque:  # a step of these cannot be repeated on a copy
                continue
            compiled = call.original if is_compiled(call.original) else call.compile(call.original)
            shape = compiled, [call.args], call.kwargs
            try:
                of_call = Subject(shape, name=f"{name}, {name_of(call.original)}")
                run = judge_accuracy(of_call, device=device, dtype=call.autocast, checks=_COMPARED, limits=limits)
            except UsageError:  # it cannot be copied
                continue
            yield replace(run, findings=tuple(f for f in run.findings if f.check in _COMPARED))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
