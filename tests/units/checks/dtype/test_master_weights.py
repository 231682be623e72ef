"""The check master-weights, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.dtype.master_weights import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.state import DtypePolicy, Role, StateDtypeStats
from checks.dtype.records import state, tensor

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP
FULL = ("float32",)


def verdicts(stats: StateDtypeStats) -> list[Verdict]:
    return [finding.verdict for finding in check(stats, Limits())]


def test_without_a_policy_only_float16_under_a_scaler_fails() -> None:
    half = tensor(Role.PARAMETER, "float16")
    assert verdicts(state(tensor(Role.PARAMETER))) == [PASS]
    assert verdicts(state(half)) == [SKIP]
    assert verdicts(state(half, scaled=True)) == [FAIL]
    assert verdicts(state(replace(half, master="weight.master"), scaled=True)) == [PASS]
    assert verdicts(state()) == [SKIP]


def test_a_policy_judges_parameters_gradients_and_masters() -> None:
    strict = DtypePolicy(parameter=FULL, gradient=FULL)
    low = tensor(Role.PARAMETER, "bfloat16"), tensor(Role.GRADIENT, "bfloat16", "weight.grad")
    assert verdicts(state(*low, policy=strict)) == [FAIL, FAIL]
    (bare,) = check(state(low[0], policy=DtypePolicy(masters=True)), Limits())
    assert "1 of 1 such weights have no such tensor: weight (bfloat16)" in bare.message


def test_a_weight_that_a_cast_untied_fails() -> None:
    head = tensor(Role.PARAMETER, name="head.weight", twin="embedding.weight")
    (finding,) = check(state(head, tensor(Role.PARAMETER, "bfloat16", "embedding.weight")), Limits())
    assert "the steps change embedding.weight (bfloat16) alone, and not head.weight (float32)" in finding.message
