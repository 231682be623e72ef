"""The calls of ATen ops that the samples of OpInfo make, in float64: inputs for the properties of traits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from opinfo import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ampcheck.ops.traits import Traits, traits

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool)
SAMPLES, CALLS = 4, 6
"""Of each operator, and of each overload."""


def copied(value: Any) -> Any:
    """Copies of the tensors."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone() if t.layout is torch.strided else t, value)


@dataclass(frozen=True)
class Recorded:
    """A call as it was made: of what the op wrote, the arguments hold the values before."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def traits(self) -> Traits:
        return traits(self.op)

    def run(self, **replaced: Any) -> Any:
        """The result; replaced: arguments by position (`_0`)."""
        args = [replaced.get(f"_{i}", value) for i, value in enumerate(self.args)]
        return self.op(*copied(args), **copied(self.kwargs))

    def argument(self, name: str, default: Any) -> Any:
        names = [argument.name for argument in self.op._schema.arguments]
        return dict(zip(names, self.args, strict=False)).get(name, self.kwargs.get(name, default))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[torch._ops.OpOverload, list[Recorded]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and len(self.calls.setdefault(func, [])) < CALLS:
            self.calls[func].append(Recorded(func, copied(args), copied(kwargs)))
        return func(*args, **kwargs)


@cache
def calls_by_operator() -> Mapping[str, Mapping[torch._ops.OpOverload, list[Recorded]]]:
    """By the operator of OpInfo, in place as well: the calls that its samples make."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db():
            dtype = next((d for d in DTYPES if info.supports_dtype(d, "cpu")), None)
            if dtype is None or info.name.startswith("jiterator"):  # of CUDA alone
                continue
            recorder = _Recorder()
            for number, sample in enumerate(info.sample_inputs("cpu", dtype)):
                if number == SAMPLES:
                    break
                for function in (info.op, info.inplace_variant):
                    if function is None:
                        continue
                    with recorder, torch.random.fork_rng(devices=()):
                        try:
                            function(copied(sample.input), *copied(sample.args), **sample.kwargs)
                        except (RuntimeError, TypeError, ValueError, NotImplementedError):
                            continue  # a sample that broadcasts is refused in place
            found[info.full_name] = recorder.calls
    return found


def calls() -> Iterator[Recorded]:
    """All calls that can be made again on finite float64 values: nothing random, no views."""
    for by_op in calls_by_operator().values():
        for op, recorded in by_op.items():
            if not (traits(op).view or traits(op).random) and op.namespace == "aten":
                yield from filter(_is_finite, recorded)


def _is_finite(call: Recorded) -> bool:
    values = tree_leaves((call.args, dict(call.kwargs)))
    floats = [v for v in values if isinstance(v, float) or (isinstance(v, torch.Tensor) and v.is_floating_point())]
    return all(is_dense(v) if isinstance(v, torch.Tensor) else math.isfinite(v) for v in floats) and all(
        bool(v.isfinite().all()) for v in floats if isinstance(v, torch.Tensor)
    )


def is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype is torch.float64
