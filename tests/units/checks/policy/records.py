"""Policies and calls that reached autocast, by hand."""

from __future__ import annotations

from typing import Any

from ampcheck.records.policy import BANNED, FP32, LOWER, OpCall, OpPolicy, Policy, PolicyCalls, Raised

BCE = "aten::binary_cross_entropy"


def policy(device: str = "cuda", torch: str = "2.13.0", **rules: str) -> Policy:
    """A policy that lowers mm and keeps exp in float32; CUDA's bans BCE."""
    ops = {"aten::mm": OpPolicy(LOWER), "aten::exp": OpPolicy(FP32)}
    if device == "cuda":
        ops[BCE] = OpPolicy(BANNED, raises="BCE is unsafe to autocast. Use the one with logits.")
    return Policy(device, torch, ("float16",), ops | {f"aten::{name}": OpPolicy(rule) for name, rule in rules.items()})


def called(op: str, passed: str = "float16", inputs: str = "float32", rule: str = LOWER, module: str = "net") -> OpCall:
    """A call on the third line of the model."""
    return OpCall(op, rule, inputs, passed, module, "model.py", 3)


def calls(*several: OpCall, device: str = "cuda", raised: Raised | None = None, **rules: str) -> PolicyCalls:
    """The calls of a model in one run under float16."""
    facts: dict[str, Any] = {"raised": raised}
    return PolicyCalls("model", device, "float16", policy(device, **rules), several, **facts)
