"""Requires: A mask is filled with a number of the format that is masked: -1e9 lies beyond float16, whose
masked_fill raises, and whose sums become -inf, so that a row that is masked in all its places is NaN.

Measured: masked_fill, torch.where or torch.full with a literal below -65504 and a value that the function casts to
float16, or multiplies under float16 autocast. The last assignment of each name counts; a branch on a dtype is left
alone.

Causes: A constant of float32.

Fix: torch.finfo(x.dtype).min, or float("-inf") where no row is masked in all its places.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.dtypes import Dtypes
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Source, number_of

_LEAST = -65504.0
_FILLS = ("masked_fill", "masked_fill_", "where", "full", "full_like")


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        fills = [call for call in scope.of(*_FILLS) if source.is_torchs(call)]
        dtypes = Dtypes(source, scope) if fills else None
        for call in fills:
            keywords = [k.value for k in call.node.keywords if k.arg in ("value", "fill_value", "other")]
            for value in (*call.node.args[-2:], *keywords):
                number = number_of(value)
                if number is not None and number < _LEAST and dtypes is not None and dtypes.is_half(call):
                    message = f"{ast.unparse(value)} is beyond float16, whose least number is -65504"
                    yield Report(call.line, message)


RULE = Rule(
    Check("AMP110", "lint", __doc__),
    (("half()", "float16", "torch.half", "autocast"), ("masked_fill", "where(", "full")),
    _read,
    audit="ampcheck audit model.py:subject --dtype float16 --checks overflow",
    patterns=(r"-\s*(\d+(\.\d*)?e\+?\d|\d{5,})",),
)
