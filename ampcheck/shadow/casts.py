"""Casts to 16 bits that the code itself makes, in distinction from those of autocast."""

from __future__ import annotations

import linecache
import os
import re
import sys
from functools import lru_cache

import torch

from ampcheck.shadow.call import Call
from ampcheck.shadow.companions import CompanionStore

_LOST = 0.01
"""The share of an imaginary part from which it is no rounding."""

_WRITTEN = re.compile(r"\.\s*(half|bfloat16|to|type|type_as)\s*\(")


def is_own_cast(call: Call) -> bool:
    """Whether an op that ran in forward or in an update is such a cast. Under autocast the source line decides."""
    where = call.where
    if call.name != "_to_copy" or not call.fresh or not where.file or where.phase == "backward":
        return False
    widest = max((t.dtype.itemsize for t in call.inputs), default=0)
    if not call.fresh[0].dtype.itemsize <= 2 < widest:
        return False
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # the state with which the op was called
        autocast = torch.is_autocast_enabled(call.fresh[0].device.type)
    return not autocast or _writes_a_cast(where.file, where.line)


def discards_imaginary(call: Call, store: CompanionStore) -> float:
    """The imaginary part of complex data that a cast to a real dtype loses, relative to the whole; 0 for all else.

    Data are parameters, buffers and inputs. What a run computes, as by an inverse FFT, may be real but for rounding.
    """
    if call.name != "_to_copy" or not (call.fresh and call.inputs):
        return 0.0
    if not call.inputs[0].is_complex() or call.fresh[0].is_complex():
        return 0.0
    data = not call.before[0].written or isinstance(call.inputs[0], torch.nn.Parameter) or _is_in_module_to()
    exact = store.exact(call.inputs[0])
    share = float(torch.linalg.vector_norm(exact.imag) / torch.linalg.vector_norm(exact).clamp_min(1e-300))
    return share if data and share > _LOST else 0.0


def _is_in_module_to() -> bool:
    """Whether a module converts its parameters and buffers."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is torch.nn.Module._apply.__code__:
            return True
    return False


@lru_cache(maxsize=4096)
def _writes_a_cast(file: str, line: int | None) -> bool:
    return _WRITTEN.search(linecache.getline(os.path.abspath(file), line or 0)) is not None
