"""Casts that autocast would have made in the calls that a guard recorded. No PyTorch runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ampcheck.ops.table import ROWS
from ampcheck.records.autocast import Call
from ampcheck.records.policy import APPEND_DTYPE, BANNED, FIXED, FP32, LOWER, PROMOTE, SET_DTYPE, Policy


def rule_of(policies: Mapping[str, Policy], policy: str, op: str) -> str:
    """The rule of an op, as seen below autocast; empty where autocast leaves it alone."""
    if policy not in policies:
        return ""
    rule = policies[policy].rule(op)
    above = ROWS.get(op.removeprefix("aten::"), {}).get("autocast", "")  # the op that autocast sees
    return rule or (policies[policy].rule(f"aten::{above}") if above else "")


def with_rule(call: Call, policies: Mapping[str, Policy]) -> Call:
    """The call with its rule, and the dtype that autocast would have cast to."""
    rule = rule_of(policies, call.policy, call.plain_op)
    return replace(call, rule=rule, expected=_expected_dtype(call, rule))


def _expected_dtype(call: Call, rule: str) -> str:
    if not call.dtypes:
        return ""
    if rule in (SET_DTYPE, APPEND_DTYPE):
        return "" if call.dtype_argument or call.dtypes[0] == "float32" else "float32"
    if rule == FP32 or (rule == PROMOTE and "float32" in call.dtypes):
        target = "float32"
    elif rule in (LOWER, PROMOTE):
        target = call.state.dtype or ""
    else:
        target = rule.removeprefix(FIXED) if rule.startswith(FIXED) else ""
    return target if {*call.dtypes} != {target} else ""


def banned_by(policy: Policy, message: str) -> list[str]:
    """The ops that a policy bans with this message, which is all that is seen of them: autocast raises first."""
    bans = ((op, facts.raises.strip() or f"{op} is unsafe to autocast") for op, facts in policy.ops.items())
    return [op for op, text in bans if policy.rule(op) == BANNED and message.startswith(text)]
