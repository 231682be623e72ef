"""Requires: A mask is filled with a number of the format that is masked: -1e9 lies beyond float16, whose
masked_fill raises, and whose sums become -inf, so that a row that is masked in all its places is NaN.

Measured: masked_fill, torch.where or torch.full with a literal below -65504 in a function that uses float16 or
.half(), asks nowhere for torch.finfo and casts nothing to float32.

Causes: A constant of float32.

Fix: torch.finfo(x.dtype).min, or float("-inf") where no row is masked in all its places.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Scope, Source, number_of

_LEAST = -65504.0
_FILLS = {"masked_fill": 1, "masked_fill_": 1, "where": 2, "full": 1, "full_like": 1}
"""Functions that fill, and the place of the value among their arguments; `where` takes it in either of two places."""

_SURE = ("finfo", "1e4", "65504", "10000", ".float()", "torch.float32")
"""What a function has that has another value for float16, or masks in float32."""


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        if _in_half(source, scope):
            for call in scope.of(*_FILLS):
                values = [
                    *call.node.args[-2:],
                    *(k.value for k in call.node.keywords if k.arg in ("value", "fill_value")),
                ]
                for value in values:
                    number = number_of(value)
                    if number is not None and number < _LEAST:
                        message = f"{ast.unparse(value)} is beyond float16, whose least number is -65504"
                        yield Report(call.line, message)


def _in_half(source: Source, scope: Scope) -> bool:
    """Return whether a function casts to float16, never to float32, and has no other value for it."""
    text = source.text_of(scope.node) if not isinstance(scope.node, ast.Module) else ""
    casts = ".half()" in text or "torch.float16" in text or "torch.half" in text
    return casts and not any(part in text for part in _SURE)


RULE = Rule(
    Check("AMP110", "lint", __doc__),
    (("half()", "float16", "torch.half"), ("masked_fill", "where(", "full")),
    _read,
    audit="ampcheck audit model.py:subject --dtype float16 --checks overflow",
    patterns=(r"-\s*(\d+(\.\d*)?e\+?\d|\d{5,})",),
)
