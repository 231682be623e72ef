"""The same step in a wider format: the shadow with which gradients and updates are compared.

A user's step has its model, optimizer and data in closures that nothing can copy. So the step itself runs, and a
dispatch mode computes every op in the wider format: below autocast and autograd, where the casts of both are ops like
any other. Parameters keep the format in which they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.training.loop import TrainingLoop

_CAST = torch.ops.aten._to_copy.default

_FLOAT32_ONLY = frozenset(("grad_scale", "found_inf", "lr", "state_steps"))
"""Arguments of fused optimizers that their kernels read as float32, whatever the parameters are."""

_WRITTEN_UNDECLARED = frozenset(("running_mean", "running_var"))
"""Arguments of batch norms, which write to them though their schemas do not declare it."""

_REFUSED = (RuntimeError, NotImplementedError, TypeError)


class UpcastMode(TorchDispatchMode):
    """Compute every floating op in `dtype` (float32 or float64), whatever its operands are.

    A cast to a narrower format returns the wider one. A write into an existing tensor (a parameter, a buffer) is
    rounded to that tensor's format; views stay views. `unseen` counts ops that the wider format lacks, which run
    unchanged or in float32. drew: whether random numbers were drawn, once the block of `shadowed` ends.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.unseen: dict[str, int] = {}
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func._schema.name.startswith("aten::_amp_"):  # the scaler's own, which are defined for float32 alone
            single = map_tensors(_scalar_to_float32, args)
            return _write_back(func, args, kwargs, single, kwargs, func(*single, **kwargs))
        arguments = func._schema.arguments
        aliases = [a.alias_info for a in arguments if a.alias_info is not None]
        if aliases and not any(alias.is_write for alias in aliases):
            return func(*args, **kwargs)  # a view
        if torch.Tag.nondeterministic_seeded in func.tags and not any(True for _ in tensors(args)):
            return self._upcast(func(*args, **kwargs))  # the numbers drawn depend on the requested dtype
        wide_args = tuple(self._argument(value, a.name) for value, a in zip(args, arguments, strict=False))
        wide_kwargs = {name: self._argument(value, name) for name, value in kwargs.items()}
        # The engine hands a leaf a gradient of the leaf's own format, and refuses another.
        to_leaf = func is _CAST and kwargs.get("dtype") is torch.float32 and torch._C._current_graph_task_id() != -1
        for name in ("dtype", "out_dtype"):
            if self._is_narrower(wide_kwargs.get(name)) and not to_leaf:
                wide_kwargs[name] = self.dtype
        if any(a.name == "half_to_float" for a in arguments):
            pairs = zip(arguments, wide_args, strict=False)
            wide_args = tuple(False if a.name == "half_to_float" else value for a, value in pairs)
            if "half_to_float" in wide_kwargs:
                wide_kwargs["half_to_float"] = False
        try:
            result = func(*wide_args, **wide_kwargs)
        except _REFUSED:
            result = _unwidened(func, args, kwargs)
            if result is None:
                raise
            self.unseen[str(func)] = self.unseen.get(str(func), 0) + 1
            return result
        if not aliases and "batch_norm" not in func._schema.name:
            return result
        return _write_back(func, args, kwargs, wide_args, wide_kwargs, result)

    def _argument(self, value: object, name: str) -> Any:
        return map_tensors(_scalar_to_float32 if name in _FLOAT32_ONLY else self._upcast, value)

    def _is_narrower(self, dtype: object) -> bool:
        return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize

    def _upcast(self, value: object) -> Any:
        if isinstance(value, torch.Tensor) and self._is_narrower(value.dtype):
            return value.to(self.dtype)
        return value


def _unwidened(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op that the wider format lacks: unchanged or in float32; None where that fails too."""
    with suppress(*_REFUSED):
        return func(*args, **kwargs)
    with suppress(*_REFUSED):
        single, named = map_tensors(lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        return _write_back(func, args, kwargs, single, named, func(*single, **named))
    return None


def _write_back(func: Any, args: Any, kwargs: Any, wide_args: Any, wide_kwargs: Any, result: Any) -> Any:
    """Write the wide copies that an op wrote to into its own arguments, and return those in place of the copies."""
    own: dict[int, torch.Tensor] = {}
    arguments = func._schema.arguments
    matched = [
        *zip(arguments, args, wide_args, strict=False),
        *((a, kwargs[a.name], wide_kwargs[a.name]) for a in arguments if a.name in kwargs),
    ]
    for argument, before, after in matched:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if not declared and argument.name not in _WRITTEN_UNDECLARED:
            continue
        pairs = zip(before, after, strict=True) if isinstance(before, (list, tuple)) else ((before, after),)
        for old, new in pairs:
            if isinstance(old, torch.Tensor):
                own[id(new)] = old
                if old is not new:
                    if old.shape != new.shape:
                        old.resize_(new.shape)
                    old.copy_(new)
    return map_tensors(lambda tensor: own.get(id(tensor), tensor), result)


def _scalar_to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.float64 and tensor.dim() == 0 else tensor


@contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN has no float64, and recurrent layers choose it above the dispatch mode."""
    enabled = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags sets TF32 as well, which warns on CPUs
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def shadowed(loop: TrainingLoop, dtype: torch.dtype) -> Iterator[UpcastMode]:
    """Run the steps inside in `dtype`. 16-bit tensors of modules, and their gradients, are float32 inside.

    Use it inside `loop.preserved()`, whose snapshot restores the casts. Random numbers are those of float32, see
    `EqualRandom`.
    """
    for _, module in loop.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                gradient, tensor.grad = tensor.grad, None
                tensor.data = tensor.data.float()
                tensor.grad = None if gradient is None else gradient.float()
    mode = UpcastMode(dtype)
    with ExitStack() as stack:
        stack.enter_context(_without_onednn())
        draws = stack.enter_context(EqualRandom())
        stack.enter_context(mode)
        try:
            yield mode
        finally:
            mode.drew = draws.drew
