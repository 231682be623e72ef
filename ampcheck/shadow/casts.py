"""Casts to 16 bits that the code itself makes, in distinction from those of autocast."""

from __future__ import annotations

import linecache
import os
import re
from functools import lru_cache

import torch

from ampcheck.shadow.call import Call
from ampcheck.torchtools.private import state_of_caller

_WRITTEN = re.compile(r"\.\s*(half|bfloat16|to|type|type_as)\s*\(")


def is_own_cast(call: Call) -> bool:
    """Return whether a `_to_copy` of forward or of an update is such a cast. Under autocast the source line decides."""
    where = call.where
    if not call.fresh or not where.file or where.phase == "backward":
        return False
    widest = max([t.dtype.itemsize for t in call.inputs], default=0)
    if not call.fresh[0].dtype.itemsize <= 2 < widest:
        return False
    with state_of_caller():  # the state with which the op was called
        autocast = torch.is_autocast_enabled(call.fresh[0].device.type)
    return not autocast or _writes_a_cast(where.file, where.line)


@lru_cache(maxsize=4096)
def _writes_a_cast(file: str, line: int | None) -> bool:
    return _WRITTEN.search(linecache.getline(os.path.abspath(file), line or 0)) is not None
