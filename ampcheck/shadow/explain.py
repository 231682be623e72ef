"""The way of an error, from the op that lost the digits to a tensor that is wrong."""

from __future__ import annotations

import linecache
import math

import torch

from ampcheck.facts.history import Step
from ampcheck.shadow.mode import Shadow
from ampcheck.shadow.norms import relative_error


def explain_error(shadow: Shadow, tensor: torch.Tensor) -> str:
    """The ops through which the error of a tensor came, first to last, a line each, as a traceback shows them.

    The first is at fault: its inputs were within their bounds. Each line has the relative error of the op's result. A
    tensor within its bound has one line that says so; so has one that the shadow has not seen.
    """
    if shadow.store.known(tensor) is None:
        return "the shadow has not seen this tensor: it was made outside of the block, or no op has read it"
    steps = trail_of(shadow, tensor)
    if not steps:
        return f"the tensor is within its bound: its relative error is {relative_error(tensor, shadow.store):.2g}"
    lines = ["the error began at the first of these ops and went through the others:"]
    for number, step in enumerate(steps):
        lines += _step(step, "lost here" if not number else "")
    return "\n".join(lines)


def trail_of(shadow: Shadow, tensor: torch.Tensor) -> list[Step]:
    """Return how the error of a tensor came about, from the op at fault on; empty for a tensor without fault."""
    companions = shadow.store.known(tensor)
    step = companions.trail if companions is not None else None
    steps: list[Step] = []
    while step is not None:
        steps.insert(0, step)
        step = step.before
    return steps


def _step(step: Step, mark: str) -> list[str]:
    error = "not finite" if math.isinf(step.error) else f"error {step.error:.2g}"
    where = step.where
    inside = f" in {where.module}" if where.module else ""
    head = f"  {where.file or '?'}:{where.line or '?'}, {where.phase}, {where.op}{inside}: {error}"
    source = linecache.getline(where.file, where.line or 0).strip()
    return [head, f"    {source}{'   <- ' + mark if mark else ''}"] if source else [head]
