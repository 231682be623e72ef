"""What a guard recorded, by hand."""

from __future__ import annotations

from typing import Any

from ampcheck.core.limits import Limits
from ampcheck.core.run import Where
from ampcheck.records.autocast import Call, GuardStats, State

LIMITS = Limits()
HALF, OFF = State("cpu", "float16"), State("cpu", None)
PLACE = Where("forward", op="aten::mm", file="model.py", line=3)


def call(how: str, *dtypes: str, **facts: Any) -> Call:
    """A call of mm under float16, which autocast would have cast to it."""
    plain: dict[str, Any] = {"rule": "lower_precision", "expected": "float16"}
    return Call(how, "aten::mm", "aten::mm", "cpu", HALF, dtypes, False, PLACE, **(plain | facts))


def block(*calls: Call, **facts: Any) -> GuardStats:
    """A block that made these calls, once each."""
    return GuardStats("block", **({"settings": 20, "changed": {}, "calls": dict.fromkeys(calls, 1)} | facts))
