"""The table of rules, by the name of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ampcheck.facts.memory import finite
from ampcheck.ops.added import added_rules
from ampcheck.shadow.call import Call, Side, results_of
from ampcheck.torchtools.pytree import map_tensors

Rule: TypeAlias = "Callable[[Call, Side], Any]"

RULES: dict[str, Rule] = {}
"""Op names without overload; short for ATen ops."""

FOLLOWING: set[str] = set()
"""Ops whose rule takes a decision of the run, or its side of a kink; by the op itself *exact* takes its own."""

OWN: dict[str, Rule] = {}
"""Rules by which *exact* takes decisions of its own, of ops whose kernels for float64 compute in float32 inside."""


def rule(*names: str, follows: bool = False, own: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of ops. follows: it does so only to follow a decision of the run. own: it takes
    decisions of its own."""
    table = OWN if own else RULES

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in table, f"two rules for {name}"
            table[name] = function
        if follows:
            FOLLOWING.update(names)
        return function

    return register


def rule_of(name: str, namespace: str) -> Rule | None:
    """The rule of an op, if it has one; that of an op of another package may come from there."""
    return RULES.get(name) or (None if namespace == "aten" else added_rules().get(name))


def restart(call: Call, side: Side) -> Any:
    """Every result restarts from its real values: a decision, or a number that was drawn.

    Where these are not finite there is no decision to follow, and exact is not lost: an overflow must not heal by it.
    """
    for tensor in call.written:
        companion = side.of(tensor)
        companion.copy_(torch.where(finite(tensor), tensor.to(companion.dtype), companion))
    if call.written:
        return map_tensors(lambda tensor: None, call.out)  # written above
    if all(bool(finite(tensor).all()) for tensor in call.fresh):
        return map_tensors(lambda tensor: tensor.to(side.lift_dtype(tensor.dtype), copy=True), call.out)
    own = iter(results_of(side.run(call)))
    return map_tensors(lambda tensor: _where_finite(tensor, next(own)), call.out)


def _where_finite(real: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor | None:
    return None if own is None else torch.where(finite(real), real.to(own.dtype), own)
