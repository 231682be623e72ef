"""The check reduce-precision, on records. tests/training has sums and loops of several processes."""

from __future__ import annotations

from typing import Any

import pytest

from ampcheck.checks.training.reduce_precision import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.records.reductions import (
    CollectiveStats,
    DistributedStats,
    Drift,
    NormStats,
    ReductionStats,
    ReplicaStats,
    SumStats,
)

LIMITS = Limits()
PLACE = Where("backward", op="c10d::all_reduce", file="t.py", line=4)


def total(error: float = 0.01, **facts: Any) -> SumStats:
    return SumStats(
        **(
            {"kind": "sum", "format": "bfloat16", "addends": 64, "roundings": 64, "once": 0.001, "where": PLACE} | facts
        ),
        error=error,
    )


@pytest.mark.parametrize(
    ("facts", "verdict", "unit"),
    [
        ({}, Verdict.FAIL, "roundings"),
        ({"kind": "graph"}, Verdict.WARN, "roundings"),
        ({"overflowed": 3}, Verdict.FAIL, "elements"),
        ({"vanished": 0.5}, Verdict.FAIL, "share of the addends"),
    ],
)
def test_a_running_sum_in_16_bits(facts: dict[str, Any], verdict: Verdict, unit: str) -> None:
    (found,) = check(ReductionStats("loop", (total(**facts),)), LIMITS)
    assert (found.verdict, found.unit, found.where) == (verdict, unit, PLACE)


def test_a_total_norm_in_16_bits_warns_and_fails_where_such_are_combined() -> None:
    norm = NormStats("bfloat16", 3, False, 1.01, 1.0, where=PLACE)
    grouped = NormStats("bfloat16", 3, True, 1.01, 1.0, where=PLACE)
    verdicts = [f.verdict for f in check(ReductionStats("loop", norms=(norm, grouped)), LIMITS)]
    assert verdicts == [Verdict.WARN, Verdict.FAIL]


def test_sums_that_keep_their_digits_pass_and_none_is_a_skip() -> None:
    (clean,) = check(ReductionStats("loop", (total(0.001), total(format="float32"))), LIMITS)
    assert (clean.verdict, clean.seen, clean.observed, clean.limit) == (Verdict.PASS, 2, 1.0, 4.0)
    (nothing,) = check(ReductionStats("loop"), LIMITS)
    assert nothing.verdict is Verdict.SKIP


def ranks(*collectives: CollectiveStats, **facts: Any) -> list[Any]:
    return list(check(DistributedStats("loop", 2, 3, collectives=collectives, **facts), LIMITS))


def test_a_sum_over_ranks_in_16_bits() -> None:
    plain: dict[str, Any] = {"world": 2, "calls": 3, "elements": 8, "followed": 8, "once": 0.001}
    (lossy,) = ranks(CollectiveStats(PLACE, "bfloat16", error=0.01, **plain))
    assert (lossy.verdict, lossy.observed, "over 2 ranks adds up in bfloat16" in lossy.message) == (
        Verdict.FAIL,
        10,
        True,
    )
    over = CollectiveStats(PLACE, "float16", error=0.0, overflowed=2, **plain)
    assert [ranks(over, scaled=scaled)[0].verdict for scaled in (False, True)] == [Verdict.FAIL, Verdict.WARN]
    (wide,) = ranks(CollectiveStats(PLACE, "float32", error=0.01, **plain))
    assert (wide.verdict, wide.seen) == (Verdict.PASS, 3)
    assert ranks(skipped="one rank")[0].message == "one rank"


def test_replicas_that_part_fail_and_those_that_were_never_averaged_warn() -> None:
    drift = Drift(1, (0, 1), ("weight",), text="a rank left out a micro-batch")
    (parted,) = check(ReplicaStats("loop", drift, PLACE), LIMITS)
    assert (parted.verdict, parted.where, parted.observed) == (Verdict.FAIL, PLACE, 1)
    shards = ReplicaStats("loop", Drift(1, (0, 1), (), text="their rates differ"), PLACE)
    assert "from step 1 on their rates differ" in next(iter(check(shards, LIMITS))).message
    _, alone = ranks(drift=Drift(1, (0, 1), ("weight",), proven=False))
    assert (alone.verdict, "each rank trains on its own" in alone.message) == (Verdict.WARN, True)
    assert list(check(ReplicaStats("loop", Drift(1, (0, 1), (), scaler=True), PLACE), LIMITS)) == []
