"""Requires: No binary cross-entropy of probabilities under autocast: on CUDA PyTorch refuses it, since a float16
probability near one leaves nothing of log(1 - p).

Measured: F.binary_cross_entropy, or a loss that the file makes as nn.BCELoss(), called inside an autocast region that
is on.

Causes: sigmoid and BCELoss of float32 code.

Fix: F.binary_cross_entropy_with_logits, or nn.BCEWithLogitsLoss, of what goes into the sigmoid.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.core.syntax import dotted
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Source

_FUNCTION, _MODULE = "torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"


def _read(source: Source) -> Iterator[Report]:
    losses = {
        name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if source.resolve(node.value.func) == _MODULE
        for name in map(dotted, node.targets)
        if name
    }
    for scope in source.scopes:
        for call in scope.calls:
            on = call.regions and all(region.certain for region in call.regions)
            if on and (call.name == _FUNCTION or dotted(call.node.func) in losses):
                where = f"inside the autocast region of line {call.regions[-1].call.lineno}"
                yield Report(call.line, f"{call.method} takes probabilities {where}: PyTorch raises on CUDA")


RULE = Rule(
    Check("AMP114", "lint", __doc__),
    (("autocast",), ("binary_cross_entropy", "BCELoss")),
    _read,
    audit="ampcheck audit train.py:main",
)
