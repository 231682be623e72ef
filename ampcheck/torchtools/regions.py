"""Regions of `torch.autocast` that a block enters and does not leave, as those of a generator that is never resumed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from ampcheck.torchtools.patching import observed


class _Abandoned:
    """Mixed into a region whose effect was undone from outside: when its own exit comes, it changes nothing.

    `__exit__` of `torch.autocast` lowers the nesting depth and writes what these properties return. It cannot be
    replaced: the `with` statement of a suspended frame has looked it up already.
    """

    device: str

    @property
    def prev(self) -> bool:
        return torch.is_autocast_enabled(self.device)

    @property
    def prev_fastdtype(self) -> torch.dtype:
        return torch.get_autocast_dtype(self.device)

    @property
    def prev_cache_enabled(self) -> bool:
        torch.autocast_increment_nesting()
        return torch.is_autocast_cache_enabled()

    def __enter__(self) -> object:
        self.__class__ = type(self).__bases__[1]
        return self.__enter__()


@contextmanager
def abandoned_regions() -> Iterator[None]:
    """Regions that this thread enters in the block and does not leave change nothing when they are left later.

    For a block after which the state of autocast is restored, nesting depth included. Such a region is still entered in
    a suspended generator or coroutine, or in a `@contextmanager` that was left open, and is left when that is closed or
    collected: the depth would fall below zero, and PyTorch would never drop its cached casts again.
    """
    thread, entered = threading.get_ident(), list[torch.autocast]()

    def enter(region: torch.autocast) -> Iterator[None]:
        yield
        if threading.get_ident() == thread:
            entered.append(region)

    def leave(region: torch.autocast, *_: object) -> None:
        if region in entered:  # in whichever thread
            entered.remove(region)

    try:
        with observed(torch.autocast, "__enter__", enter), observed(torch.autocast, "__exit__", leave):
            yield
    finally:
        for region in entered:
            if not is_abandoned(region):
                kind: type = type(region)
                region.__class__ = _abandoned(kind)


def is_abandoned(region: torch.autocast) -> bool:
    """Return whether the block that entered the region is over, and the exit of the region changes nothing."""
    return isinstance(region, _Abandoned)


@cache
def _abandoned(kind: type) -> type:
    return type(kind.__name__, (_Abandoned, kind), {})
