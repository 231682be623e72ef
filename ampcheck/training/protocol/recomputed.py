"""Parameters inside reentrant checkpoints that cut their gradients off: none of the inputs requires a gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from ampcheck.core.run import Where
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.source import users_line


class CutGradients:
    """Finds the parameters of the modules that run in such checkpoints. places: by their ids, the line of the call."""

    def __init__(self) -> None:
        self.places: dict[int, Where] = {}

    def listening(self) -> AbstractContextManager[None]:
        """Look at the checkpoints inside."""
        return replaced(CheckpointFunction, "forward", partial(partial, self._forward))

    def _forward(
        self, original: Callable[..., object], ctx: object, function: object, preserve: object, *args: object
    ) -> object:
        """torch.utils.checkpoint runs the function without gradients, and once more in backward if an input has one."""
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            return original(ctx, function, preserve, *args)
        file, line = users_line(sys._getframe(1))

        def enter(module: torch.nn.Module, _: Any) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    self.places.setdefault(id(parameter), Where("forward", file=file, line=line))

        hook = register_module_forward_pre_hook(enter)
        try:
            return original(ctx, function, preserve, *args)
        finally:
            hook.remove()
