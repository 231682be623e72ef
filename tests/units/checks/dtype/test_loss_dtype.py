"""The check loss-dtype, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.checks.dtype.loss_dtype import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.records.state import DtypePolicy
from checks.dtype.records import state
from checks.range.records import HEALTHY

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP
FULL = ("float32",)


def test_a_loss_of_a_model_in_16_bits_is_a_warning() -> None:
    assert [f.verdict for f in check(replace(HEALTHY, losses=("float32",)), Limits())] == [PASS]
    (finding,) = check(replace(HEALTHY, losses=("float16",)), Limits())
    assert finding.verdict is WARN
    assert "it or a part of it is float16, with 3.3 decimal digits" in finding.message
    assert [f.verdict for f in check(HEALTHY, Limits())] == [SKIP]


@pytest.mark.parametrize(
    ("losses", "computed", "policy", "verdict"),
    [
        (("float32",), (), None, PASS),
        (("bfloat16",), (), None, WARN),
        (("float32",), ("bfloat16",), None, WARN),
        (("bfloat16",), (), DtypePolicy(loss=FULL), FAIL),
        ((), (), None, SKIP),
    ],
)
def test_a_loop_is_judged_by_what_backward_starts_from(
    losses: tuple[str, ...], computed: tuple[str, ...], policy: DtypePolicy | None, verdict: Verdict
) -> None:
    stats = state(policy=policy, losses=losses, computed=computed, loss_at=Where("backward", file="train.py", line=3))
    (finding,) = check(stats, Limits())
    assert finding.verdict is verdict
    assert finding.where.line == (3 if verdict in (WARN, FAIL) else None)


def test_a_loss_that_is_finite_in_float64_alone_fails() -> None:
    stats = state(losses=("float32",), returned=(1.0, float("inf")), exact={1: 70000.0})
    (finding,) = check(stats, Limits())
    assert (finding.verdict, finding.where.step, finding.limit) == (FAIL, 1, 70000.0)
    assert [f.verdict for f in check(replace(stats, exact={}), Limits())] == [PASS]
