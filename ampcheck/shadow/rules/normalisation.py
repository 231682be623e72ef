"""Softmax and normalisation."""

from __future__ import annotations

from typing import Any

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("_softmax", "_log_softmax")
def _softmax(call: Call, side: Side) -> Any:
    """A softmax that does not convert: its third argument is for float16 alone."""
    return call.op(side.of(call.args[0]), call.args[1], False)
