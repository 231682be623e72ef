"""Guesses from names: a file of Python does not know the types of its variables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampcheck.lint.source import Call, Scope

_SCALER = re.compile(r"(^|[._])(grad_?|loss_?|amp_?)?scaler\w*(\[.*\])?$", re.IGNORECASE)
_OPTIMIZER = re.compile(r"(^|[._])(\w*optimi[sz]er\w*|(\w+_)?opt(im)?|opt(im)?_\w{1,2})(\[.*\])?$", re.IGNORECASE)
_SCHEDULER = re.compile(r"(^|[._])\w*sched(uler)?\w*(\[.*\])?$", re.IGNORECASE)


def is_scaler(name: str) -> bool:
    """Return whether a variable is a gradient scaler, by its name."""
    return bool(_SCALER.search(name))


def is_optimizer(name: str) -> bool:
    """Return whether a variable is an optimizer, by its name."""
    return bool(_OPTIMIZER.search(name)) and not _SCHEDULER.search(name)


def is_scheduler(name: str) -> bool:
    """Return whether a variable is a scheduler of learning rates, by its name."""
    return bool(_SCHEDULER.search(name))


def scaled_passes(scope: Scope) -> Iterator[Call]:
    """The calls `scaler.scale(loss).backward()`, and those of a scaled loss that has a name."""
    scales = [call for call in scope.of("scale") if is_scaler(call.receiver)]
    for call in scope.of("backward"):
        if any(scale.order < call.order and not scale.excludes(call) for scale in scales):
            yield call


def steps_of_scalers(scope: Scope) -> Iterator[Call]:
    """The calls `scaler.step(optimizer)`."""
    return (call for call in scope.of("step") if is_scaler(call.receiver) and call.node.args)


def steps_of_optimizers(scope: Scope) -> Iterator[Call]:
    """The calls `optimizer.step()`."""
    return (call for call in scope.of("step") if is_optimizer(call.receiver))
