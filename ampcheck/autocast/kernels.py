"""Autocast's rules as Python kernels, which replace PyTorch's own on the CPU's autocast key.

Each follows `aten/src/ATen/autocast_mode.h`: which tensors are eligible, what is cast, when a cast is cached, which
overload is called instead, and what raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ampcheck.autocast.cuda_devices import is_placed
from ampcheck.autocast.policy import number_of
from ampcheck.autocast.state import autocast_key
from ampcheck.records.policy import (
    APPEND_DTYPE,
    BANNED,
    FIXED,
    FP32,
    LOWER,
    PROMOTE,
    RECURRENT,
    SET_DTYPE,
    OpPolicy,
    release_of,
)
from ampcheck.torchtools.private import DispatchKey, DispatchKeySet, OpOverload, excluding_keys, keys_below
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.source import overload

Kernel = Callable[..., Any]

CallObserver: TypeAlias = Callable[[str, str, tuple[object, ...], dict[str, object], torch.dtype | None], None]
"""Called for each call that reaches autocast, before the op runs: with the op, its rule (empty: none), its arguments,
and what its eligible tensors are cast to (None: they stay)."""

_Report: TypeAlias = Callable[..., None]
"""Reports a call to the observer: its positional and keyword arguments, and the dtype that tensors are cast to."""

_KEY = DispatchKey.__members__[autocast_key("cpu")]
_EXCLUDED = DispatchKeySet(_KEY)


class CastCache:
    """The low-precision copies of leaf weights, kept until the outermost autocast region ends, as PyTorch does."""

    def __init__(self, *, with_grad: bool) -> None:
        """with_grad: a copy made under no_grad serves training later in the region, as `casts_with_grad` says."""
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._always_with_grad = with_grad

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`tensor.to(dtype)`, computed once for a leaf that requires a gradient."""
        plain = type(tensor) in (torch.nn.Parameter, torch.Tensor)  # no tensor that a compiler traces with
        leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view() and tensor.dtype is torch.float32
        bypass = self._always_with_grad and torch.is_inference_mode_enabled()
        if bypass or not (leaf and plain and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        copy: torch.Tensor | None = self._copies.get(tensor)  # type: ignore[no-untyped-call]
        if copy is None:
            with torch.set_grad_enabled(self._always_with_grad or torch.is_grad_enabled()):
                copy = self._copies[tensor] = tensor.to(dtype)
        return copy

    def clear(self) -> None:
        """Drop every copy."""
        self._copies.clear()


def casts_with_grad(release: str) -> bool:
    """Return whether a copy made under no_grad serves training later in the region in a PyTorch such as `2.13` or
    `2.13.0+cpu`: from 2.11 on (its issue 158232)."""
    return number_of(release_of(release)) >= (2, 11)


def eligible(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether autocast may cast it: a floating tensor of the CPU that is not float64."""
    return (
        isinstance(value, torch.Tensor)
        and (value.device.type == "cpu" or is_placed(value))
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _promoted(values: tuple[object, ...], low: torch.dtype) -> torch.dtype:
    """Return what `promote` casts to. Raises `RuntimeError` as PyTorch does for a 16-bit dtype that is not
    autocast's."""
    current = low
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not eligible(tensor):
                continue
            if torch.float32 in (current, tensor.dtype):
                current = torch.float32
            elif (current, tensor.dtype) != (low, low):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return current


def target_dtype(rule: str, values: tuple[object, ...], low: torch.dtype) -> torch.dtype | None:
    """Return what the rule casts eligible tensors among `values` to; None where it casts none."""
    if rule == PROMOTE:
        return _promoted(values, low)
    if rule.startswith(FIXED):
        dtype: torch.dtype = getattr(torch, rule.removeprefix(FIXED))
        return dtype
    return {LOWER: low, FP32: torch.float32}.get(rule)


def make_kernel(name: str, policy: OpPolicy | None, cache: CastCache, observe: CallObserver | None = None) -> Kernel:
    """The autocast kernel of an overload on the CPU. It takes the dispatch keys first (`with_keyset`).

    policy: its rule; None leaves the op alone, and the ops that it calls go through autocast.
    """
    if policy is None and observe is None:
        fallthrough: Kernel = torch.library.fallthrough_kernel
        return fallthrough
    op = overload(name)
    rule = policy.rule if policy is not None else ""

    def report(args: tuple[object, ...], kwargs: dict[str, object], dtype: torch.dtype | None = None) -> None:
        if observe is not None:
            observe(name, rule, args, kwargs, dtype)

    if policy is None:
        return _leaving(op, report)
    if rule == BANNED:
        return _banning(policy.raises or f"{name} is unsafe to autocast", report)
    if rule in (SET_DTYPE, APPEND_DTYPE):
        return _setting_dtype(op, policy, report)
    return _casting(op, policy, cache, report, recurrent=name in RECURRENT)


def _leaving(op: Any, report: _Report) -> Kernel:
    below = keys_below(_KEY)
    takes_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]

    def leave(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        report(args, kwargs)
        if any(takes and not isinstance(value, torch.Tensor) for takes, value in zip(takes_tensor, args)):  # noqa: B905
            with excluding_keys(_EXCLUDED):  # `x + 1`: Python sees a tensor as the number 1
                return op(*args, **kwargs)
        return op.redispatch(keys & below, *args, **kwargs)

    return leave


def _banning(message: str, report: _Report) -> Kernel:
    def ban(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        report(args, kwargs)
        raise RuntimeError(message)

    return ban


def _setting_dtype(op: Any, policy: OpPolicy, report: _Report) -> Kernel:
    with_dtype = _dtype_setter(op, policy.rule)
    called = overload(policy.redispatch) if policy.redispatch else op

    def set_dtype(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        report(args, kwargs)
        args, kwargs = with_dtype(args, kwargs)
        with excluding_keys(_EXCLUDED):
            return called(*args, **kwargs)

    return set_dtype


def _casting(op: Any, policy: OpPolicy, cache: CastCache, report: _Report, *, recurrent: bool) -> Kernel:
    def cast(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        low = torch.get_autocast_dtype("cpu")
        dtype = target_dtype(policy.rule, (*args, *kwargs.values()), low)
        report(args, kwargs, dtype)
        with excluding_keys(_EXCLUDED):
            positional = [_cast(value, dtype, low, cache) for value in args]
            named = {key: _cast(value, dtype, low, cache) for key, value in kwargs.items()} if kwargs else kwargs
            if recurrent and any(is_16_bit(tensor) for _, tensor in tensors(positional)):
                # 16 bits of storage and float32 inside, as in cuDNN.
                out = op(*map_tensors(float32_of_16_bit, positional), **named)
                return map_tensors(lambda t: t.to(low) if t.dtype is torch.float32 else t, out)
            out = op(*positional, **named)
            return _restored(out, args) if policy.restores else out

    return cast


def is_16_bit(tensor: torch.Tensor) -> bool:
    """Return whether it is float16 or bfloat16."""
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def float32_of_16_bit(tensor: torch.Tensor) -> torch.Tensor:
    """A float16 or bfloat16 tensor in float32; any other unchanged."""
    return tensor.float() if is_16_bit(tensor) else tensor


def _cast(value: Any, dtype: torch.dtype | None, low: torch.dtype, cache: CastCache) -> object:
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not eligible(value):
            return value
        return cache.cast(value, low) if dtype is low else value.to(dtype)
    if type(value) in (list, tuple) and value and isinstance(value[0], torch.Tensor):
        return [_cast(item, dtype, low, cache) for item in value]
    return value


def _restored(out: object, args: tuple[object, ...]) -> object:
    """A result cast back to the dtype of the first floating argument."""
    first = next((value.dtype for value in args if eligible(value)), None)
    return out if first is None else map_tensors(lambda t: t.to(first) if eligible(t) else t, out)


def _dtype_setter(
    op: OpOverload, rule: str
) -> Callable[[tuple[object, ...], dict[str, object]], tuple[tuple[object, ...], dict[str, object]]]:
    """Rules that leave the tensors alone and set the op's dtype argument to float32."""
    arguments = op._schema.arguments
    position = next((n for n, argument in enumerate(arguments) if argument.name == "dtype"), None)
    at = None if position is None or arguments[position].kwarg_only else position
    defaults = [argument.default_value for argument in arguments if not argument.kwarg_only]

    def with_dtype(args: tuple[Any, ...], kwargs: dict[str, object]) -> tuple[tuple[Any, ...], dict[str, object]]:
        first, filled = eligible(args[0]), list(args)
        if rule == APPEND_DTYPE:
            filled += defaults[len(filled) :]
            kwargs = {**kwargs, "dtype": torch.float32 if first else args[0].dtype}
        elif first and at is not None:
            filled += defaults[len(filled) : at + 1]
            filled[at] = torch.float32 if filled[at] is None else filled[at]
        elif first and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        return tuple(filled), kwargs

    return with_dtype
