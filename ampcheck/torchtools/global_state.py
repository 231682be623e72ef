"""The switches of a process and thread that change what autocast and the kernels compute: read, compared, put back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

UNREADABLE = "cannot be read: the old flags and fp32_precision are mixed"

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "privateuseone")
"""Device types whose autocast state is kept, where this PyTorch knows them."""

_UNJUDGED = "Inductor's deterministic mode"
"""`torch.use_deterministic_algorithms` sets it as well: restored, and named by that switch alone."""

_OLD_FLAGS = ("float32 matmul precision", "TF32 in matmul", "TF32 in cuDNN")
Reader = Callable[[], Any]
Writer = Callable[[Any], None]


def read_state() -> dict[str, Any]:
    """Every switch by its name. What PyTorch refuses to read is `UNREADABLE`."""
    return {name: _read(read) for name, (read, _) in _switches().items()}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The switches that differ, each with its value before and after.

    One cause is named once: the old flags of matrix products and their `fp32_precision` show the same thing.
    """
    judged = {name: old for name, old in before.items() if name != _UNJUDGED}
    found = {name: (old, after[name]) for name, old in judged.items() if _meaning(after[name]) != _meaning(old)}
    refused = {name for name, pair in found.items() if UNREADABLE in pair}
    newer = {name for name in found if name.endswith("fp32_precision")}
    legible = {name for name in found if name in _OLD_FLAGS} - refused
    doubled = newer if legible else refused if newer else set()
    return {name: pair for name, pair in found.items() if name not in doubled}


def _meaning(value: Any) -> Any:
    """PyTorch turns `none` into `ieee` when a flag is set and put back; without a setting above, both mean float32."""
    return "ieee" if value == "none" else value


def restore_state(before: Mapping[str, Any]) -> None:
    """Put every switch back to what `read_state` saw. One that PyTorch does not let go stays as it is."""
    switches = _switches()
    now = read_state()
    for name, value in before.items():
        if value not in (now[name], UNREADABLE):
            with suppress(RuntimeError, ValueError):
                switches[name][1](before[name])


@contextmanager
def kept(changes: dict[str, tuple[Any, Any]] | None = None) -> Iterator[None]:
    """Restore every switch, and grad mode, on leaving; well below a millisecond.

    changes: gets what the block left changed, with the values before and after, unless the block raises.
    """
    before, gradients, ended = read_state(), torch.is_grad_enabled(), False
    try:
        yield
        ended = True
    finally:
        after, left = read_state(), torch.is_grad_enabled()
        torch.set_grad_enabled(gradients)
        if after != before:
            restore_state(before)
        if ended and changes is not None:
            found = changed(before, after) | ({"grad mode": (gradients, left)} if left is not gradients else {})
            changes.update((name, pair) for name, pair in found.items() if name not in changes)


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic mode with warnings inside, Inductor's own included."""
    mode, inductor = _deterministic(), _inductor_deterministic()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)  # which leaves Inductor's as it is
        _set_inductor_deterministic(inductor)


def _read(read: Reader) -> Any:
    try:
        return read()
    except RuntimeError:
        return UNREADABLE


def _switches() -> dict[str, tuple[Reader, Writer]]:
    """Name to reader and writer, in the order in which they are put back: the nesting first, as leaving clears."""
    found: dict[str, tuple[Reader, Writer]] = {"autocast nesting depth": (nesting, _set_nesting)}
    for device in _devices():
        found[f"autocast on {device}"] = (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        found[f"autocast dtype on {device}"] = (
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )
    found["autocast cache"] = (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    found["default dtype"] = (torch.get_default_dtype, torch.set_default_dtype)
    found["default device"] = (torch.get_default_device, _set_default_device)
    found["deterministic algorithms"] = (_deterministic, torch.set_deterministic_debug_mode)
    found[_UNJUDGED] = (_inductor_deterministic, _set_inductor_deterministic)
    found.update(_precision())
    return found


def nesting() -> int:
    """How many autocast regions this thread is in; at 0 the cached casts are dropped."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device == torch.device("cpu") else device)  # None: as if none was ever chosen


_known: list[tuple[str, ...]] = []


def _devices() -> tuple[str, ...]:
    if not _known:  # a property of the build
        _known.append(
            tuple(
                device for device in AUTOCAST_DEVICES if _read(partial(torch.get_autocast_dtype, device)) != UNREADABLE
            )
        )
    return _known[0]


def _precision() -> dict[str, tuple[Reader, Writer]]:
    """Those of matrix products and convolutions. Setting `fp32_precision` back makes the old flags readable again."""
    matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    found: dict[str, tuple[Reader, Writer]] = {}
    places: dict[str, Any] = {
        "torch.backends": torch.backends,
        "torch.backends.cuda.matmul": matmul,
        "torch.backends.cudnn.conv": getattr(cudnn, "conv", None),
        "torch.backends.cudnn.rnn": getattr(cudnn, "rnn", None),
        "torch.backends.mkldnn.matmul": getattr(mkldnn, "matmul", None),
        "torch.backends.mkldnn.conv": getattr(mkldnn, "conv", None),
        "torch.backends.mkldnn.rnn": getattr(mkldnn, "rnn", None),
    }
    found["float32 matmul precision"] = (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    old: dict[str, tuple[Any, str]] = {
        "TF32 in matmul": (matmul, "allow_tf32"),
        "TF32 in cuDNN": (cudnn, "allow_tf32"),
        "float16 reduced-precision reduction": (matmul, "allow_fp16_reduced_precision_reduction"),
        "bfloat16 reduced-precision reduction": (matmul, "allow_bf16_reduced_precision_reduction"),
        "float16 accumulation": (matmul, "allow_fp16_accumulation"),
    }
    for name, (owner, attribute) in old.items():
        if _has(owner, attribute):
            found[name] = _attribute(owner, attribute)
    for name, owner in places.items():  # PyTorch 2.9 and later; last, since the old flags write these too
        if owner is not None and _has(owner, "fp32_precision"):
            found[f"{name}.fp32_precision"] = _attribute(owner, "fp32_precision")
    return found


def _has(owner: Any, attribute: str) -> bool:
    try:
        getattr(owner, attribute)
    except AttributeError:
        return False
    except RuntimeError:  # it is there and refuses
        return True
    return True


def _attribute(owner: Any, attribute: str) -> tuple[Reader, Writer]:
    return (lambda: getattr(owner, attribute)), (lambda value: setattr(owner, attribute, value))


def _set_nesting(depth: int) -> None:
    while nesting() > depth:
        torch.autocast_decrement_nesting()
    while nesting() < depth:
        torch.autocast_increment_nesting()
    if depth == 0:
        torch.clear_autocast_cache()


_DETERMINISTIC = ("default", "warn", "error")
"""As `torch.set_deterministic_debug_mode` names them: off, on with warnings only, on."""


def _deterministic() -> str:
    return _DETERMINISTIC[torch.get_deterministic_debug_mode()]


def _inductor_deterministic() -> bool:
    """`torch._inductor.config.deterministic` (2.10); what it will be once Inductor is imported, where it is not yet."""
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        return os.environ.get("TORCHINDUCTOR_DETERMINISTIC") == "1"
    return bool(getattr(config, "deterministic", False))


def _set_inductor_deterministic(wanted: bool) -> None:
    config: Any = sys.modules.get("torch._inductor.config")
    if hasattr(config, "deterministic"):
        config.deterministic = wanted
