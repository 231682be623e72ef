"""Numbers that code takes from the format it runs in, as `torch.finfo(x.dtype).eps`.

In float32 the same code takes another number: the companions do as well, so that an eps of 0.0078, which is bfloat16's,
is a difference to be judged and no constant that they share. The same number in code that reads no `finfo` is a choice.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from ampcheck.torchtools.source import is_users

_WIDE = torch.finfo(torch.float32)
_SMALLEST = {"eps": ("eps",), "tiny": ("tiny", "smallest_normal")}
"""Constants that differ between formats and are meant to be negligible, with the names by which code reads them. The
largest number is a mask, or a range to be kept; a resolution is a round number that is chosen for other reasons,
too."""

_CONSTANTS = {
    constant: (wide, names)
    for low in (torch.finfo(torch.float16), torch.finfo(torch.bfloat16))
    for own, other, names in ((getattr(low, name), getattr(_WIDE, name), names) for name, names in _SMALLEST.items())
    for constant, wide in ((own, other), (-own, -other), (1.0 - own, 1.0 - other), (own - 1.0, other - 1.0))
    if constant != wide
}


def wide_constant(number: float) -> float:
    """Return what the code of an op that runs would have in float32 in place of a number that it takes from its
    format."""
    wide, names = _CONSTANTS.get(number, (number, ()))
    return wide if names and _asks_formats(names) else number


def _asks_formats(names: tuple[str, ...]) -> bool:
    """Return whether the innermost function of the user's code, or a function of PyTorch that it calls, reads `finfo`
    and an attribute of such a name."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        read = frame.f_code.co_names
        if "finfo" in read and any(name in read for name in names):
            return True
        if is_users(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return False
