"""Where the functions that a training loop calls are looked up: in classes, in PyTorch's modules, in the user's."""

from __future__ import annotations

import sys

import torch

from ampcheck.torchtools.source import is_users


def with_subclasses(kind: type) -> list[type]:
    """A class and all classes below it."""
    kinds = [kind]
    for known in kinds:
        below: list[type] = type.__subclasses__(known)
        kinds += [kind for kind in below if kind not in kinds]
    return kinds


def owners(name: str) -> list[object]:
    """Where a clipping function is looked up: PyTorch's own modules, and the user's that imported it by name."""
    original = getattr(torch.nn.utils, name, None)
    if original is None:
        return []
    users = (
        m for m in list(sys.modules.values()) if isinstance(f := getattr(m, "__file__", None), str) and is_users(f)
    )
    modules = (torch.nn.utils, torch.nn.utils.clip_grad, *users)
    return [module for module in modules if vars(module).get(name) is original]
