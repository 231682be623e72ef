"""A copy of a subject that may be run, moved, cast and changed without touching the user's."""

from __future__ import annotations

import copy
import dis
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck import compiler
from ampcheck.errors import UsageError, brief
from ampcheck.nest import map_tensors, tensors
from ampcheck.subject import Call, Kind, Subject


@dataclass(slots=True)
class Prepared:
    """A model and its calls that may be run and changed."""

    kind: Kind
    model: Any
    calls: tuple[Call, ...]
    root: torch.nn.Module | None
    """The module whose paths findings name; None for a plain function."""

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The callables that run, one after the other."""
        return self.model if isinstance(self.model, tuple) else (self.model,)


def prepare(subject: Subject, *, device: str = "cpu", to: torch.dtype | None = None) -> Prepared:
    """A deep copy of the subject on `device`, its real floating tensors cast `to`, complex ones to the same width.

    What went through `torch.compile` is plain again in the copy; `recompiled` compiles it as it was. Raises
    `UsageError` for a model that cannot be copied, moved or cast.
    """
    found = modules_of(subject.model)
    try:
        memo = _cached_results(found)
        parts = subject.model if isinstance(subject.model, tuple) else (subject.model,)
        copied = tuple(_plain_copy(part, memo) for part in parts)
        model = copied if isinstance(subject.model, tuple) else copied[0]
        calls = tuple(Call(map_tensors(_bare, c.args), map_tensors(_bare, dict(c.kwargs))) for c in subject.calls)
        calls = copy.deepcopy(calls)
    except Exception as error:  # any __deepcopy__ of the user's may raise anything
        raise UsageError(
            f"{subject.name} must be copied to be run more than once, and copying it raised {brief(error)}"
        ) from error
    copies = modules_of(model)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=_wide(tensor, to))

    try:
        for module in copies:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of modules that TorchScript holds
                module._apply(move)  # type: ignore[no-untyped-call]
        calls = tuple(Call(map_tensors(move, c.args), map_tensors(move, dict(c.kwargs))) for c in calls)
    except Exception as error:  # each device and subclass refuses in its own way
        name = "its own dtypes" if to is None else str(to).removeprefix("torch.")
        raise UsageError(f"{subject.name} cannot be brought to {device} in {name}: {brief(error)}") from error
    root: torch.nn.Module | None = None
    if subject.kind is Kind.REGIONAL or len(copies) > 1:
        root = torch.nn.ModuleList(copies)
    elif copies:
        root = copies[0]
    return Prepared(subject.kind, model, calls, root)


def recompiled(subject: Subject, prepared: Prepared) -> tuple[Any, ...]:
    """The blocks of a copy, compiled as the subject's own are, in whole and in parts; by `torch.compile` where nothing
    of the subject is compiled."""
    originals = subject.model if isinstance(subject.model, tuple) else (subject.model,)
    if not is_compiled_already(subject):
        return tuple(torch.compile(block) for block in prepared.blocks)
    return tuple(_compiled_like(*pair) for pair in zip(originals, prepared.blocks, strict=True))


def _compiled_like(original: Any, twin: Any) -> Any:
    """A plain copy compiled as its original is; of a function, what it holds as well."""
    if isinstance(twin, torch.nn.Module):
        return compiler.compiled_like(original, twin)
    held: list[torch.nn.Module] = []

    def noted(module: torch.nn.Module) -> torch.nn.Module:
        held.append(module)
        return module

    _rebound(compiler.uncompiled(original), noted)
    originals = iter(held)
    return compiler.compiled_like(original, _rebound(twin, lambda one: compiler.compiled_like(next(originals), one)))


def is_compiled_already(subject: Subject) -> bool:
    """Whether the subject, or a module inside it, went through `torch.compile` or `compile()`."""
    parts = subject.model if isinstance(subject.model, tuple) else (subject.model,)
    held = [module for root in modules_of(subject.model) for module in root.modules()]
    return any(compiler.is_compiled(part) for part in (*parts, *held))


def modules_of(model: Any) -> list[torch.nn.Module]:
    """The modules that a subject's callables run: themselves, or what a closure, a partial or a bound method holds."""
    found: list[torch.nn.Module] = []
    for part in model if isinstance(model, tuple) else (model,):
        part = compiler.uncompiled(part)
        held = [part] if isinstance(part, torch.nn.Module) else list(_held(part))
        found += [module for module in held if not any(module is other for other in found)]
    return found


def _held(function: Any) -> Iterator[torch.nn.Module]:
    candidates: list[Any] = [getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        candidates += [*function.args, *function.keywords.values()]
        yield from modules_of(function.func)
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a name that was never bound
            candidates.append(cell.cell_contents)
    candidates += _global_modules(function).values()
    yield from (c for c in candidates if isinstance(c, torch.nn.Module))


def _global_modules(function: Any) -> dict[str, torch.nn.Module]:
    """The modules that a function's own code reads from its globals."""
    if not isinstance(function, types.FunctionType):
        return {}
    read = {one.argval for one in dis.get_instructions(function.__code__) if one.opname == "LOAD_GLOBAL"}
    found = {name: function.__globals__.get(name) for name in sorted(read)}
    return {name: value for name, value in found.items() if isinstance(value, torch.nn.Module)}


def _plain_copy(part: Any, memo: dict[int, Any]) -> Any:
    """A deep copy without `torch.compile`; of a function, with copies of the modules in its closure and among its
    globals, which deepcopy would share."""
    part = compiler.uncompiled(part)

    def plain(module: torch.nn.Module) -> torch.nn.Module:
        copied: torch.nn.Module = compiler.stripped(copy.deepcopy(compiler.uncompiled(module), memo))
        return copied

    if isinstance(part, torch.nn.Module):
        return plain(part)
    rebound = _rebound(part, plain, lambda value: copy.deepcopy(value, memo))
    return copy.deepcopy(part, memo) if rebound is part else rebound


def _rebound(
    function: Any,
    change: Callable[[torch.nn.Module], torch.nn.Module],
    given: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A function that holds what `change` makes of each module that it holds, and what `given` makes of the other
    arguments of a partial; the function itself where there is nothing to change."""
    if isinstance(function, functools.partial):

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, torch.nn.Module) else given(value)

        named = {name: changed(value) for name, value in function.keywords.items()}
        return functools.partial(_rebound(function.func, change, given), *map(changed, function.args), **named)
    if isinstance(function, types.MethodType) and isinstance(function.__self__, torch.nn.Module):
        return types.MethodType(function.__func__, change(function.__self__))
    if not isinstance(function, types.FunctionType) or not any(True for _ in _held(function)):
        return function
    cells = tuple(_changed_cell(cell, change) for cell in function.__closure__ or ())
    modules = {name: change(module) for name, module in _global_modules(function).items()}
    names = {**function.__globals__, **modules} if modules else function.__globals__
    twin = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _changed_cell(cell: Any, change: Callable[[torch.nn.Module], torch.nn.Module]) -> Any:
    with suppress(ValueError):  # a name that was never bound
        if isinstance(cell.cell_contents, torch.nn.Module):
            return types.CellType(change(cell.cell_contents))
    return cell


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """An input without its history, which deepcopy refuses."""
    return tensor.detach()


def _wide(tensor: torch.Tensor, to: torch.dtype | None) -> torch.dtype:
    if to is None:
        return tensor.dtype
    if tensor.is_complex():
        return torch.complex128 if to is torch.float64 else torch.complex64
    return to if tensor.is_floating_point() else tensor.dtype


def _cached_results(modules: list[torch.nn.Module]) -> dict[int, Any]:
    """Tensors with a history that modules keep as attributes (a cached bias table): deepcopy refuses them."""
    memo: dict[int, Any] = {}
    for root in modules:
        for module in root.modules():
            held = {k: v for k, v in vars(module).items() if isinstance(v, (torch.Tensor, dict, list, tuple))}
            for _, tensor in tensors({k: v for k, v in held.items() if not k.startswith("_")}):
                if tensor.grad_fn is not None:
                    memo[id(tensor)] = tensor.detach().clone()
    return memo
