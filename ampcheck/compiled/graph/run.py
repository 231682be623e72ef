"""Runs a subject compiled, pass after pass, and beside it what eager mode, `explain` and `fullgraph=True` do."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.compiled.graph.records import Code
from ampcheck.core.errors import as_result, brief
from ampcheck.core.subject import Call, Subject
from ampcheck.numerics.arms import total_loss
from ampcheck.numerics.compiled import eagerly
from ampcheck.numerics.equal_random import seeded
from ampcheck.torchtools.copying import forward_through, is_compiled_already, modules_of, prepare, recompiled
from ampcheck.torchtools.dynamo import counters, reset
from ampcheck.torchtools.global_state import changed, read_state, restore_state
from ampcheck.torchtools.pytree import map_tensors, tensors


@dataclass(slots=True)
class Blocks:
    """What runs, in turn. plain: what `torch.compile` was given; empty where it is compiled as the user's own is."""

    compiled: tuple[Callable[..., Any], ...]
    plain: tuple[Callable[..., Any], ...]
    root: torch.nn.Module | None
    functions: frozenset[Code]

    def names(self) -> dict[int, str]:
        """Module paths by `id`."""
        found = self.root.named_modules(remove_duplicate=False) if self.root is not None else ()
        return {id(m): n.replace("_orig_mod.", "").removesuffix("_orig_mod") for n, m in reversed(list(found))}


class NoBackwardError(Exception):
    """A backward raised. What Dynamo compiled is judged without it; gradients are another check's matter."""


@dataclass(slots=True)
class Ended:
    """How the passes ended.

    moved: calls that changed a switch or raised, with the switches. switches: those that eager mode leaves alone;
    by: the backend under which, where it is not the subject's own. compared: whether eager mode ran beside it.
    """

    calls: int = 0
    error: BaseException | None = None
    eager: BaseException | None = None
    moved: list[tuple[Call, dict[str, tuple[Any, Any]]]] = field(default_factory=list)
    switches: dict[str, tuple[str, str]] = field(default_factory=dict)
    by: str = ""
    compared: bool = False
    no_backward: str = ""


def build(subject: Subject, device: str, options: Mapping[str, Any]) -> Blocks:
    """A compiled copy; one of what is compiled already has the settings that the original has."""
    prepared = prepare(subject, device=device)
    if is_compiled_already(subject):
        functions = _functions(prepared.blocks)
        return Blocks(recompiled(subject, prepared), (), prepared.root, functions)
    made = tuple(torch.compile(block, **options) for block in prepared.blocks)
    return Blocks(made, prepared.blocks, prepared.root, _functions(prepared.blocks))


def own_device(subject: Subject, device: str) -> str:
    """Where the subject is judged: one that is compiled already where its weights are, else on `device`."""
    if not is_compiled_already(subject):
        return device
    held = [t for module in modules_of(subject.model) for t in (*module.parameters(), *module.buffers())]
    held += [t for call in subject.calls for _, t in tensors((call.args, dict(call.kwargs)))]
    return str(held[0].device) if held else device


def run_passes(
    subject: Subject,
    blocks: Blocks,
    *,
    device: str,
    dtype: torch.dtype | None,
    warmup: int,
    watching: Callable[[int], AbstractContextManager[Callable[[], None]]],
) -> Ended:
    """Run all calls `warmup` times and once more, forward and, where there is a gradient, backward.

    watching: entered around each pass with its number; what it gives is called before each call. Inputs are new in
    each pass. The first exception ends the run.
    """
    ended = Ended()
    autocast = _autocast(device, dtype)
    with seeded(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own run shows them once; as errors they would pose as the model's
        for number in range(warmup + 1):
            with watching(number) as next_call:
                for call in subject.calls:
                    next_call()
                    ended.error, moved = _switched(blocks.compiled, call, subject, device, autocast())
                    if isinstance(ended.error, NoBackwardError):
                        ended.no_backward, ended.error = str(ended.error), None
                    ended.calls += ended.error is None
                    if moved or ended.error is not None:
                        ended.moved.append((call, moved))
                    if ended.error is not None:
                        return ended
    return ended


def compare_eager(ended: Ended, subject: Subject, blocks: Blocks, *, device: str, dtype: torch.dtype | None) -> None:
    """What eager mode does where a compiled call raised or changed a switch; and Dynamo alone where it raised.

    Inductor's code may leave the switches alone that the graph as Dynamo wrote it does not put back after an exception.
    """
    autocast = _autocast(device, dtype)
    ended.compared = True
    with seeded(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call, moved in ended.moved:
            if ended.error is not None and blocks.plain and not moved:
                made = [torch.compile(block, backend="eager") for block in blocks.plain]
                _, moved = _switched(made, call, subject, device, autocast())
                ended.by = "eager" if moved else ""
            with nullcontext() if blocks.plain else eagerly():
                runs = blocks.plain or blocks.compiled
                ended.eager, also = _switched(runs, call, subject, device, autocast())
            for name, (old, new) in moved.items():
                if also.get(name) != (old, new):
                    ended.switches[name] = str(old), str(new)
    reset()


def _switched(
    blocks: Sequence[Callable[..., Any]],
    call: Call,
    subject: Subject,
    device: str,
    autocast: AbstractContextManager[Any],
) -> tuple[BaseException | None, dict[str, tuple[Any, Any]]]:
    """What a call raised, and which switches it left changed; they are put back."""
    before = read_state()
    error: BaseException | None = None
    try:
        run_call(blocks, call, subject, device, autocast)
    except BaseException as raised:  # noqa: BLE001  # the user's model: its exception is a result
        error = as_result(raised)
    moved = changed(before, read_state())
    restore_state(before)
    return error, moved


def run_call(
    blocks: Sequence[Callable[..., Any]],
    call: Call,
    subject: Subject,
    device: str,
    autocast: AbstractContextManager[Any],
) -> None:
    """One call through all blocks, and its gradients, which are not kept; `NoBackwardError` for what these raise."""
    args, kwargs = _fresh(call, None if is_compiled_already(subject) else device)
    with torch.enable_grad(), autocast:
        result = forward_through(blocks, Call(args, kwargs))
        total = total_loss(result, subject.loss, False)
    leaves = [p for root in modules_of(tuple(blocks)) for p in root.parameters() if p.requires_grad]
    leaves += [t for _, t in tensors((args, kwargs)) if t.requires_grad and t.is_leaf]
    if total is not None and total.requires_grad and leaves:
        try:
            torch.autograd.grad(total, leaves, allow_unused=True)
        except BaseException as error:
            raise NoBackwardError(brief(as_result(error))) from error


def elsewhere(subject: Subject, device: str, dtype: torch.dtype | None) -> dict[str, str]:
    """What `torch._dynamo.explain` counts, and whether `fullgraph=True` raises, for a subject of one call."""
    found: dict[str, str] = {}
    with seeded(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(subject, device=device)
        args, kwargs = _fresh(subject.calls[0], device)
        if len(prepared.blocks) == 1:
            reset()
            with _autocast(device, dtype)():
                found["torch._dynamo.explain"] = _explained(prepared.blocks[0], args, kwargs)
        reset()
        blocks = [torch.compile(block, fullgraph=True, backend="eager") for block in prepared.blocks]
        try:
            run_call(blocks, subject.calls[0], subject, device, _autocast(device, dtype)())
            found["fullgraph=True"] = "compiles without an error"
        except BaseException as error:  # noqa: BLE001  # whatever it raises is what it says
            found["fullgraph=True"] = f"raises {type(as_result(error)).__name__}"
    reset()
    return found


def _explained(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    try:
        found = torch._dynamo.explain(function)(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001  # it runs the user's model; the run reports what that raises
        return f"raises {type(as_result(error)).__name__}"
    return f"{found.graph_break_count} graph breaks" if found.graph_count else "finds no graph"


def count_modes(subject: Subject, device: str) -> dict[str, int]:
    """How many graphs a module has after each mode in which the same call may run, one after the other."""
    prepared = prepare(subject, device=device)
    found: dict[str, int] = {}
    reset()
    made = [torch.compile(block, backend="eager") for block in prepared.blocks]
    off = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=False)
    on = torch.autocast(torch.device(device).type, torch.bfloat16)
    modes: dict[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
        "train": (True, nullcontext),
        "eval": (False, nullcontext),
        "no_grad": (False, torch.no_grad),
        "autocast": (False, lambda: on),
        "inference_mode": (False, torch.inference_mode),
    }
    with seeded(device), warnings.catch_warnings(), off:
        warnings.simplefilter("ignore")
        for name, (train, context) in modes.items():
            if prepared.root is not None:
                prepared.root.train(train)
            before = counters("stats")["unique_graphs"]
            args, kwargs = _fresh(subject.calls[0], device)
            try:
                with context():
                    forward_through(made, Call(args, kwargs))
            except BaseException as error:  # noqa: BLE001  # a mode in which the model raises has no graph
                as_result(error)
            found[name] = counters("stats")["unique_graphs"] - before
    reset()
    return found


def _functions(parts: Sequence[Any]) -> frozenset[Code]:
    found = set()
    for part in parts:
        code = getattr(inspect.unwrap(part), "__code__", None) if not isinstance(part, torch.nn.Module) else None
        if code is not None:
            found.add((code.co_filename, code.co_name, code.co_firstlineno))
    return frozenset(found)


def _autocast(device: str, dtype: torch.dtype | None) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)


def _fresh(call: Call, device: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call as new tensors, on `device` if it is given, with what the user marked for Dynamo."""

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().clone().to(device or tensor.device)
        copied.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name.startswith("_"):  # where torch._dynamo.mark_dynamic and mark_static write
                setattr(copied, name, copy.copy(value))
        return copied

    args: tuple[Any, ...] = map_tensors(twin, call.args)
    kwargs: dict[str, Any] = map_tensors(twin, dict(call.kwargs))
    return args, kwargs
