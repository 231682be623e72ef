"""The check nonfinite-gradient, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.finite import FiniteStats
from checks.range.records import (
    LOST,
    OF_GRADIENT,
    found,
    site,
    verdicts,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_gradients_that_overflow_until_the_scaler_has_backed_off_are_a_pass() -> None:
    (finding,) = found("nonfinite-gradient", site(), site(1, **OF_GRADIENT, bad=3, born=3, last=False))

    assert finding.verdict is PASS
    assert "finite again" in finding.message


def test_gradients_that_overflow_in_every_call_fail_where_it_begins() -> None:
    (finding,) = found(
        "nonfinite-gradient",
        site(),
        site(1, **OF_GRADIENT, bad=10, born=10, last=True),
        site(2, **OF_GRADIENT, bad=10, born=0, last=True),
    )

    assert finding.verdict is FAIL
    assert (finding.where.phase, finding.where.module) == ("backward", "blocks.1")


def test_gradients_that_overflowed_in_the_last_call_but_not_in_all_are_a_warning() -> None:
    assert verdicts("nonfinite-gradient", site(), site(1, **OF_GRADIENT, bad=3, born=3, last=True)) == [WARN]


def test_a_gradient_that_never_becomes_finite_is_not_hidden_by_one_before_it_that_does() -> None:
    (finding,) = found(
        "nonfinite-gradient",
        site(),
        site(1, **OF_GRADIENT, bad=3, born=3, last=False),
        site(2, **OF_GRADIENT, bad=10, born=10, last=True),
    )

    assert finding.verdict is FAIL
    assert finding.where.module == "blocks.2"


def test_one_overflowing_call_does_not_tell_that_a_scaler_never_settles() -> None:
    once = site(1, **OF_GRADIENT, calls=1, bad=1, born=1, last=True)

    assert verdicts("nonfinite-gradient", site(), once) == [WARN]


def test_gradients_of_a_forward_that_overflows_are_not_judged() -> None:
    (finding,) = found("nonfinite-gradient", site(0, **LOST), site(1, **OF_GRADIENT, bad=10, born=10))

    assert finding.verdict is SKIP
    assert "see overflow" in finding.message


def test_without_backward_nothing_is_said_of_gradients() -> None:
    assert not found("nonfinite-gradient", site())


def test_weights_that_became_infinite_fail_and_an_optimizer_that_stepped_with_such_a_gradient_is_warned_of() -> None:
    loop = FiniteStats("loop", (1.0,), (), ("layer.weight",), 4, steps=3)
    of_weights = [f for f in findings(loop, Limits()) if f.check == "nonfinite-gradient"]
    assert [(f.verdict, f.where.module) for f in of_weights] == [(FAIL, "layer")]
    applied = replace(loop, after=(), applied={"layer.weight": 2})
    assert [f.verdict for f in findings(applied, Limits()) if f.check == "nonfinite-gradient"] == [WARN]
    assert [f.verdict for f in findings(replace(loop, after=()), Limits()) if f.check == "nonfinite-gradient"] == [PASS]
