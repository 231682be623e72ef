"""The circumstances in which `--ampcheck-watch` runs a test: autocast around it, or its models in float16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from ampcheck.autocast.cuda_stand_in import is_here
from ampcheck.autocast.emulate import emulate
from ampcheck.autocast.state import nesting, raw_autocast
from ampcheck.stream.calls import close_raised_steps, subscribed
from ampcheck.torchtools.global_state import AUTOCAST_DEVICES
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.private import without_modes

HALF = "half"
"""The dtype that stands for models in float16 without autocast."""


class Circumstances:
    """dtype: of autocast, or `HALF`. device: of the autocast policy; emulated where this machine has none.

    A backward pass and an optimizer step inside run without autocast,
    as in a loop that uses it well, unless the test has opened a region of its own; casts of weights are not kept, which
    may change meanwhile.
    """

    def __init__(self, dtype: str, device: str) -> None:
        self._half = dtype == HALF
        self._dtype = torch.float16 if self._half else getattr(torch, dtype)
        self._device = device.partition(":")[0]
        self._depth = 0
        self._enabled: list[str] = []

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enter this before a watch begins, which then sees steps and backward passes as they run here."""
        with ExitStack() as stack:
            if self._device != "cpu" and not is_here(self._device):
                stack.enter_context(emulate(self._device, None if self._half else self._dtype))
            elif not self._half:
                for device in {"cpu", self._device}:
                    stack.enter_context(raw_autocast(device, self._dtype))
            kept = torch.is_autocast_cache_enabled()
            stack.callback(torch.set_autocast_cache_enabled, kept)
            torch.set_autocast_cache_enabled(kept and self._half)
            self._depth = nesting()
            self._enabled = [device for device in AUTOCAST_DEVICES if _is_enabled(device)]
            stack.enter_context(subscribed(optimizer_step=self._without_autocast, backward=self._without_autocast))
            yield

    @contextmanager
    def within(self) -> Iterator[None]:
        """Enter this inside the watch: it then sees the casts of models."""
        try:
            with models_in(self._dtype) if self._half else nullcontext():
                yield
        finally:
            close_raised_steps()  # they have left autocast off

    def _without_autocast(self, *_: object, **__: object) -> Iterator[None]:
        """Switch our autocast off in this thread; a region that is open inside of ours is the test's own."""
        ours = self._enabled if nesting() == self._depth else []
        switched = [device for device in ours if _is_enabled(device)]
        for device in switched:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device in switched:
                torch.set_autocast_enabled(device, True)


def _is_enabled(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # this PyTorch knows no such device
        return False


@contextmanager
def models_in(dtype: torch.dtype) -> Iterator[None]:
    """The outermost modules that are called, and their inputs, are cast from float32; afterwards weights are float32
    again, which may belong to a fixture of other tests."""
    cast: list[tuple[torch.Tensor, torch.Tensor]] = []
    depth = 0

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth or isinstance(module, torch.jit.ScriptModule):
                return original(module, *args, **kwargs)
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.dtype is torch.float32:
                    cast.append((tensor, tensor.data))
                    _set_data(tensor, tensor.data.to(dtype))
            args, kwargs = _cast_inputs((args, kwargs), dtype)
            depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth -= 1

        return call

    try:
        with replaced(torch.nn.Module, "__call__", make):
            yield
    finally:
        with without_modes():  # the watch would judge what is cast here for a comparison as the test's own
            for tensor, before in cast:
                if tensor.dtype is dtype:
                    unchanged = torch.equal(tensor.data, before.to(dtype))
                    _set_data(tensor, before if unchanged else tensor.data.float())


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    gradient, tensor.grad = tensor.grad, None
    tensor.data = data
    tensor.grad = None if gradient is None else gradient.to(data.dtype)


def _cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is torch.float32 else value
    if type(value) in (list, tuple):
        return type(value)(_cast_inputs(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast_inputs(item, dtype) for key, item in value.items()}
    return value
