"""Hooks on modules and tensors: those that a step registers are removed again, those that it removes come back.

Hooks of ampcheck and of PyTorch's distributed wrappers are left alone: they live as long as their owner registers them.
PyTorch lists hooks in private tables only; `test_hooks` registers a hook of each kind and looks for it there.
"""

from __future__ import annotations

import functools
import itertools
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
    restore_tables = _save(module, MODULE_TABLES)
    flag = vars(module).get(_FLAG)

    def restore() -> None:
        restore_tables()
        if _FLAG in vars(module):
            vars(module)[_FLAG] = flag

    return restore


def save_tensor_hooks(tensor: torch.Tensor) -> Callable[[], None]:
    """Return a function that restores the hooks of one tensor; a tensor without a table has none again."""
    return _save(tensor, TENSOR_TABLES)


def _save(owner: torch.nn.Module | torch.Tensor, names: tuple[str, ...]) -> Callable[[], None]:
    tables = {name: _table(owner, name) for name in names}
    foreign = _foreign(tables)
    before = {name: {k: v for k, v in (table or {}).items() if k not in foreign} for name, table in tables.items()}

    def restore() -> None:
        now = {name: _table(owner, name) for name in names}
        foreign = _foreign(now)
        for name, table in tables.items():
            wanted, present = table, now[name]
            if table is None and (not foreign.isdisjoint(present or ()) or getattr(owner, "is_leaf", True) is False):
                wanted = present
            if wanted is not None:
                _refill(wanted, present or {}, before[name], foreign)
            if wanted is not present:
                setattr(owner, name, wanted)

    return restore


def _table(owner: torch.nn.Module | torch.Tensor, name: str) -> _Table | None:
    with suppress(Exception):  # a subclass of tensors may refuse
        table: _Table | None = getattr(owner, name)
        return table
    return None


def _refill(table: _Table, now: _Table, before: _Table, foreign: set[int]) -> None:
    """Restore a table's entries; foreign hooks stay, before the rest or behind it."""
    own = [(number, id(hook)) for number, hook in now.items() if number not in foreign]
    if table is now and own == [(number, id(hook)) for number, hook in before.items()]:
        return
    first = dict(itertools.takewhile(lambda item: item[0] in foreign, now.items()))
    last = {number: hook for number, hook in now.items() if number in foreign and number not in first}
    table.clear()
    for part in (first, before, last):
        table.update(part)


def _foreign(tables: dict[str, _Table | None]) -> set[int]:
    return {number for table in tables.values() for number, hook in (table or {}).items() if _is_foreign(hook)}


def _is_foreign(hook: object) -> bool:
    """Whether a hook belongs to ampcheck or to a distributed wrapper."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(("ampcheck.", *_DISTRIBUTED))
