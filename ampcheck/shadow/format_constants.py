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
_SMALLEST = ("eps", "tiny", "resolution")
"""What differs between formats and is meant to be negligible. The largest number is a mask, or a range to be kept."""

_CONSTANTS = {
    constant: wide
    for low in (torch.finfo(torch.float16), torch.finfo(torch.bfloat16))
    for own, other in ((getattr(low, name), getattr(_WIDE, name)) for name in _SMALLEST)
    for constant, wide in ((own, other), (-own, -other), (1.0 - own, 1.0 - other), (own - 1.0, other - 1.0))
    if constant != wide
}


def wide_constant(number: float) -> float:
    """What the code of an op that runs would have in float32 in place of a number that it takes from its format."""
    return _CONSTANTS[number] if number in _CONSTANTS and _asks_formats() else number


def _asks_formats() -> bool:
    """Whether the innermost function of the user's code, or a function of PyTorch that it calls, reads a `finfo`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if "finfo" in frame.f_code.co_names:
            return True
        if is_users(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return False
