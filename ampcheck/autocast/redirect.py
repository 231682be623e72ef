"""`torch.autocast` for an emulated device, sent to the CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ampcheck.autocast.kernels import CastCache
from ampcheck.autocast.state import nesting


class Redirection:
    """`torch.autocast` for the emulated device acts on the CPU, and both devices show the same state.

    A region of `torch.autocast("cuda")` would switch itself off on a machine without CUDA, and code that asks
    `torch.is_autocast_enabled("cuda")`, such as `torch.amp.custom_fwd`, would be told so. `made_before` counts entries
    of regions that were made before the emulation and are off: PyTorch does not tell whether that was meant.
    """

    def __init__(self, device: str, cache: CastCache) -> None:
        self.device = device
        self.made_before = 0
        self._cache = cache
        self._asked: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Redirect while the block runs."""
        module, device = torch.amp.autocast_mode, self.device
        region = module.autocast
        held: list[tuple[Any, str]] = [(region, name) for name in ("__init__", "__enter__", "__exit__")]
        held += [(module, "_cast"), (torch, "clear_autocast_cache")]
        originals = [getattr(owner, name) for owner, name in held]
        original_init, original_enter, original_exit, original_cast, original_clear = originals

        @functools.wraps(original_init)
        def begin(
            self_: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            self._asked[self_] = (device_type, dtype, enabled, cache_enabled)
            if device_type in (device, "cpu"):
                dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
                device_type = "cpu"
            wide = device == "cuda" and device_type == "cpu" and enabled and dtype is torch.float32
            # The CPU refuses float32, with a warning; CUDA takes it.
            original_init(self_, device_type, torch.float16 if wide else dtype, enabled, cache_enabled)
            if wide:
                self_.fast_dtype = dtype

        @functools.wraps(original_enter)
        def enter(self_: Any) -> Any:
            moved = device != "cpu" and self_.device == device and self_ not in self._asked
            if moved:
                self.made_before += not self_._enabled
                self_.device = "cpu"
            mirrored = self_.device == "cpu" and device != "cpu"
            before = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) if mirrored else None
            self_.__dict__.setdefault("_ampcheck_before", []).append((before, moved))
            entered = original_enter(self_)
            if mirrored:
                torch.set_autocast_dtype(device, self_.fast_dtype)
                torch.set_autocast_enabled(device, self_._enabled)
            return entered

        @functools.wraps(original_exit)
        def leave(self_: Any, *exc: Any) -> Any:
            left = original_exit(self_, *exc)
            kept = self_.__dict__.get("_ampcheck_before")
            before, moved = kept.pop() if kept else (None, False)
            if before is not None:
                torch.set_autocast_enabled(device, before[0])
                torch.set_autocast_dtype(device, before[1])
            if moved:
                self_.device = device
            if nesting() == 0:
                self._cache.clear()
            return left

        @functools.wraps(original_cast)
        def cast(value: Any, device_type: str, dtype: Any) -> Any:
            return original_cast(value, "cpu" if device_type == device else device_type, dtype)

        @functools.wraps(original_clear)
        def clear() -> None:
            original_clear()
            self._cache.clear()

        for (owner, name), replacement in zip(held, (begin, enter, leave, cast, clear), strict=True):
            setattr(owner, name, replacement)
        try:
            yield
        finally:
            for (owner, name), original in zip(held, originals, strict=True):
                setattr(owner, name, original)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the device is not there
                for made, asked in list(self._asked.items()):
                    original_init(made, *asked)  # what was made inside and lives on means what it says again
