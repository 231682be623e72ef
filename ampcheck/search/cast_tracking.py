"""What a model itself says of precision, seen from the judge: casts to 16 bits, and `torch.finfo` of its tensors.

A judge in float64 that obeys `x.half().exp()` overflows as the model does and finds nothing wrong; one that asks
`torch.finfo(x.dtype)` hears of float64, and computes another function than the one it judges.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LOW = (torch.float16, torch.bfloat16)
_FINFO = torch.finfo


class CastTracker(TorchDispatchMode):
    """Casts to 16 bits, and tensors made in them, have a wider dtype; `formats` holds what they were to have."""

    supports_higher_order_operators = True

    def __init__(self, to: torch.dtype = torch.float64) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._to = to
        self.formats: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LOW:
            self.formats.add(kwargs["dtype"])
            kwargs["dtype"] = self._to
        return func(*args, **kwargs)


class FormatFacts:
    """What a run in low precision asks of `torch.finfo` is answered to the judge as well.

    Only where all questions are about one dtype: otherwise nobody can tell which of them the judge repeats. torch's own
    questions get torch's own answers.
    """

    def __init__(self) -> None:
        self._asked: set[torch.dtype] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember what is asked inside."""
        self._asked = set()

        def note(dtype: torch.dtype) -> torch.dtype:
            self._asked.add(dtype)
            return dtype

        with _asking(note):
            yield

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Wider dtypes are told of the one that was asked about."""
        if len(self._asked) != 1:
            yield
            return
        (low,) = self._asked
        with _asking(lambda dtype: low if dtype.itemsize > low.itemsize else dtype):
            yield


@contextmanager
def _asking(answer: Callable[[torch.dtype], torch.dtype]) -> Iterator[None]:
    """`torch.finfo(dtype)` in the user's code is `torch.finfo(answer(dtype))`."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, _FINFO)

        def __call__(cls, *dtype: torch.dtype) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            mine = caller.partition(".")[0] not in ("torch", "ampcheck")
            return _FINFO(*map(answer, dtype) if mine else dtype)

    before = torch.finfo
    torch.finfo = Kind("finfo", (), {})  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.finfo = before  # type: ignore[misc]
