"""The check policy-gap, on records."""

from __future__ import annotations

from ampcheck.checks.policy.policy_gap import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.records.policy import BANNED, FP32, OtherPolicy, PolicyGap, Raised
from checks.policy.records import BCE, called, calls, policy

LIMITS = Limits()
WIDE = calls(called("aten::mv", "float32", rule=""), device="cpu")
LOW = calls(called("aten::mv"), mv="lower_precision")


def test_an_op_that_the_cpu_computes_wider_warns_unless_the_device_is_judged_besides() -> None:
    (found,) = check(PolicyGap(WIDE, LOW), LIMITS)
    assert (found.verdict, found.where.op) == (Verdict.WARN, "aten::mv")
    assert "of 1 ops aten::mv computed in float16 there and wider on the cpu" in found.message
    (judged,) = check(PolicyGap(WIDE, LOW, judged=True), LIMITS)
    assert (judged.verdict, judged.seen) == (Verdict.PASS, 1)


def test_an_op_that_the_device_bans_warns_and_equal_policies_pass() -> None:
    on_cpu, there = calls(called(BCE, rule=""), device="cpu"), calls(called(BCE, "raises", rule=BANNED))
    (banned,) = check(PolicyGap(on_cpu, there), LIMITS)
    assert (banned.verdict, f"{BCE} banned there" in banned.message) == (Verdict.WARN, True)
    (equal,) = check(PolicyGap(calls(called("aten::mm"), device="cpu"), calls(called("aten::mm"))), LIMITS)
    assert (equal.verdict, equal.message) == (
        Verdict.PASS,
        "of 1 ops 0 are treated otherwise on cpu than on cuda; none of them is computed wider on the cpu",
    )


def test_a_run_that_ended_early_is_skipped() -> None:
    (early,) = check(PolicyGap(WIDE, calls(raised=Raised("ValueError: no", "", Where()))), LIMITS)
    assert (early.verdict, early.message) == (Verdict.SKIP, "not judged: the run raised ValueError: no")


def test_what_another_policy_does_otherwise_is_listed_and_not_judged() -> None:
    run = calls(called(BCE, rule=""), called("aten::pow", "float16", rule=""), device="cpu")
    (told,) = check(OtherPolicy(run, policy("cuda", pow=FP32)), LIMITS)
    assert told.verdict is Verdict.SKIP
    assert f"CUDA judges otherwise: its autocast bans {BCE}, computes in float32 aten::pow;" in told.message
    assert list(check(OtherPolicy(calls(called("aten::mm"), device="cpu"), policy("cuda")), LIMITS)) == []
