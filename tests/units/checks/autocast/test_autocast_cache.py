"""The check autocast-cache, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.autocast.autocast_cache import check
from ampcheck.core.run import Verdict
from ampcheck.records.autocast import CutCast, StaleCast
from checks.autocast.records import LIMITS, PLACE, block

STALE = StaleCast((4, 4), "float16", None, "train.py:9", PLACE)


def test_a_cast_that_is_used_after_its_weight_changed_names_the_change() -> None:
    (stale,) = check(block(stale={STALE: 1, replace(STALE, shape=(2,)): 1}), LIMITS)
    assert (stale.verdict, stale.where, stale.observed, stale.names) == (Verdict.FAIL, PLACE, 2, ("train.py:9",))
    assert "the float16 cast of a weight [4, 4] (and 1 other uses)" in stale.message
    (other,) = check(block(stale={replace(STALE, wanted="bfloat16", changed_by=""): 1}), LIMITS)
    assert "was used where autocast casts to bfloat16" in other.message


def test_a_cast_without_history_says_which_weights_get_no_gradient() -> None:
    cuts = [CutCast(name, (4,), "float16", "train.py:5", PLACE) for name in ("up.weight", "down.weight")]
    (cut,) = check(block(cut=dict.fromkeys(cuts, 2)), LIMITS)
    assert (cut.verdict, cut.observed) == (Verdict.FAIL, 4)
    assert "float16 cast of up.weight, down.weight from train.py:5" in cut.message


def test_casts_that_are_used_as_they_should_pass() -> None:
    (clean,) = check(block(counts={"cached casts": 3}), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 3)
    (nothing,) = check(block(), LIMITS)
    assert nothing.verdict is Verdict.SKIP
