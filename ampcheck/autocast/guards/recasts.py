"""The calls whose dtypes autocast would have changed. Pure: no PyTorch runs here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ampcheck.autocast.guards.stats import Call, GuardStats
from ampcheck.autocast.policy import APPEND_DTYPE, FIXED, FP32, LOWER, PROMOTE, SET_DTYPE, Policy
from ampcheck.autocast.state import short
from ampcheck.ops.table import ROWS


def rule_of(policies: Mapping[str, Policy], policy: str, op: str) -> str:
    """The rule of an op, as seen below autocast; empty where autocast leaves it alone."""
    if policy not in policies:
        return ""
    rule = policies[policy].rule(op)
    above = ROWS.get(op.removeprefix("aten::"), {}).get("autocast", "")  # the op that autocast sees
    return rule or (policies[policy].rule(f"aten::{above}") if above else "")


def _expected_dtype(call: Call, rule: str) -> torch.dtype | None:
    """What autocast would have computed in; None where it would have changed nothing."""
    if not call.dtypes:
        return None
    if rule in (SET_DTYPE, APPEND_DTYPE):
        return None if call.dtype_argument or call.dtypes[0] is torch.float32 else torch.float32
    if rule == FP32 or (rule == PROMOTE and torch.float32 in call.dtypes):
        target: torch.dtype | None = torch.float32
    elif rule in (LOWER, PROMOTE):
        target = call.state.dtype
    else:
        target = getattr(torch, rule.removeprefix(FIXED)) if rule.startswith(FIXED) else None
    return target if any(dtype is not target for dtype in call.dtypes) else None


def calls_of(stats: GuardStats, how: str) -> list[tuple[Call, int]]:
    """The calls of one kind, and how often each was seen."""
    return [(call, count) for call, count in stats.calls.items() if call.how == how]


def recast(stats: GuardStats, how: str) -> Iterator[tuple[Call, int, torch.dtype]]:
    """The calls whose dtypes autocast would have changed, how often, and what to."""
    for call, count in calls_of(stats, how):
        dtype = _expected_dtype(call, rule_of(stats.policies, call.policy, call.plain_op))
        if dtype is not None:
            yield call, count, dtype


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """The dtypes in words, each once."""
    return " and ".join(dict.fromkeys(map(short, dtypes))) or "no float"
