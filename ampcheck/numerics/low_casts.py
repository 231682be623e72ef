"""Casts to 16 bits that a model makes itself, and the exceptions that they lead to."""

from __future__ import annotations

import re

from torch.utils.weak import WeakTensorKeyDictionary

from ampcheck.core.errors import brief
from ampcheck.core.run import Where
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.trace import OpEvent

_NAMES_DTYPES = re.compile(r"\b(c10::)?(half|bfloat16|float16)\b|same dtype|dtype mismatch|same type", re.IGNORECASE)


class LowCasts:
    """An observer of `ampcheck.torchtools.trace.Trace` that follows 16-bit tensors back to the cast they come from."""

    def __init__(self) -> None:
        self._casts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._operand: Where | None = None
        self._latest: Where | None = None

    def before(self, op: object, args: object, kwargs: object) -> None:
        """Remember the cast behind the operands: an op that raises is not reported to `after`."""
        self._operand = self._cast_of((args, kwargs))

    def after(self, event: OpEvent, op: object, args: object, kwargs: object, out: object, held: object) -> None:
        """Note a cast, or pass the cast of the operands on to the results of 16 bits."""
        operand, self._operand = self._operand, None
        low = [t for _, t in tensors(out) if t.is_floating_point() and t.dtype.itemsize == 2]
        if low and event.op in ("aten::_to_copy", "aten::copy_") and operand is None:
            operand = self._latest = event.where
        for tensor in low if operand is not None else ():
            self._casts[tensor] = operand

    def of_failure(self, error: BaseException) -> Where | None:
        """The cast that led to `error`: that of an operand of the op that raised, else the last of the run.

        The last counts only where the message names a 16-bit dtype or asks for equal dtypes: composite ops compare
        dtypes before any op is dispatched.
        """
        return self._operand or (self._latest if _NAMES_DTYPES.search(brief(error)) else None)

    def _cast_of(self, value: object) -> Where | None:
        return next((self._casts[t] for _, t in tensors(value) if t in self._casts), None)
