"""`torch.autocast` for an emulated device acts on the CPU.

On a machine without CUDA a region of `torch.autocast("cuda")` would switch itself off, and code that calls
`torch.is_autocast_enabled("cuda")`, such as `torch.amp.custom_fwd`, would see it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch

from ampcheck.autocast.state import nesting
from ampcheck.core.environment import quiet
from ampcheck.torchtools.patching import observed, replaced
from ampcheck.torchtools.regions import is_abandoned


class Redirection:
    """The regions of a device, which are entered for the CPU inside.

    clear: drops the cached casts of the emulation. `made_before` counts the regions that were entered, are off, and
    were made before.
    """

    def __init__(self, device: str, clear: Callable[[], None]) -> None:
        self.made_before = 0
        self._device, self._clear = device, clear
        self._arguments: WeakKeyDictionary[torch.autocast, tuple[object, ...]] = WeakKeyDictionary()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Redirect regions while the block runs."""
        module = torch.amp.autocast_mode
        with ExitStack() as stack:
            stack.callback(self._restore)  # last, with PyTorch's own functions
            stack.enter_context(replaced(module.autocast, "__init__", self._make_init))
            stack.enter_context(observed(module.autocast, "__enter__", self._enter))
            stack.enter_context(observed(module.autocast, "__exit__", self._leave))
            stack.enter_context(replaced(module, "_cast", self._make_cast))
            stack.enter_context(observed(torch, "clear_autocast_cache", self._cleared))
            yield

    def _make_init(self, original: Callable[..., object]) -> Callable[..., object]:
        device = self._device

        def __init__(  # noqa: N807
            region: torch.autocast,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            self._arguments[region] = (device_type, dtype, enabled, cache_enabled)
            if device_type in (device, "cpu"):
                dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
                device_type = "cpu"
            wide = device == "cuda" and device_type == "cpu" and enabled and dtype is torch.float32
            # The CPU refuses float32, with a warning; CUDA takes it.
            original(region, device_type, torch.float16 if wide else dtype, enabled, cache_enabled)
            if wide:
                region.fast_dtype = torch.float32

        return __init__

    def _enter(self, region: torch.autocast) -> Iterator[None]:
        device = self._device
        moved = device != "cpu" and region.device == device and region not in self._arguments
        if moved:
            self.made_before += not region._enabled
            region.device = "cpu"
        mirrored = region.device == "cpu" and device != "cpu"
        before = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) if mirrored else None
        region.__dict__.setdefault("_ampcheck_before", []).append((before, moved))
        yield
        if mirrored:
            torch.set_autocast_dtype(device, region.fast_dtype)
            torch.set_autocast_enabled(device, region._enabled)

    def _leave(self, region: torch.autocast, *_: object) -> Iterator[None]:
        yield
        stack = region.__dict__.get("_ampcheck_before")
        before, moved = stack.pop() if stack else (None, False)
        if before is not None and not is_abandoned(region):
            torch.set_autocast_enabled(self._device, before[0])
            torch.set_autocast_dtype(self._device, before[1])
        if moved:
            region.device = self._device
        if nesting() == 0:
            self._clear()

    def _make_cast(self, original: Callable[..., object]) -> Callable[..., object]:
        def cast(value: object, kind: str, dtype: torch.dtype) -> object:
            emulated = kind == self._device
            value = original(value, "cpu" if emulated else kind, dtype)
            return original(value, kind, dtype) if emulated else value  # what was placed there

        return cast

    def _cleared(self) -> Iterator[None]:
        yield
        self._clear()

    def _restore(self) -> None:
        """Let a region that is used later mean its own device again."""
        with quiet():  # that the device is not there
            for region, values in list(self._arguments.items()):
                torch.autocast.__init__(region, *values)  # type: ignore[arg-type]
