"""Where the functions are that a recorder of a training loop replaces."""

from __future__ import annotations

import sys

import torch

from ampcheck.torchtools.source import is_users


def with_subclasses(kind: type) -> list[type]:
    """A class and all classes below it."""
    direct: list[type] = type.__subclasses__(kind)
    return list(dict.fromkeys((kind, *(known for part in direct for known in with_subclasses(part)))))


def modules_with(name: str) -> list[object]:
    """Where a function of `torch.nn.utils` is looked up: PyTorch's own modules, and the user's that imported it."""
    original = getattr(torch.nn.utils, name, None)
    if original is None:
        return []
    own = (torch.nn.utils, torch.nn.utils.clip_grad)
    # Thousands of modules are loaded, few import the function: where a file lies is asked of those alone.
    importing = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is original]
    users = (m for m in importing if isinstance(file := getattr(m, "__file__", None), str) and is_users(file))
    return [*(module for module in own if vars(module).get(name) is original), *users]
