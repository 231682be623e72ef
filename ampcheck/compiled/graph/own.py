"""Run a training loop, or a callable without arguments, with the functions that it compiles, and record the graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.device import is_present
from ampcheck.compiled.graph.calls import Called, CallProfiler
from ampcheck.compiled.graph.recorder import GraphRecorder
from ampcheck.compiled.graph.run import Passes
from ampcheck.compiled.graph.trace import FIRST, LATE, WARM
from ampcheck.core.arguments import is_number
from ampcheck.core.environment import quiet
from ampcheck.core.errors import as_result
from ampcheck.core.subject import Kind, Subject
from ampcheck.numerics.compiled import dynamo_warnings_suppressed
from ampcheck.records.graphs import Fallback, GraphStats
from ampcheck.torchtools.batches import Playback, played
from ampcheck.torchtools.dynamo import in_eager_mode, reset, trace_unsupported, uncompiled
from ampcheck.torchtools.interception import calls_of_compile
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.reachable import Reached, reach
from ampcheck.torchtools.snapshot import preserved

STEPS = 3
"""Steps of a training loop that run; all but the last are its warm-up."""

_METHODS = (
    "torch.compile(model) compiles calls of its result alone: other methods of it, such as generate, run the original "
    "module. Compile in place with model.compile(), call the result, or compile the method"
)
_IN_PLACE = "model.compile() compiles calls of the module, model(x): model.forward(x) is not compiled"


def accelerator(device: str) -> str:
    """The device of the user's own code: a GPU if there is one."""
    return "cuda" if is_present("cuda") else device


def reached_of(subject: Subject) -> Reached:
    """Everything that a training loop or a callable without arguments leads to."""
    if subject.kind is Kind.CALL:
        return reach({"": subject.shape})
    parts = dict(subject.shape)
    step = parts["step"]
    return reach({**parts, "step": step.step if isinstance(step, Playback) else step})


@dynamo_warnings_suppressed()
def measure_own_code(
    subject: Subject,
    device: str,
    *,
    steps: int = STEPS,
    reached: Reached | None = None,
    called: Called | None = None,
    ended: Callable[[], None] = lambda: None,
) -> GraphStats:
    """Run a training loop, or a callable without arguments, compiled; return its graphs.

    reached: of code that ran in eager mode before, what is restored afterwards; where the code raises, or ends with an
    infinity or a NaN, it then runs in eager mode again. called: see `CallProfiler`. ended:
    called after the last step, before anything is restored.

    The last step of a loop that runs for the first time comes after its warm-up. In a second run no step counts as
    late: a step that evaluates, or that gets a smaller batch, may come at any time.
    """
    if reason := trace_unsupported():
        return GraphStats(subject.name, reason)
    training, again = subject.kind is Kind.TRAINING, reached is not None
    reached = Reached() if reached is None else reached
    if training:
        subject = played(subject, steps)
    runs = [partial(subject.run_step, number) for number in range(steps)] if training else [subject.run_call]
    watched = _Watched(subject, reached)
    recorder, passes, lost = GraphRecorder(), Passes(), list[str]()
    profiler = CallProfiler(recorder.log, watched=watched.modules, called=called)
    reset()
    try:
        with preserved(reached) as start:
            with calls_of_compile(watched.add), recorder.block(profiler):
                for number in _taken(runs, passes, lost):
                    profiler.next_call()
                    late = training and not again and number == steps - 1
                    recorder.log.stage = LATE if late else FIRST if again and not number else WARM
            lost += _nonfinite_weights(reached)
            if passes.error is None:
                ended()
            if again and (passes.error is not None or lost):
                start.restore()
                lost = _compare_eager(runs, passes, lost, reached)
    finally:
        reset()
    stats = recorder.stats(subject.name, passes, device=accelerator(device), warm=training or again)
    if not again:
        return stats
    stats = replace(stats, lost=tuple(dict.fromkeys(lost)))
    if stats.graphs or stats.ran or stats.fallbacks or stats.breaks or stats.error is not None:
        return stats
    return replace(stats, fallbacks=tuple(watched.unused(profiler)))


def _taken(steps: Sequence[Callable[[], object]], passes: Passes, lost: list[str]) -> Iterator[int]:
    """The number of each step before it runs, up to the first that raises. lost: gets results that are not finite."""
    with quiet():  # the user's own run shows them
        for number, step in enumerate(steps):
            yield number
            try:
                result = step()
            except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; the run reports it
                passes.error = as_result(error)
                return
            passes.calls += 1
            lost += _nonfinite_results(result)


def _compare_eager(
    steps: Sequence[Callable[[], object]], passes: Passes, lost: Collection[str], reached: Reached
) -> list[str]:
    """Run in eager mode; return what is finite there alone."""
    eager, kept = Passes(), list[str]()
    with in_eager_mode():
        for _ in _taken(steps, eager, kept):
            pass
    kept += _nonfinite_weights(reached)
    passes.compared, passes.eager = True, eager.error
    return [] if eager.error is not None else [name for name in lost if name not in kept]


def _nonfinite_results(result: Any) -> list[str]:
    if is_number(result):
        return [] if math.isfinite(result) else ["the result"]
    found = ((path, tensor) for path, tensor in tensors(result) if tensor.is_floating_point() and not tensor.is_meta)
    return [f"the result {path}".strip() for path, tensor in found if not bool(tensor.detach().isfinite().all())]


def _nonfinite_weights(reached: Reached) -> list[str]:
    named = ((path, n, p) for path, module in reached.modules.items() for n, p in module.named_parameters())
    return [f"{path}.{name}" for path, name, p in named if not p.is_meta and not bool(p.detach().isfinite().all())]


class _Watched:
    """The modules that a loop or a callable compiles: found in it beforehand, or compiled while it runs.

    sure: those that were compiled to be called in this code, whichever steps ran. Another result of `torch.compile`
    that a loop reaches may be called in steps that did not run.
    """

    def __init__(self, subject: Subject, reached: Reached) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self._sure: set[int] = set()
        self._hints: dict[int, str] = {}
        named = subject.shape if subject.kind is Kind.TRAINING else {}
        for part in reached.compiled.values():
            in_place = uncompiled(part) is part
            sure = in_place or subject.kind is Kind.CALL or any(part is value for value in named.values())
            self._watch(uncompiled(part), sure, _IN_PLACE if in_place else _METHODS)

    def add(self, compiled: Any) -> None:
        """Watch what is passed to `torch.compile`."""
        if isinstance(compiled, torch.nn.Module):
            self._watch(compiled, True, _METHODS)
        elif isinstance(owner := getattr(compiled, "__self__", None), torch.nn.Module):
            self._watch(owner, True, _IN_PLACE)

    def _watch(self, module: object, sure: bool, hint: str) -> None:
        if isinstance(module, torch.nn.Module):
            self.modules[id(module)] = module
            self._hints[id(module)] = hint
            self._sure |= {id(module)} if sure else set()

    def unused(self, calls: CallProfiler) -> Iterator[Fallback]:
        """The modules that ran in eager mode alone, in a run in which nothing compiled ran."""
        for number, where in calls.passed_by.items():
            name, cause = type(self.modules[number]).__name__, "passed by" if number in self._sure else "not used"
            yield Fallback((name,), cause, self._hints[number], where)
