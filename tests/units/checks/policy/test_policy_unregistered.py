"""The check policy-unregistered, on records."""

from __future__ import annotations

from ampcheck.checks.policy.policy_unregistered import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.policy import Raised
from checks.autocast.records import block, call
from checks.policy.records import called, calls

LIMITS = Limits()
CUSTOM = called("mine::scale", inputs="float16 float32", passed="float16 float32", rule="")


def test_a_custom_op_without_a_kernel_warns_and_fails_where_it_raised_on_mixed_dtypes() -> None:
    (alone,) = check(calls(CUSTOM), LIMITS)
    assert (alone.verdict, alone.where) == (Verdict.WARN, CUSTOM.where)
    assert "mine::scale has none: it is never cast and got float16 float32 in 1 module: net" in alone.message
    (fatal,) = check(calls(CUSTOM, raised=Raised("RuntimeError: no", "mine::scale", CUSTOM.where)), LIMITS)
    assert (fatal.verdict, "it raised RuntimeError: no" in fatal.message) == (Verdict.FAIL, True)
    (clean,) = check(calls(called("aten::mm")), LIMITS)
    assert (clean.verdict, clean.message) == (Verdict.SKIP, "nothing to judge: no custom op ran under autocast")


def test_a_block_in_which_an_op_without_a_rule_raised_on_mixed_dtypes() -> None:
    facts = {"rule": "", "raised": "expected one dtype", "runs_in": "float16"}
    (found,) = check(block(call("mixed", "float16", "float32", **facts)), LIMITS)
    assert (found.verdict, found.hint) == (Verdict.FAIL, "cast its inputs to float16 at the call")
    assert (
        "it got float16 and float32 and raised: expected one dtype. With all inputs in float16 it runs" in found.message
    )
    (caught,) = check(block(call("bypass", "float16", "float32", **facts, caught=True)), LIMITS)
    assert caught.verdict is Verdict.WARN
    ruled = call("mixed", "float16", "float32", **(facts | {"rule": "promote"}))
    (clean,) = check(block(ruled, counts={"autocast ops": 1}), LIMITS)
    assert clean.verdict is Verdict.PASS
