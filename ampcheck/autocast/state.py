"""Autocast's own state: which devices it knows, and how to set it for a device that is absent.

`torch.autocast("cuda")` switches itself off, with a warning, where PyTorch has no CUDA; `raw_autocast` does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from ampcheck.core.errors import UsageError
from ampcheck.torchtools.global_state import AUTOCAST_DEVICES
from ampcheck.torchtools.global_state import nesting as nesting
from ampcheck.torchtools.private import registrations, renamed_backend

KEYS = {device: {"privateuseone": "PrivateUse1"}.get(device, device.upper()) for device in AUTOCAST_DEVICES}
"""Device type to the suffix of its dispatch keys: `AutocastCUDA`, `AutogradCUDA`."""


def short(value: object) -> str:
    """`float16` of `torch.float16`; any other value as text."""
    return str(value).removeprefix("torch.")


@cache
def devices() -> tuple[str, ...]:
    """The device types for which this PyTorch has an autocast key."""
    return tuple(device for device in KEYS if _kernels(device) is not None)


def registered(device: str) -> tuple[str, ...]:
    """Every overload with an autocast kernel on a device type, of any namespace, custom ops included."""
    return tuple(sorted(_kernels(device) or ())) if device in KEYS else ()


def device_type(device: str | torch.device) -> str:
    """The type of a device that autocast knows. Raises `UsageError` naming those that there are."""
    text = str(device)
    kind = text.partition(":")[0]
    if kind == renamed_backend():
        kind = "privateuseone"
    if kind not in devices():
        raise UsageError(
            f"autocast has no device {text!r} in PyTorch {torch.__version__}; it has {', '.join(devices())}"
        )
    return kind


@cache
def autocast_key(device: str) -> str:
    """The name of autocast's dispatch key on a device type, such as `AutocastCUDA`."""
    return f"Autocast{KEYS[device]}"


def _kernels(device: str) -> list[str] | None:
    """The overloads with an autocast kernel; None where this PyTorch has no such key."""
    with suppress(RuntimeError):
        names: list[str] = registrations(autocast_key(device))
        return names
    return None


@contextmanager
def raw_autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast on for a device type, whether or not such a device is there and supports `dtype`."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_cache_enabled(True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])
