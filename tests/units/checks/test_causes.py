"""Promise: what follows from a mistake is listed beneath it, and two mistakes that have nothing to do stay two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.checks.causes import with_causes
from ampcheck.core.run import Finding, Run, Verdict, Where, followers
from ampcheck.report.html import render_html
from ampcheck.report.markdown import comment_of
from ampcheck.report.terminal import summary_lines

LINE = Where("update", op="aten::addcdiv_", file="train.py", line=9)
BACKWARD = Where("backward", file="train.py", line=7, step=0)


def fail(
    check: str, message: str = "", where: Where = LINE, verdict: Verdict = Verdict.FAIL, **more: object
) -> Finding:
    return replace(Finding(check, verdict, "loop", message or f"{check} must hold", where), **more)  # type: ignore[arg-type]


def causes(*findings: Finding) -> list[str]:
    """For each finding the check that it follows from, empty for a cause."""
    return [str(f.cause[0]) if f.cause else "" for f in with_causes(findings)]


def test_five_paragraphs_of_one_stagnation_are_one_finding() -> None:
    several = [fail("stagnation", where=replace(LINE, module=f"layers.{i}", op=f"aten::op{i}")) for i in range(5)]
    assert causes(*several) == ["", *["stagnation"] * 4]
    elsewhere = fail("stagnation", where=replace(LINE, line=12))
    assert causes(several[0], elsewhere) == ["", ""]


def test_a_cause_is_as_severe_as_what_follows_from_it() -> None:
    warning = fail("stagnation", verdict=Verdict.WARN)
    assert causes(warning, fail("stagnation")) == ["stagnation", ""]
    assert causes(warning, fail("precision-loss")) == ["", ""]


def test_gradients_that_vanish_follow_from_a_missing_scaler_and_not_from_a_clip_after_them() -> None:
    lost = fail("gradient-underflow", where=Where("backward", "head", step=0))
    unscaled = fail("scaler-protocol", where=BACKWARD)
    clip = fail("scaler-protocol", where=Where("update", file="train.py", line=8, step=0))
    assert causes(lost, unscaled) == ["scaler-protocol", ""]
    assert causes(lost, clip) == ["", ""]
    later = fail("scaler-protocol", where=replace(BACKWARD, step=1))
    assert causes(lost, later) == ["", ""]


def test_digits_that_a_clip_of_scaled_gradients_loses_follow_from_the_missing_unscale() -> None:
    clip = fail("scaler-protocol", where=Where("update", file="train.py", line=8, step=0))
    lost = fail("precision-loss", where=Where("forward", op="aten::_foreach_mul_", file="train.py", line=8))
    assert causes(lost, clip) == ["scaler-protocol", ""]
    assert causes(replace(lost, where=replace(lost.where, line=7)), clip) == ["", ""]


@pytest.mark.parametrize(
    ("kind", "step", "follows"),
    [
        ("", 0, True),  # a gradient
        ("returned", 1, True),
        ("returned", 0, False),  # computed before the first update
        ("penalty", 0, False),  # a mistake of its own
    ],
)
def test_scale_invariance_follows_from_calls_before_it(kind: str, step: int, follows: bool) -> None:
    clip = fail("scaler-protocol", where=Where("update", file="train.py", line=8, step=0))
    scale = fail("scale-invariance", where=Where("update", "fc", step=step), kind=kind)
    assert causes(scale, clip) == ["scaler-protocol" if follows else "", ""]


def test_what_a_scaler_raises_follows_from_its_misuse_and_what_the_users_code_raises_does_not() -> None:
    misuse = fail("scaler-protocol", where=Where("update", file="train.py", line=8, step=0))
    raised = fail("coverage", where=Where(op="GradScaler.unscale_", file="train.py", line=8))
    assert causes(raised, misuse) == ["scaler-protocol", ""]
    assert causes(replace(raised, where=replace(raised.where, op="")), misuse) == ["", ""]


def test_an_infinity_explains_the_loss_and_the_weights_but_no_overflow_of_another_line() -> None:
    overflow = fail("overflow", where=Where("forward", "ffn", "aten::mul", "train.py", 3))
    returned = fail("overflow", where=Where("forward", step=0))
    weights, skipped = fail("nonfinite-gradient", where=Where("update", "ffn")), fail("loss-scale", where=BACKWARD)
    skipped = replace(skipped, where=Where("backward", step=0))
    another = fail("overflow", where=Where("forward", "head", "aten::exp", "train.py", 5))
    assert causes(overflow, another, returned, weights, skipped) == ["", "", "overflow", "overflow", "overflow"]


def test_a_loss_explains_the_gradients_after_it_and_weights_the_losses_after_them() -> None:
    loss, scale = fail("overflow", where=Where("forward", step=2)), fail("loss-scale", where=Where("update", step=19))
    before, after = (fail("nonfinite-gradient", where=Where("update", "fc", step=step)) for step in (1, 2))
    assert causes(loss, scale, after) == ["", "overflow", "overflow"]
    assert causes(after, replace(after, where=replace(after.where, module="head"))) == ["", "nonfinite-gradient"]
    assert causes(before, after) == ["", ""]
    assert causes(loss, before) == ["nonfinite-gradient", ""]
    assert causes(loss, fail("nonfinite-gradient", where=Where("update", "fc"))) == ["", ""]  # it may come first


def test_an_output_that_is_infinite_because_a_value_vanished_follows_from_that_value() -> None:
    """The divisor that became zero is the cause, although the overflow is found first."""
    place = Where("forward", "norm", "aten::mul.Tensor", "model.py", 3)
    output = fail("overflow", where=place, kind="output")
    vanished, gradients = fail("silent-zero", where=place), fail("nonfinite-gradient", where=Where("backward", "up"))
    assert causes(output, gradients, vanished) == ["silent-zero", "silent-zero", ""]
    elsewhere = replace(vanished, where=replace(place, line=8))
    assert causes(output, elsewhere) == ["", ""]


def test_what_vanishes_in_backward_follows_from_the_overflow_of_its_line() -> None:
    place = Where("forward", "norm", "aten::mul.Tensor", "model.py", 3)
    saved = fail("silent-zero", where=replace(place, phase="backward", op="aten::div.Tensor"))
    assert causes(saved, fail("overflow", where=place)) == ["overflow", ""]
    assert causes(replace(saved, where=replace(saved.where, line=8)), fail("overflow", where=place)) == ["", ""]


def test_an_eps_of_zero_explains_its_line() -> None:
    guard = fail("stagnation", where=replace(LINE, op="aten::add_"), kind="guard")
    state = fail("optimizer-state", where=Where("update", "fc.exp_avg_sq", step=0))
    assert causes(fail("overflow"), fail("flush"), state, guard) == ["stagnation"] * 3 + [""]
    assert causes(fail("overflow"), fail("stagnation")) == ["", "overflow"]  # the same op: the sum is infinite
    assert causes(fail("overflow"), fail("stagnation", where=replace(LINE, op="aten::mul_"))) == ["", ""]


def test_what_reaches_no_weight_of_a_finding_does_not_explain_it() -> None:
    weights = fail("nonfinite-gradient", where=Where("update"), names=("fc.weight", "head.bias"))
    for cause in (fail("overflow"), fail("stagnation", kind="guard")):
        for name in ("fc.weight", "head.bias.exp_avg_sq"):
            assert causes(weights, replace(cause, names=(name, "other"))) == [cause.check, ""]
        for name in ("fc", "fc.weight2", "other"):
            assert causes(weights, replace(cause, names=(name,))) == ["", ""]
        assert causes(replace(weights, names=()), cause) == [cause.check, ""]


def test_a_region_around_the_loop_is_one_mistake_and_two_regions_are_two() -> None:
    backward = fail("autocast-scope", where=BACKWARD)
    update = fail("autocast-scope", kind="region")
    cached = fail("autocast-cache", where=Where("forward"), names=("train.py:9",))
    assert causes(backward, update, cached) == ["", "autocast-scope", "autocast-scope"]
    assert causes(backward, replace(update, kind="")) == ["", ""]
    assert causes(backward, replace(cached, names=("train.py:4",))) == ["", ""]


def test_other_subjects_and_passes_explain_nothing() -> None:
    assert causes(fail("stagnation"), fail("precision-loss", subject="another")) == ["", ""]
    assert causes(fail("stagnation", verdict=Verdict.SKIP), fail("precision-loss")) == ["", ""]


def test_a_run_shows_followers_in_one_line_and_in_full_when_verbose() -> None:
    found = with_causes([fail("precision-loss", "digits were lost"), fail("stagnation"), fail("stagnation", "again")])
    run = Run(findings=found)
    lines = list(summary_lines(run, width=100))
    assert "  it explains precision-loss, stagnation" in lines
    assert "digits were lost" not in "\n".join(lines)
    assert "digits were lost" in "\n".join(summary_lines(run, width=100, verbose=True))
    assert lines[0].startswith("3 failed")  # verdicts are counted as before
    page, comment = render_html(run), comment_of(run)
    assert page.count('<article class="card') == 1
    assert "it explains precision-loss, stagnation" in page
    assert "digits were lost" in page
    assert "it explains" in comment
    again = Run.from_json(run.to_json())
    assert again == run
    assert [f.check for f in followers(again.findings)[id(again.findings[1])]] == ["precision-loss", "stagnation"]
