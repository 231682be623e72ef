"""Run a subject compiled, pass after pass, and compare with eager mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ampcheck.core.environment import quiet
from ampcheck.core.errors import as_result, brief
from ampcheck.core.subject import Call, Subject
from ampcheck.numerics.record import Execution
from ampcheck.numerics.run import Blocks, RunPlan, run_subject
from ampcheck.records.graphs import Code
from ampcheck.torchtools.copying import (
    Prepared,
    forward_through,
    fresh_call,
    is_compiled_already,
    modules_of,
    prepare,
    recompiled,
)
from ampcheck.torchtools.dynamo import counters, in_eager_mode, reset
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.storage import device_of

Changes: TypeAlias = dict[str, tuple[Any, Any]]
"""Global state that changed, before and after."""


@dataclass(slots=True)
class Copy:
    """The blocks that run, in turn. plain: before `torch.compile`; empty where the user compiled the subject.
    functions: those that were compiled."""

    compiled: Blocks
    plain: Blocks
    root: torch.nn.Module | None
    functions: frozenset[Code]

    def names(self) -> dict[int, str]:
        """Module paths by `id`."""
        modules = self.root.named_modules(remove_duplicate=False) if self.root is not None else ()
        return {id(m): n.replace("_orig_mod.", "").removesuffix("_orig_mod") for n, m in reversed(list(modules))}


@dataclass(slots=True)
class Passes:
    """Outcome of the passes.

    calls: that completed. error: the exception that ended them; eager: the exception of the same call in eager mode,
    where it was `compared`; in_backward: it is one of backward. state_changes: of calls, where eager mode makes none;
    changed_by: the backend under which, where it is not the subject's own. backward_error: of a backward, which leaves
    the forward judged.
    """

    calls: int = 0
    error: BaseException | None = None
    eager: BaseException | None = None
    in_backward: bool = False
    state_changes: dict[str, tuple[str, str]] = field(default_factory=dict)
    changed_by: str = ""
    compared: bool = False
    backward_error: str = ""
    suspects: list[tuple[Call, Changes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs a subject on a device. dtype: what autocast casts to, None for none. grad: the grad mode."""

    subject: Subject
    device: str
    dtype: torch.dtype | None = None
    grad: bool = True

    def build(self, options: Mapping[str, Any]) -> Copy:
        """A compiled copy; of a subject that is compiled already, with its own settings."""
        prepared = prepare(self.subject, device=self.device)
        parts = [inspect.unwrap(part) for part in prepared.blocks if not isinstance(part, torch.nn.Module)]
        codes = [code for part in parts if (code := getattr(part, "__code__", None)) is not None]
        functions = frozenset((code.co_filename, code.co_name, code.co_firstlineno) for code in codes)
        plain = () if is_compiled_already(self.subject) else prepared.blocks
        return Copy(recompiled(self.subject, prepared, **options), plain, prepared.root, functions)

    def run_passes(
        self, blocks: Copy, warmup: int, around: Callable[[int], AbstractContextManager[Callable[[], None]]]
    ) -> Passes:
        """Run all calls `warmup` times and once more, forward and, where there is a gradient, backward.

        around: entered around each pass with its number; the function that it yields is called before each call.
        Inputs are new in each pass. The first exception ends the run.
        """
        passes = Passes()
        with self._seeded():
            for number in range(warmup + 1):
                with around(number) as next_call:
                    for call in self.subject.calls:
                        next_call()
                        outcome = self._guarded(blocks.compiled, call)
                        if outcome.error is not None and outcome.phase == "backward":  # reported by compiled-gradient
                            passes.backward_error = brief(outcome.error)
                        else:
                            passes.error = outcome.error
                        passes.calls += passes.error is None
                        if outcome.left or passes.error is not None:
                            passes.suspects.append((call, outcome.left))
                        if passes.error is not None:
                            return passes
        return passes

    def compare_eager(self, passes: Passes, blocks: Copy) -> None:
        """Run eager mode where a compiled call raised or changed global state; and Dynamo alone where it raised.

        Inductor's code may leave state unchanged that the graph as Dynamo wrote it does not restore after an exception.
        """
        passes.compared = True
        with self._seeded():
            for call, changes in passes.suspects:
                if passes.error is not None and blocks.plain and not changes:
                    changes = self._guarded([torch.compile(b, backend="eager") for b in blocks.plain], call).left
                    passes.changed_by = "eager" if changes else ""
                with nullcontext() if blocks.plain else in_eager_mode():
                    outcome = self._guarded(blocks.plain or blocks.compiled, call)
                passes.in_backward = outcome.phase == "backward"
                passes.eager = outcome.error  # of the backward as well, which a compiled forward traces
                for name, (old, new) in changes.items():
                    if outcome.left.get(name) != (old, new):
                        passes.state_changes[name] = str(old), str(new)
        reset()

    def count_modes(self) -> dict[str, int]:
        """Return how many graphs a module has after each mode in which the same call may run, one after the other."""
        prepared = prepare(self.subject, device=self.device)
        reset()
        compiled = [torch.compile(block, backend="eager") for block in prepared.blocks]
        autocast = torch.autocast(torch.device(self.device).type, torch.bfloat16)
        modes: dict[str, tuple[bool, AbstractContextManager[object]]] = {
            "train": (True, nullcontext()),
            "eval": (False, nullcontext()),
            "no_grad": (False, torch.no_grad()),
            "autocast": (False, autocast),
            "inference_mode": (False, torch.inference_mode()),
        }
        counts: dict[str, int] = {}
        with self._seeded(), torch.autocast(torch.device(self.device).type, enabled=False):
            for name, (train, context) in modes.items():
                if prepared.root is not None:
                    prepared.root.train(train)
                before = counters("stats")["unique_graphs"]
                try:
                    with context, preserved_state():
                        forward_through(compiled, fresh_call(self.subject.calls[0], self.device))
                except BaseException as error:  # noqa: BLE001  # a mode in which the model raises has no graph
                    as_result(error)
                counts[name] = counters("stats")["unique_graphs"] - before
        reset()
        return counts

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        with seeded(self.device), quiet():  # the user's own run shows them; as errors they would be the model's
            yield

    def _guarded(self, blocks: Blocks, call: Call) -> Execution:
        """Return what happens in a call and its backward; global state that it changes is restored."""
        fresh = fresh_call(call, None if is_compiled_already(self.subject) else self.device)
        leaves = [p for root in modules_of(tuple(blocks)) for p in root.parameters() if p.requires_grad]
        leaves += [t for _, t in tensors((fresh.args, dict(fresh.kwargs))) if t.requires_grad and t.is_leaf]
        named = {str(number): leaf for number, leaf in enumerate(leaves if self.grad else ())}
        plan = RunPlan(self.device, self.dtype, self.subject.loss, grad=self.grad, seeds=False)
        changes = Changes()
        with preserved_state(changes):
            prepared = Prepared(tuple(blocks), (fresh,), None)
            run = run_subject(prepared, plan, leaves=named, preserve=lambda left: nullcontext())
        run.left = changes
        return run


def own_device(subject: Subject, device: str) -> str:
    """The device of a compiled subject's weights or inputs; `device` for one that is not compiled."""
    if not is_compiled_already(subject):
        return device
    owned = [t for module in modules_of(subject.model) for t in (*module.parameters(), *module.buffers())]
    owned += [t for call in subject.calls for _, t in tensors((call.args, dict(call.kwargs)))]
    return str(device_of(owned[0])) if owned else device
