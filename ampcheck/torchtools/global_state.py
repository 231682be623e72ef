"""The global state of PyTorch that changes what autocast and the kernels compute: read, compare, restore.

`ampcheck.torchtools.restore` restores it, with the rest of the process, after each public call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from ampcheck.torchtools.private import default_device
from ampcheck.torchtools.regions import abandoned_regions

Setting: TypeAlias = tuple[Callable[[], object], Callable[[Any], object]]
"""Functions that read a setting and that write it."""

UNREADABLE = "cannot be read: the old flags and fp32_precision are mixed"

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "privateuseone")
"""Device types whose autocast state is restored, where this PyTorch knows them."""

_NOT_COMPARED = "Inductor's deterministic mode"
"""`torch.use_deterministic_algorithms` sets it as well: restored, and reported as that setting alone."""

_NAMES = {
    "backends.cuda.matmul.allow_tf32": "TF32 in matmul",
    "backends.cudnn.allow_tf32": "TF32 in cuDNN",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "float16 reduced-precision reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "bfloat16 reduced-precision reduction",
    "backends.cuda.matmul.allow_fp16_accumulation": "float16 accumulation",
}

PRECISION = (
    *_NAMES,
    *("backends.fp32_precision", "backends.cuda.matmul.fp32_precision"),
    *(f"backends.cudnn.{part}.fp32_precision" for part in ("conv", "rnn")),
    *(f"backends.mkldnn.{part}.fp32_precision" for part in ("matmul", "conv", "rnn")),
)
"""Attributes below `torch` that change the precision of products. Those of PyTorch 2.9 and later are last, since the
old flags write these too, and are readable again once these are restored."""

KERNELS = (
    *(f"backends.cudnn.{name}" for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")),
    *("backends.mkldnn.enabled", "backends.mkldnn.deterministic", "utils.deterministic.fill_uninitialized_memory"),
)
"""Attributes below `torch` that choose kernels and fill what they leave."""

_OLD_FLAGS = ("float32 matmul precision", "TF32 in matmul", "TF32 in cuDNN")


def read_state() -> dict[str, object]:
    """Every setting by its name; `UNREADABLE` where PyTorch refuses to read it."""
    return {name: _read(read) for name, (read, _) in _settings().items()}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The settings that differ, each with its value before and after.

    One cause is named once: the old flags of matrix products and their `fp32_precision` show the same change.
    """
    pairs = {name: (old, after[name]) for name, old in before.items() if name != _NOT_COMPARED}
    differing = {name: pair for name, pair in pairs.items() if _meaning(pair[0]) != _meaning(pair[1])}
    refused = {name for name, pair in differing.items() if UNREADABLE in pair}
    newer = {name for name in differing if name.endswith("fp32_precision")}
    legible = {name for name in differing if name in _OLD_FLAGS} - refused
    doubled = newer if legible else refused if newer else set()
    return {name: pair for name, pair in differing.items() if name not in doubled}


def _meaning(value: object) -> object:
    """PyTorch turns `none` into `ieee` when a flag is set and restored; without a setting above, both mean float32."""
    return "ieee" if value == "none" else value


def restore_state(before: Mapping[str, object]) -> None:
    """Restore every setting that `read_state` read. One that PyTorch refuses to write stays unchanged."""
    settings, now = _settings(), read_state()
    for name, value in before.items():
        if value not in (now[name], UNREADABLE):
            with suppress(RuntimeError, ValueError):
                settings[name][1](value)


@contextmanager
def preserved_state(changes: dict[str, tuple[object, object]] | None = None) -> Iterator[None]:
    """Restore every setting, and grad mode, on leaving; well below a millisecond.

    changes: gets the settings that the block changed, with the values before and after, unless the block raises.
    """
    before, grad_before, completed = read_state(), torch.is_grad_enabled(), False
    try:
        with abandoned_regions():
            yield
        completed = True
    finally:
        after, grad_after = read_state(), torch.is_grad_enabled()
        torch.set_grad_enabled(grad_before)
        if after != before:
            restore_state(before)
        if completed and changes is not None:
            differing = changed(before, after)
            if grad_after is not grad_before:
                differing["grad mode"] = (grad_before, grad_after)
            changes.update((name, pair) for name, pair in differing.items() if name not in changes)


def nesting() -> int:
    """Return how many autocast regions this thread is in; at 0 the cached casts are dropped."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _read(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError:
        return UNREADABLE


@lru_cache(maxsize=1)
def _settings() -> dict[str, Setting]:
    """All settings, in the order in which they are restored: the nesting first, since leaving it clears the cache."""
    settings: dict[str, Setting] = {"autocast nesting depth": (nesting, _set_nesting)}
    for device in _devices():
        set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
        settings[f"autocast on {device}"] = (partial(torch.is_autocast_enabled, device), partial(set_enabled, device))
        settings[f"autocast dtype on {device}"] = (
            partial(torch.get_autocast_dtype, device),
            partial(set_dtype, device),
        )
    settings["autocast cache"] = (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    settings["default dtype"] = (torch.get_default_dtype, torch.set_default_dtype)
    settings["default device"] = (_default_device, _set_default_device)
    settings["deterministic algorithms"] = (_deterministic, torch.set_deterministic_debug_mode)
    settings[_NOT_COMPARED] = (_inductor_deterministic, _set_inductor_deterministic)
    settings["float32 matmul precision"] = (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    return settings | {_NAMES.get(path, f"torch.{path}"): value for path, value in flags_at(PRECISION).items()}


def flags_at(paths: Iterable[str]) -> dict[str, Setting]:
    """The attributes below `torch` that this PyTorch has, as settings."""
    found: dict[str, Setting] = {}
    for path in paths:
        owner, _, attribute = path.rpartition(".")
        with suppress(AttributeError):
            part = attrgetter(owner)(torch)
            found |= {path: setting(part, attribute)} if _has(part, attribute) else {}
    return found


def setting(owner: object, attribute: str) -> Setting:
    """An attribute as a setting."""
    return partial(getattr, owner, attribute), partial(setattr, owner, attribute)


@lru_cache(maxsize=1)
def _devices() -> tuple[str, ...]:
    return tuple(d for d in AUTOCAST_DEVICES if _read(partial(torch.get_autocast_dtype, d)) != UNREADABLE)


def _has(owner: object, attribute: str) -> bool:
    with suppress(RuntimeError):  # it exists and refuses to be read
        return hasattr(owner, attribute)
    return True


def _set_nesting(depth: int) -> None:
    while nesting() > depth:
        torch.autocast_decrement_nesting()
    while nesting() < depth:
        torch.autocast_increment_nesting()
    if depth == 0:
        torch.clear_autocast_cache()


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # PyTorch 2.6 after `torch.set_default_device(None)`
        return torch.device("cpu")
    except (AssertionError, RuntimeError):  # one that this machine lacks, of which it asks the current index
        chosen = default_device()
        return chosen if isinstance(chosen, torch.device) else torch.device("cpu")


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device == torch.device("cpu") else device)  # None: as if none was ever chosen
    chosen = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(chosen, "device_context", chosen) is None:  # with which PyTorch 2.6 cannot read the default device
        del chosen.device_context


_DETERMINISTIC = ("default", "warn", "error")
"""As `torch.set_deterministic_debug_mode` names them: off, on with warnings only, on."""


def _deterministic() -> str:
    return _DETERMINISTIC[torch.get_deterministic_debug_mode()]


def _inductor_deterministic() -> bool:
    """`torch._inductor.config.deterministic` (2.10); where Inductor is not imported, its later value."""
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        return os.environ.get("TORCHINDUCTOR_DETERMINISTIC") == "1"
    return bool(getattr(config, "deterministic", False))


def _set_inductor_deterministic(wanted: bool) -> None:
    config: Any = sys.modules.get("torch._inductor.config")
    if hasattr(config, "deterministic"):
        config.deterministic = wanted
