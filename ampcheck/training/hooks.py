"""Hooks on modules and tensors: those that a step registers are taken away again, those that it removes come back.

Hooks of ours and of PyTorch's distributed wrappers are left as they are: they come and go with what registered them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.")
"""Modules of PyTorch whose doings belong to what has begun on other processes as well."""

# PyTorch tells no hooks but by these private tables; `test_hooks` registers one of each kind and sees it in its table.
_OF_MODULES = tuple(name for name, one in vars(torch.nn.Module()).items() if "_hooks" in name and isinstance(one, dict))
_KIND = "_is_full_backward_hook"
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_Table = dict[int, Any]


def module_hooks_back(module: torch.nn.Module) -> Callable[[], None]:
    """Put back which hooks one module has, with their flags and in their order."""
    if f"{type(module).__module__}.".startswith(DISTRIBUTED):
        return lambda: None
    tables: dict[str, _Table] = {name: vars(module)[name] for name in _OF_MODULES if name in vars(module)}
    passing = {number for table in tables.values() for number, hook in table.items() if _passes(hook)}
    then = {name: {k: v for k, v in table.items() if k not in passing} for name, table in tables.items()}
    kind = vars(module).get(_KIND)

    def back() -> None:
        held = vars(module)
        now: dict[str, _Table] = {name: held.get(name, {}) for name in tables}
        passing = {number for table in now.values() for number, hook in table.items() if _passes(hook)}
        for name, table in tables.items():
            _refill(table, now[name], then[name], passing)
            held[name] = table
        if _KIND in held:
            held[_KIND] = kind

    return back


def tensor_hooks_back(tensor: torch.Tensor) -> Callable[[], None]:
    """Put back which hooks the gradient of one tensor runs through; a tensor that had no table has none again."""
    tables = {name: _table(tensor, name) for name in _OF_TENSORS}
    then = {name: {k: v for k, v in (table or {}).items() if not _passes(v)} for name, table in tables.items()}

    def back() -> None:
        for name, table in tables.items():
            now = _table(tensor, name)
            if now is None and table is None:
                continue
            passing = {number for number, hook in (now or {}).items() if _passes(hook)}
            wanted = table
            if table is None and (passing or not tensor.is_leaf):
                wanted = now
            if wanted is not None:
                _refill(wanted, now or {}, then[name], passing)
            if wanted is not now:
                setattr(tensor, name, wanted)

    return back


def _table(tensor: torch.Tensor, name: str) -> _Table | None:
    with suppress(Exception):  # a subclass may refuse
        table: _Table | None = getattr(tensor, name)
        return table
    return None


def _refill(table: _Table, now: _Table, then: _Table, passing: set[int]) -> None:
    """Give a table what it held then; what passes stays, before the rest or behind it."""
    theirs = [(number, id(one)) for number, one in now.items() if number not in passing]
    if table is now and theirs == [(number, id(one)) for number, one in then.items()]:
        return
    first: _Table = {}
    for number, one in now.items():
        if number not in passing:
            break
        first[number] = one
    last = {number: one for number, one in now.items() if number in passing and number not in first}
    table.clear()
    for part in (first, then, last):
        table.update(part)


def _passes(hook: Any) -> bool:
    """Whether a hook is ours or that of a distributed wrapper."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(("ampcheck.", *DISTRIBUTED))
