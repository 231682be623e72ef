"""Autocast's rules as Python kernels, to stand on the autocast key of the CPU in the place of PyTorch's own.

Each follows `aten/src/ATen/autocast_mode.h`: which tensors are eligible, what is cast, when a cast is cached, which
overload is called instead, and what raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ampcheck.autocast.policy import APPEND_DTYPE, BANNED, FIXED, FP32, LOWER, PROMOTE, SET_DTYPE, OpPolicy
from ampcheck.autocast.state import autocast_key, raw_autocast
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.source import op_name, overload

Kernel = Callable[..., Any]

RECURRENT = tuple(
    f"aten::{cell}.{form}" for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
)
"""Composites that end in cuDNN's fused layer on CUDA, whose autocast kernel casts everything to autocast's dtype
(`aten/src/ATen/cudnn/AutocastRNN.cpp`). On the CPU they end in other ops and have no float16 kernel."""


class CallObserver(Protocol):
    """Told of each call that reaches autocast, before the op runs."""

    def __call__(
        self, op: str, rule: str, args: tuple[Any, ...], kwargs: dict[str, Any], cast: torch.dtype | None
    ) -> None:
        """Of `op` under `rule` (empty: none), whose eligible tensors are cast to `cast` (None: they stay)."""


class CastCache:
    """The low-precision copies of leaf weights, kept until the outermost autocast region ends, as PyTorch does."""

    def __init__(self) -> None:
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._always_with_grad = _casts_with_grad()

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`tensor.to(dtype)`, made once for a leaf that requires a gradient."""
        plain = type(tensor) in (torch.nn.Parameter, torch.Tensor)  # not what a compiler traces with
        leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view() and tensor.dtype is torch.float32
        passing = self._always_with_grad and torch.is_inference_mode_enabled()
        if passing or not (leaf and plain and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        kept: torch.Tensor | None = self._kept.get(tensor)  # type: ignore[no-untyped-call]
        if kept is None:
            with torch.set_grad_enabled(self._always_with_grad or torch.is_grad_enabled()):
                kept = self._kept[tensor] = tensor.to(dtype)
        return kept

    def clear(self) -> None:
        """Forget every copy."""
        self._kept.clear()


@functools.cache
def _casts_with_grad() -> bool:
    """Whether a copy made under no_grad serves training later in the region: PyTorch mended that (its issue 158232)."""
    with torch.inference_mode(False), raw_autocast("cpu", torch.bfloat16):
        weight, plain = torch.zeros(1, 1, requires_grad=True, device="cpu"), torch.zeros(1, 1, device="cpu")
        with torch.no_grad():
            torch.mm(weight, plain)
        with torch.enable_grad():
            return torch.mm(weight, plain).requires_grad


def eligible(value: Any, device: str) -> bool:
    """Whether autocast may cast it: a floating tensor of the device that is not float64."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == device
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def widest(values: tuple[Any, ...], low: torch.dtype, device: str) -> torch.dtype:
    """What `promote` casts to. Raises `RuntimeError` as PyTorch does for a 16-bit dtype that is not autocast's."""
    current = low
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not eligible(tensor, device):
                continue
            if torch.float32 in (current, tensor.dtype):
                current = torch.float32
            elif (current, tensor.dtype) != (low, low):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return current


def target_dtype(rule: str, values: tuple[Any, ...], low: torch.dtype, device: str) -> torch.dtype | None:
    """What the rule casts eligible tensors among `values` to; None where they stay as they are."""
    if rule == LOWER:
        return low
    if rule == FP32:
        return torch.float32
    if rule == PROMOTE:
        return widest(values, low, device)
    if rule.startswith(FIXED):
        dtype: torch.dtype = getattr(torch, rule.removeprefix(FIXED))
        return dtype
    return None


def make_kernel(name: str, policy: OpPolicy | None, cache: CastCache, observe: CallObserver | None = None) -> Kernel:
    """The autocast kernel of an overload on the CPU. It takes the dispatch keys first (`with_keyset`).

    policy: its rule; None leaves the op alone, and what the op itself calls goes through autocast.
    """
    if policy is None and observe is None:
        nothing: Kernel = torch.library.fallthrough_kernel
        return nothing
    op = overload(name)
    host = autocast_key("cpu")
    here = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[host])
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.__members__[host])
    rule = policy.rule if policy is not None else ""
    restores = policy is not None and policy.restores

    if policy is None:
        takes_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]

        def leave(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if observe is not None:
                observe(name, rule, args, kwargs, None)
            if any(wanted and not isinstance(value, torch.Tensor) for wanted, value in zip(takes_tensor, args)):  # noqa: B905
                with torch._C._ExcludeDispatchKeyGuard(
                    here
                ):  # `x + 1`: the one is a tensor that Python sees as a number
                    return op(*args, **kwargs)
            return op.redispatch(keys & below, *args, **kwargs)

        return leave

    if rule == BANNED:

        def ban(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if observe is not None:
                observe(name, rule, args, kwargs, None)
            raise RuntimeError(policy.raises or f"{name} is unsafe to autocast")

        return ban

    if rule in (SET_DTYPE, APPEND_DTYPE):
        return _with_dtype(op, policy, here, observe)

    lower = rule == LOWER
    recurrent = name in RECURRENT

    def cast(keys: Any, *args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cpu")
        dtype = low if lower else target_dtype(rule, (*args, *kwargs.values()), low, "cpu")
        if observe is not None:
            observe(name, rule, args, kwargs, dtype)
        with torch._C._ExcludeDispatchKeyGuard(here):
            made = [_cast(value, dtype, low, cache) for value in args]
            named = {key: _cast(value, dtype, low, cache) for key, value in kwargs.items()} if kwargs else kwargs
            if recurrent and any(_is_short(tensor) for _, tensor in tensors(made)):
                return map_tensors(lambda t: t.to(low) if t.dtype is torch.float32 else t, op(*_widened(made), **named))
            out = op(*made, **named)
            return _restored(out, args) if restores else out

    return cast


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def _widened(values: Any) -> Any:
    """16 bits of storage and float32 inside, as cuDNN keeps them."""
    return map_tensors(lambda tensor: tensor.float() if _is_short(tensor) else tensor, values)


def _cast(value: Any, dtype: torch.dtype | None, low: torch.dtype, cache: CastCache) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not eligible(value, "cpu"):
            return value
        return cache.cast(value, low) if dtype is low else value.to(dtype)
    if type(value) in (list, tuple) and value and isinstance(value[0], torch.Tensor):
        return [_cast(item, dtype, low, cache) for item in value]
    return value


def _restored(out: Any, args: tuple[Any, ...]) -> Any:
    """A result cast back to the dtype of the first floating argument."""
    first = next((value.dtype for value in args if eligible(value, "cpu")), None)
    if first is None:
        return out
    if isinstance(out, torch.Tensor):
        return out.to(first) if eligible(out, "cpu") else out
    return type(out)(_restored(item, args) for item in out) if isinstance(out, (list, tuple)) else out


def _with_dtype(op: torch._ops.OpOverload, policy: OpPolicy, here: Any, observe: CallObserver | None) -> Kernel:
    """Rules that leave the tensors alone and ask the op for float32 through its dtype argument."""
    arguments = op._schema.arguments
    name, appends = op_name(op), policy.rule == APPEND_DTYPE
    called = overload(policy.redispatch) if policy.redispatch else op
    place = next((n for n, argument in enumerate(arguments) if argument.name == "dtype"), None)
    at = None if place is None or arguments[place].kwarg_only else place
    defaults = [argument.default_value for argument in arguments if not argument.kwarg_only]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if observe is not None:
            observe(name, policy.rule, args, kwargs, None)
        first = eligible(args[0], "cpu")
        given = list(args)
        if appends:
            given += defaults[len(given) :]
            kwargs = {**kwargs, "dtype": torch.float32 if first else args[0].dtype}
        elif first and at is not None:
            given += defaults[len(given) : at + 1]
            given[at] = torch.float32 if given[at] is None else given[at]
        elif first and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(here):
            return called(*given, **kwargs)

    return run
