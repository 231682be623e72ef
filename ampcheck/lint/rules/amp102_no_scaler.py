"""Requires: Training under float16 autocast scales its loss: gradients below 6e-8 are zero in float16, and
training stalls without a word.

Measured: A backward pass of a loss that is computed in a region of float16 autocast in the same function, in a file
without a gradient scaler. CUDA's regions cast to float16 unless they name another dtype.

Causes: An example for bfloat16 whose dtype was left out; autocast that was copied without the scaler.

Fix: torch.amp.GradScaler, or dtype=torch.bfloat16, which needs none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Source

_SCALED = re.compile(r"scaler|fabric|accelerator|deepspeed|loss_scale|scale_loss|\bmanual_backward", re.IGNORECASE)


def _read(source: Source) -> Iterator[Report]:
    if _SCALED.search(source.text):
        return
    for scope in source.scopes:
        halves = [call for call in scope.calls if any(region.is_half for region in call.regions)]
        for backward in scope.of("backward"):
            before = [call for call in halves if call.order < backward.order and not call.excludes(backward)]
            if before and not backward.node.args:
                region = before[-1].regions[-1]
                message = (
                    f"the loss is computed in float16 (autocast in line {region.call.lineno}) and is not scaled: "
                    "gradients below 6e-8 become zero"
                )
                yield Report(backward.line, message)
                break


RULE = Rule(
    Check("AMP102", "lint", __doc__),
    (("autocast",), (".backward(",)),
    _read,
    audit="ampcheck audit train.py:main --checks gradient-underflow,scaler-protocol",
)
