"""The check loss-scale, on records. tests/units/training/test_loss_scale.py has each verdict of it."""

from __future__ import annotations

from typing import Any

from ampcheck.checks.training.loss_scale import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.scales import GradientHistogram, LossScaleStats, ScalerStep, scale_window

WINDOW = scale_window({"weight": GradientHistogram({-20: 100, -10: 100}, 2.0**-10)}, share=0.1)


def judged(*scales: float, skipped: bool = False, **facts: Any) -> list[Finding]:
    steps = tuple(ScalerStep(n, scale, not skipped, skipped, scale) for n, scale in enumerate(scales))
    plain: dict[str, Any] = {"subject": "loop", "format": "float16", "window": WINDOW}
    return check(LossScaleStats(facts.pop("enabled", True), steps, **(plain | facts)), Limits())


def test_a_scale_inside_the_window_passes_and_one_below_it_fails() -> None:
    (inside,) = judged(65536.0)
    assert (inside.verdict, inside.seen, inside.observed) == (Verdict.PASS, 200, 0.0)
    window = scale_window({"weight": GradientHistogram({-40: 100, -10: 100}, 2.0**-10)}, share=0.1)
    (below,) = judged(4.0, window=window)
    assert (below.verdict, below.observed, below.limit) == (Verdict.FAIL, 0.5, 0.1)
    assert "the loss scale 4 loses 50" in below.message


def test_no_scale_keeps_gradients_that_are_too_far_apart() -> None:
    apart = scale_window(
        {"a": GradientHistogram({-60: 100}, 2.0**-60), "b": GradientHistogram({10: 9}, 1024.0)}, share=0.1
    )
    (empty,) = judged(1024.0, window=apart)
    assert (empty.verdict, "no loss scale does both: a needs" in empty.message) == (Verdict.FAIL, True)


def test_a_scale_that_collapses_or_is_no_number_fails() -> None:
    (skips,) = judged(*[1024.0] * 9, skipped=True)
    assert (skips.verdict, skips.unit) == (Verdict.FAIL, "skipped steps in a row")
    (zero,) = judged(1024.0, 0.0)
    assert (zero.verdict, zero.observed) == (Verdict.FAIL, 0.0)


def test_formats_that_need_no_scale_are_skipped() -> None:
    for form, reason in (("bfloat16", "bfloat16 reaches as far as float32"), ("", "no gradient of 16 bits flows")):
        (skipped,) = judged(enabled=False, format=form, window=None)
        assert (skipped.verdict, reason in skipped.message) == (Verdict.SKIP, True)
