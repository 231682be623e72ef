"""Hooks on modules and tensors: those that a step registers are removed again, those that it removes come back.

Hooks of ampcheck and of PyTorch's distributed wrappers are left alone: they live as long as their owner registers them.
PyTorch lists hooks in private tables only; `test_hooks` registers a hook of each kind and looks for it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import torch

_DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.")

MODULE_TABLES = tuple(
    name for name, table in vars(torch.nn.Module()).items() if "_hooks" in name and isinstance(table, dict)
)
TENSOR_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FLAG = "_is_full_backward_hook"

_Table: TypeAlias = "dict[int, Any]"


def is_distributed(module: torch.nn.Module) -> bool:
    """Whether a module is a distributed wrapper of PyTorch, whose state belongs to other processes as well."""
    return f"{type(module).__module__}.".startswith(_DISTRIBUTED)


def save_module_hooks(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that restores the hooks of one module, with their flags and in their order."""
    if is_distributed(module):
        return lambda: None
    tables: dict[str, _Table] = {name: vars(module)[name] for name in MODULE_TABLES if name in vars(module)}
    foreign = _foreign(tables)
    before = {name: {k: hook for k, hook in table.items() if k not in foreign} for name, table in tables.items()}
    flag = vars(module).get(_FLAG)

    def restore() -> None:
        attributes = vars(module)
        now: dict[str, _Table] = {name: attributes.get(name, {}) for name in tables}
        foreign = _foreign(now)
        for name, table in tables.items():
            _refill(table, now[name], before[name], foreign)
            attributes[name] = table
        if _FLAG in attributes:
            attributes[_FLAG] = flag

    return restore


def save_tensor_hooks(tensor: torch.Tensor) -> Callable[[], None]:
    """Return a function that restores the hooks of one tensor; a tensor without a table has none again."""
    tables = {name: _table(tensor, name) for name in TENSOR_TABLES}
    before = {n: {k: hook for k, hook in (t or {}).items() if not _is_foreign(hook)} for n, t in tables.items()}

    def restore() -> None:
        for name, table in tables.items():
            now = _table(tensor, name)
            if now is None and table is None:
                continue
            foreign = _foreign({name: now or {}})
            wanted = now if table is None and (foreign or not tensor.is_leaf) else table
            if wanted is not None:
                _refill(wanted, now or {}, before[name], foreign)
            if wanted is not now:
                setattr(tensor, name, wanted)

    return restore


def _table(tensor: torch.Tensor, name: str) -> _Table | None:
    with suppress(Exception):  # a subclass may refuse
        table: _Table | None = getattr(tensor, name)
        return table
    return None


def _refill(table: _Table, now: _Table, before: _Table, foreign: set[int]) -> None:
    """Restore a table's entries; foreign hooks stay, before the rest or behind it."""
    own = [(number, id(hook)) for number, hook in now.items() if number not in foreign]
    if table is now and own == [(number, id(hook)) for number, hook in before.items()]:
        return
    numbers = list(now)
    leading = next((i for i, number in enumerate(numbers) if number not in foreign), len(numbers))
    first = {number: now[number] for number in numbers[:leading]}
    last = {number: now[number] for number in numbers[leading:] if number in foreign}
    table.clear()
    for part in (first, before, last):
        table.update(part)


def _foreign(tables: dict[str, _Table]) -> set[int]:
    return {number for table in tables.values() for number, hook in table.items() if _is_foreign(hook)}


def _is_foreign(hook: Any) -> bool:
    """Whether a hook belongs to ampcheck or to a distributed wrapper."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(("ampcheck.", *_DISTRIBUTED))
