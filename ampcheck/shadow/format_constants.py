"""Numbers that code takes from the format it runs in, as `torch.finfo(x.dtype).eps`.

In float32 the same code takes another number: the companions do as well, so that an eps of 0.0078, which is bfloat16's,
is a difference to be judged and not a constant that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampcheck.torchtools.patching import replaced

_SMALLEST = frozenset(("eps", "tiny", "smallest_normal", "resolution"))
"""What differs between formats and is meant to be negligible. The largest number is a mask, or a range to be kept."""


@contextmanager
def watched_formats(constants: dict[float, float]) -> Iterator[None]:
    """Let `constants` map each number that the code takes from a format of 16 bits to that of float32."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        wide = original(torch.float32)

        class Format:
            """A `torch.finfo` that notes what is read of it."""

            def __init__(self, info: Any) -> None:
                self._info = info

            def __getattr__(self, name: str) -> Any:
                value = getattr(self._info, name)
                if name in _SMALLEST:
                    own = getattr(wide, name)
                    constants.update({value: own, 1.0 - value: 1.0 - own, -value: -own, value - 1.0: own - 1.0})
                return value

            def __repr__(self) -> str:
                return repr(self._info)

        def finfo(*args: Any, **kwargs: Any) -> Any:
            info = original(*args, **kwargs)
            return Format(info) if info.bits <= 16 else info

        return finfo

    with replaced(torch, "finfo", make):
        yield
