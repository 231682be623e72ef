"""The check policy-banned, on records."""

from __future__ import annotations

from ampcheck.checks.policy.policy_banned import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.records.autocast import Raised as BlockRaised
from ampcheck.records.policy import BANNED, Raised
from checks.autocast.records import PLACE, block
from checks.policy.records import BCE, called, calls

LIMITS = Limits()
CALL = called(BCE, "raises", rule=BANNED)


def test_a_banned_op_fails_where_it_raised_and_warns_where_the_model_caught_it() -> None:
    (fatal,) = check(calls(CALL, raised=Raised("RuntimeError", BCE, CALL.where)), LIMITS)
    assert (fatal.verdict, fatal.where, fatal.hint) == (Verdict.FAIL, CALL.where, "Use the one with logits.")
    assert f"bans on cuda; {BCE} raises: BCE is unsafe to autocast (1 module: net)" in fatal.message
    (caught,) = check(calls(CALL), LIMITS)
    assert (caught.verdict, "which the model caught" in caught.message) == (Verdict.WARN, True)


def test_a_run_without_one_passes_and_one_that_raised_elsewhere_is_skipped() -> None:
    (clean,) = check(calls(called("aten::mm")), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 1)
    (early,) = check(calls(called("aten::mm"), raised=Raised("ValueError: no", "", Where())), LIMITS)
    assert (early.verdict, early.message) == (Verdict.SKIP, "not judged: the run raised ValueError: no")


def test_a_block_that_a_ban_ended_names_the_policies_that_ban_it() -> None:
    raised = BlockRaised("RuntimeError", "BCE is unsafe to autocast.\n\nUse the one with logits.", PLACE)
    (found,) = check(block(raised=raised, banned={BCE: ("cuda", "xpu")}), LIMITS)
    assert (found.verdict, found.where.op, found.where.line) == (Verdict.FAIL, BCE, 3)
    assert f"but {BCE}, which cuda and xpu bans, was called: BCE is unsafe to autocast." in found.message
    assert found.hint == "Use the one with logits."


def test_under_the_autocast_of_the_cpu_what_cuda_bans_fails_too() -> None:
    (found,) = check(block(banned_on_cuda=(PLACE,)), LIMITS)
    assert (found.verdict, found.where) == (Verdict.FAIL, PLACE)
    (clean,) = check(block(counts={"autocast ops": 4}), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 4)
