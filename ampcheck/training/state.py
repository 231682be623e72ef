"""What a training step can reach and change, by name, and how all of it is put back as it was."""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampcheck import held
from ampcheck.compiler import is_compiled, uncompiled

_REACHED = 20_000
"""A step that reaches more values than this holds data, or a whole program."""


@dataclass(slots=True)
class Reached:
    """What a step can reach, each once, by the path that leads to it (`model`, `optimizer`, `trainer.ema`).

    tensors: those that belong to no module, optimizer or scaler. holders: dicts, lists, objects of the user's classes,
    and cells of closures, whose contents the step may replace. unseen: whether there was more than is followed.
    compiled: whether any module or function is compiled.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    holders: list[Any] = field(default_factory=list)
    unseen: bool = False
    compiled: bool = False


def reach(roots: Mapping[str, Any]) -> Reached:
    """Everything that the values of a mapping lead to.

    Followed are modules, optimizers, scalers, schedulers, tensors, and through functions (closures, defaults, the
    globals that code of the user's reads), bound methods, partials, lists, tuples, dicts and objects of the user's
    classes, as `ampcheck.held` follows them. Tensors of a module, an optimizer or a scaler are theirs.
    """
    found = Reached()
    seen: dict[int, Any] = {}
    waiting: list[tuple[str, Any]] = list(roots.items())[::-1]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        if len(seen) > _REACHED:
            found.unseen = True
            break
        seen[id(value)] = value  # held, so that no other value gets its number meanwhile
        if isinstance(value, torch.Tensor):
            found.tensors[path] = value
        elif isinstance(value, torch.nn.Module):
            found.compiled = found.compiled or any(is_compiled(part) for part in (value, *value.modules()))
            found.modules[path] = uncompiled(value)
            seen[id(found.modules[path])] = found.modules[path]
        elif is_optimizer(value):
            found.optimizers[path] = value
        elif is_scaler(value):
            found.scalers[path] = value
        elif isinstance(value, LRScheduler):
            found.schedulers[path] = value
        elif held.may_hold(value):
            found.compiled = found.compiled or (isinstance(value, types.FunctionType) and is_compiled(value))
            if isinstance(value, (dict, list)) or not isinstance(value, held.CALLABLES):
                found.holders.append(value)
            waiting += reversed(list(_inside(path, value, found.holders)))
    _leave_out_what_modules_own(found)
    return found


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, or what a library wraps around one."""
    return isinstance(value, torch.optim.Optimizer)


def is_scaler(value: Any) -> bool:
    """Whether a value scales losses as `torch.amp.GradScaler` does."""
    return isinstance(value, torch.amp.GradScaler)


def _inside(path: str, value: Any, holders: list[Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType) and not is_compiled(value):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            holders.append(cell)
            with suppress(ValueError):  # a name that was never bound
                yield name, cell.cell_contents
        for name, one in held.globals_read(value).items():
            yield name, one
        for one in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()):
            yield path, one
        return
    if isinstance(value, types.MethodType):
        yield path, value.__self__
    elif isinstance(value, dict):
        yield from ((f"{path}.{key}" if path else str(key), one) for key, one in list(value.items())[: held.WALKED])
    elif isinstance(value, (list, tuple)):
        many = len(value) > 1
        yield from ((f"{path}.{i}" if many else path, one) for i, one in enumerate(value[: held.WALKED]))
    elif isinstance(value, (functools.partial, types.FunctionType)):
        yield from ((path, one) for one in held.parts(value))
    else:
        yield from ((f"{path}.{key}", one) for key, one in list(vars(value).items())[: held.WALKED])


def _leave_out_what_modules_own(found: Reached) -> None:
    """A module that is part of another, and a tensor that is a weight of one, stand under that one alone."""
    inner = {id(part) for module in found.modules.values() for part in list(module.modules())[1:]}
    found.modules = {path: module for path, module in found.modules.items() if id(module) not in inner}
    owned = {id(t) for module in found.modules.values() for t in (*module.parameters(), *module.buffers())}
    found.tensors = {path: tensor for path, tensor in found.tensors.items() if id(tensor) not in owned}


class Snapshot:
    """A copy of everything that was reached, taken at once; `restore` puts it back, as often as asked.

    Identity is kept: parameters, state tensors and containers are the same objects afterwards. Random generators
    (PyTorch's, numpy's, Python's) are put back as well. What cannot be copied (an iterator, a file) goes on as it is.
    """

    def __init__(self, reached: Reached) -> None:
        self._undo: list[Callable[[], None]] = [_random_state()]
        tensors: dict[int, torch.Tensor] = {id(t): t for t in reached.tensors.values()}
        for module in reached.modules.values():
            for part in module.modules():
                self._undo.append(_module_back(part))
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    if tensor is not None:
                        tensors[id(tensor)] = tensor
        for optimizer in reached.optimizers.values():
            for group in optimizer.param_groups:
                tensors.update((id(one), one) for one in group["params"])
        owners = (*reached.optimizers.values(), *reached.scalers.values(), *reached.schedulers.values())
        for thing in (*owners, *reached.holders):
            back = _thing_back(thing, keep=(torch.Tensor, torch.nn.Module))
            if back is not None:
                self._undo.append(back)
        for thing in owners:
            for tensor in _tensors_in(vars(thing)):
                tensors[id(tensor)] = tensor
        self._undo += [_tensor_back(tensor) for tensor in tensors.values()]

    def restore(self) -> None:
        """Put everything back. What fails does not keep the rest from being put back; an error is raised in the end."""
        with ExitStack() as stack:
            for undo in reversed(self._undo):
                stack.callback(undo)


@contextmanager
def preserved(reached: Reached) -> Iterator[Snapshot]:
    """Everything that was reached is afterwards as it was, also after an exception."""
    snapshot = Snapshot(reached)
    try:
        yield snapshot
    finally:
        snapshot.restore()


def _tensor_back(tensor: torch.Tensor) -> Callable[[], None]:
    """Values, dtype, gradient and `requires_grad` of one tensor."""
    with torch.no_grad():
        data, value, dtype = tensor.detach(), tensor.detach().clone(), tensor.dtype
        grad = tensor.grad if tensor.is_leaf else None
        grad_value = None if grad is None else grad.detach().clone()
    wanted = tensor.requires_grad

    def back() -> None:
        with torch.no_grad():
            if tensor.dtype != dtype or tensor.shape != value.shape:
                tensor.data = data
            plain = tensor.data if tensor.is_inference() or tensor.requires_grad else tensor
            if not torch.equal(_bits(plain), _bits(value)):
                plain.copy_(value)
            if tensor.is_leaf:
                if grad is not None and grad_value is not None:
                    grad.detach().copy_(grad_value)
                tensor.grad = grad
                if tensor.requires_grad != wanted:
                    tensor.requires_grad_(wanted)

    return back


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values so that NaN is equal to itself; what has no bits to show stands for itself."""
    with suppress(Exception):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.contiguous().view(torch.uint8)
    return tensor


def _module_back(module: torch.nn.Module) -> Callable[[], None]:
    parameters, buffers, training = dict(module._parameters), dict(module._buffers), module.training
    plain = {name: one for name, one in vars(module).items() if not name.startswith("_") and _is_plain(one)}

    def back() -> None:
        for now, then in ((module._parameters, parameters), (module._buffers, buffers)):
            now.clear()
            now.update(then)  # type: ignore[arg-type]
        module.training = training
        vars(module).update(plain)

    return back


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def _thing_back(thing: Any, keep: tuple[type, ...]) -> Callable[[], None] | None:
    """What a container, a cell or an object holds. Containers inside are put back too, each the same object."""
    if isinstance(thing, types.CellType):
        try:
            content = thing.cell_contents
        except ValueError:
            return None

        def cell_back() -> None:
            thing.cell_contents = content

        return cell_back
    if isinstance(thing, tuple):
        return None
    inner = thing if isinstance(thing, (dict, list)) else vars(thing)
    return _container_back(inner, keep, set())


def _container_back(container: Any, keep: tuple[type, ...], seen: set[int]) -> Callable[[], None]:
    seen.add(id(container))
    then = copy.copy(container)
    values = list(container.values() if isinstance(container, dict) else container)
    nested = [one for one in values if isinstance(one, (dict, list)) and id(one) not in seen]
    inner = [_container_back(one, keep, seen) for one in nested]

    def back() -> None:
        container.clear()
        if isinstance(container, dict):
            container.update(then)
        else:
            container.extend(then)
        for one in inner:
            one()

    return back


def _tensors_in(value: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple, defaultdict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one, depth - 1)


def _random_state() -> Callable[[], None]:
    numpy = sys.modules.get("numpy")
    ours, pythons = torch.get_rng_state(), random.getstate()
    theirs = None if numpy is None else numpy.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def back() -> None:
        torch.set_rng_state(ours)
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(theirs)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return back


def same_state(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Whether two series of tensors hold the same bits."""
    pairs = list(zip(one, other, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in pairs)
