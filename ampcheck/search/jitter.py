"""float64 with the roundings of float32: what a kernel that computes in float32 inside may get wrong.

A 16-bit kernel computes in float32 and rounds once at its end. What is lost inside, by cancellation in `1 + erf(x)` or
in `x * scale - mean * scale`, differs from kernel to kernel. So the judge is run again with ops taken apart into
primitive ones (PyTorch's own decompositions), and each primitive result moved at random by a unit roundoff of float32:
stochastic arithmetic (Vignes, 1993; Parker, 1997). The range stays that of float64: overflow is no rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.numerics.stats import LOST
from ampcheck.torchtools.pytree import map_tensors

_EXACT = frozenset(
    f"aten::{name}" for name in "clone _to_copy copy_ neg abs where relu maximum minimum amax amin index gather".split()
)


class Jitter(TorchDispatchMode):
    """Move every floating result inside by one unit roundoff of float32, up or down.

    subnormal: move by half of this format's smallest subnormal instead, and only results that are subnormal in it and
    keep two bits there (see `LOST`): gradual underflow, which later ops may magnify. Inside an op, too: a norm keeps
    its mean in the format of its input.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int, subnormal: FloatFormat | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._subnormal = subnormal
        self.moved = False
        self._generator = torch.Generator().manual_seed(seed)
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        if not self._inside and (parts := _decomposition(func)) is not None:
            self._inside = True  # one level deep: what a decomposition calls is primitive enough
            try:
                with self:
                    return parts(*args, **kwargs)
            except (RuntimeError, NotImplementedError, TypeError):
                pass
            finally:
                self._inside = False
        out = func(*args, **kwargs)
        return out if func._schema.name in _EXACT else map_tensors(self._moved, out)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel() or tensor.layout is not torch.strided:
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=self._generator).to(tensor.device, tensor.dtype) * 2 - 1
        if self._subnormal is None:
            self.moved = True
            return tensor * (1 + format_of("float32").unit_roundoff * signs)
        half, size = self._subnormal.smallest_subnormal / 2, tensor.abs()
        below = (size < self._subnormal.smallest_normal) & (size * LOST >= half)
        self.moved = self.moved or bool(below.any())
        return tensor + half * signs * below


class Compounds(TorchDispatchMode):
    """Count the roundings inside ops that PyTorch itself makes of other ops (`logsumexp`), which round in between.

    They have no kernel of their own on the device; what they are made of is told by their decomposition.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roundings = 0
        self._key = torch.device(device).type.upper()
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        self.roundings += self._inside and not func.is_view and func._schema.name not in _EXACT
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        name: str = func.name()  # type: ignore[no-untyped-call]
        own = has(name, self._key) or func.is_view or func._schema.name in _EXACT
        compound = has(name, "CompositeExplicitAutograd") and not own
        if compound and not self._inside and (parts := _decomposition(func)) is not None:
            self._inside = True
            try:
                with self:
                    parts(*args, **kwargs)
            except (RuntimeError, NotImplementedError, TypeError):
                pass
            finally:
                self._inside = False
        return func(*args, **kwargs)


def _decomposition(func: torch._ops.OpOverload) -> Any:
    """How PyTorch takes an op apart; None where it does not, or where its table is not to be had."""
    try:
        from torch._decomp import decomposition_table
    except ImportError:
        return None
    return decomposition_table.get(func)
