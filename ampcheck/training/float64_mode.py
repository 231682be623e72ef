"""The same step in a wider format: the shadow against which gradients and updates are judged.

A user's step holds its model, optimizer and data in closures that nothing can copy. So the step itself runs, and a
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
"""Arguments of batch norms, which write to them though their schemas do not say so."""


class Widened(TorchDispatchMode):
    """Compute every floating op in `dtype` (float32 or float64), whatever its operands are.

    A cast to a narrower format gives the wider one. What is written into a tensor that exists (a parameter, a buffer)
    is rounded to that tensor's format; views stay views. `unseen` counts ops that the wider format does not have: they
    run as they are.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.unseen: dict[str, int] = {}
        self.widened = 0
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func._schema.name.startswith("aten::_amp_"):  # the scaler's own, which know float32 alone
            single = map_tensors(_single, args)
            return _written(func, args, kwargs, single, kwargs, func(*single, **kwargs))
        arguments = func._schema.arguments
        aliases = [a.alias_info for a in arguments if a.alias_info is not None]
        if aliases and not any(alias.is_write for alias in aliases):
            return func(*args, **kwargs)  # a view
        if torch.Tag.nondeterministic_seeded in func.tags and not any(True for _ in tensors(args)):
            return self._wide(func(*args, **kwargs))  # what is drawn follows the dtype that was asked for
        wide_args = tuple(self._given(one, a.name) for one, a in zip(args, arguments, strict=False))
        wide_kwargs = {name: self._given(one, name) for name, one in kwargs.items()}
        # The engine hands a leaf a gradient of the leaf's own format, and refuses another.
        to_leaf = func is _CAST and kwargs.get("dtype") is torch.float32 and torch._C._current_graph_task_id() != -1
        for name in ("dtype", "out_dtype"):
            if self._narrower(wide_kwargs.get(name)) and not to_leaf:
                wide_kwargs[name] = self.dtype
        named = {a.name for a in arguments}
        if "half_to_float" in named:
            pairs = zip(arguments, wide_args, strict=False)
            wide_args = tuple(False if a.name == "half_to_float" else value for a, value in pairs)
            if "half_to_float" in wide_kwargs:
                wide_kwargs["half_to_float"] = False
        try:
            result = func(*wide_args, **wide_kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            result = self._narrow(func, args, kwargs)
            if result is None:
                raise
            self.unseen[str(func)] = self.unseen.get(str(func), 0) + 1
            return result
        self.widened += 1
        if not aliases and "batch_norm" not in func._schema.name:
            return result
        return _written(func, args, kwargs, wide_args, wide_kwargs, result)

    def _narrow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives that the wider format does not have: as it is, or in float32; None where it fails too."""
        with suppress(RuntimeError, NotImplementedError, TypeError):
            return func(*args, **kwargs)
        with suppress(RuntimeError, NotImplementedError, TypeError):
            single, named = map_tensors(_float, (args, kwargs))
            return _written(func, args, kwargs, single, named, func(*single, **named))
        return None

    def _given(self, value: Any, name: str) -> Any:
        return map_tensors(_single if name in _FLOAT32_ONLY else self._wide, value)

    def _narrower(self, dtype: Any) -> bool:
        return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and self._narrower(value.dtype):
            return value.to(self.dtype)
        return value


def _written(func: Any, args: Any, kwargs: Any, wide_args: Any, wide_kwargs: Any, result: Any) -> Any:
    """Write what the wide twins became into the tensors that the op was given, and return those."""
    own: dict[int, torch.Tensor] = {}
    for argument, before, after in _matched(func, args, kwargs, wide_args, wide_kwargs):
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


def _single(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype is torch.float64 and value.dim() == 0 else value


def _float(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def _matched(func: Any, args: Any, kwargs: Any, wide_args: Any, wide_kwargs: Any) -> Iterator[tuple[Any, Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(arguments, args, wide_args, strict=False)
    for argument in arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name], wide_kwargs[argument.name]


@contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN has no float64, and recurrent layers choose it before any op is seen."""
    enabled = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags sets TF32 as well, which warns on CPUs
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def shadowed(loop: TrainingLoop, dtype: torch.dtype) -> Iterator[Widened]:
    """Run the steps inside in `dtype`. What a module stores in 16 bits is float32 inside, and so are its gradients.

    Use it inside `loop.preserved()`: what was cast is put back by its snapshot. Random numbers are those that are drawn
    in float32, see `EqualRandom`.
    """
    for _, module in loop.modules():
        for owned in (module._parameters, module._buffers):
            for tensor in owned.values():
                if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                    grad = tensor.grad
                    tensor.grad = None
                    tensor.data = tensor.data.float()
                    tensor.grad = None if grad is None else grad.float()
    mode = Widened(dtype)
    with ExitStack() as stack:
        stack.enter_context(_without_onednn())
        draws = stack.enter_context(EqualRandom())
        stack.enter_context(mode)
        try:
            yield mode
        finally:
            mode.drew = draws.drew
