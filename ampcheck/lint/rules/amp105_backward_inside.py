"""Requires: Backward passes and steps of optimizers are outside of autocast regions: PyTorch runs a backward op in the
dtype of its forward op anyway, and what autocast casts besides (gradient penalties, updates, their norms) loses digits.

Measured: A call of backward without arguments, of scaler.step or of the step of an optimizer within a region of
autocast that no literal switches off.

Causes: One indentation too many.

Fix: End the region after the loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.names import is_optimizer, is_scaler
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Call, Scope, Source


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        for call in scope.of("backward", "step"):
            if call.regions and all(region.enabled for region in call.regions) and _is_one(scope, call):
                what = "the backward pass" if call.method == "backward" else f"{call.receiver}.step"
                yield Report(
                    call.line, f"{what} runs inside the autocast region of line {call.regions[-1].call.lineno}"
                )


def _is_one(scope: Scope, call: Call) -> bool:
    if call.method == "step":
        return is_optimizer(call.receiver) or is_scaler(call.receiver)
    return "loss" in call.receiver.lower() or is_scaler(call.receiver.partition(".")[0])


RULE = Rule(
    Check("AMP105", "lint", __doc__),
    (("autocast",), (".backward(", ".step(")),
    _read,
    fails=False,
    audit="ampcheck audit train.py:main --checks autocast-scope",
)
