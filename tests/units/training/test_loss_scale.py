from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.checks.training.loss_scale import check as check_loss_scale
from ampcheck.core.limits import Limits
from ampcheck.core.run import Chart, Finding, Run, Table, Verdict, Where
from ampcheck.records.scales import GradientHistogram, LossScaleStats, ScalerStep, ScaleWindow, power, scale_window
from ampcheck.report.charts import draw_chart
from ampcheck.training.gradients.watch import histogram_of
from ampcheck.training.scale.stats import loss_scale_chart, loss_scale_table, window_chart

LIMITS = Limits()
BODY = GradientHistogram({-20: 900, -30: 90, 0: 10}, 1.0)
"""Loses 9 % up to 2^5, 0 % above, overflows from 2^16 on."""


def _window(share: float = 0.05, **histograms: GradientHistogram) -> ScaleWindow:
    return scale_window(histograms or {"body": BODY}, share=share)


def _healthy(**changes: object) -> LossScaleStats:
    """A scaler that started too high, backed off twice and steps since."""
    stats = LossScaleStats(True, _steps(2.0**15), "loop", "float16", _window(), Where(op="aten::mm"))
    return replace(stats, **changes)  # type: ignore[arg-type]


def _steps(scale: float) -> tuple[ScalerStep, ...]:
    """Two steps that are skipped, and ten that are taken at a scale."""
    skipped = (ScalerStep(0, 4 * scale, 0, 1, 2 * scale, ("body",)), ScalerStep(1, 2 * scale, 0, 1, scale, ("body",)))
    return (*skipped, *(ScalerStep(i, scale, 1, 0, scale) for i in range(2, 12)))


def _path(trajectory: Sequence[tuple[int, float, bool]], names: tuple[str, ...] = ()) -> tuple[ScalerStep, ...]:
    """Steps at these scales; those that are skipped halve it."""
    return tuple(
        ScalerStep(n, scale, not skip, skip, scale / 2 if skip else scale, names if skip else ())
        for n, scale, skip in trajectory
    )


def _only(stats: LossScaleStats, limits: Limits = LIMITS) -> Finding:
    (finding,) = check_loss_scale(stats, limits)
    assert finding.check == "loss-scale"
    assert finding.message
    return finding


def test_a_scaler_that_backs_off_and_then_steps_passes() -> None:
    finding = _only(_healthy())
    assert finding.verdict is Verdict.PASS
    assert "2^15, is inside, 0 binades below the upper end" in finding.message
    assert "the scaler skipped 2 of 12 steps, first step 0, not finite: body (2x), first in aten::mm" in finding.message
    assert finding.observed == 0.0


def test_growing_into_overflow_is_a_scalers_ordinary_life() -> None:
    trajectory = ((0, 2.0**15, False), (1, 2.0**16, True), (2, 2.0**15, False), (3, 2.0**17, True))
    assert _only(_healthy(steps=_path(trajectory))).verdict is Verdict.PASS


def test_a_scale_in_use_above_the_window_is_told_and_passes() -> None:
    finding = _only(_healthy(steps=_steps(2.0**18)))
    assert finding.verdict is Verdict.PASS
    assert "3 binades above it" in finding.message


def test_a_back_off_that_has_not_ended_is_undecided() -> None:
    falling = tuple((i, 2.0 ** (30 - i), True) for i in range(14))
    finding = _only(_healthy(steps=_path(falling)))
    assert finding.verdict is Verdict.UNDECIDED
    assert "from 2^30 to 2^16" in finding.message
    assert "observe more steps" in finding.hint


def test_a_real_run_that_is_finite_further_down_leaves_a_back_off_undecided() -> None:
    falling = tuple((i, 2.0 ** (15 - i), True) for i in range(9))
    stats = _healthy(steps=_path(falling))
    assert _only(stats).verdict is Verdict.FAIL
    assert _only(replace(stats, verified=((2.0**6, 0.0, False),))).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("window", [None, _window()])
def test_a_scaler_that_skips_every_step_has_collapsed(window: ScaleWindow | None) -> None:
    falling = tuple((i, 2.0 ** (15 - i), True) for i in range(8))
    stats = _healthy(window=window, steps=_path(falling, ("a.w",)))
    finding = _only(stats)
    assert finding.verdict is Verdict.FAIL
    assert "the last 8 of 8 steps were all skipped" in finding.message
    assert "not finite: a.w (8x), first in aten::mm" in finding.message
    assert finding.where.op == "aten::mm"
    assert finding.where.step == 0
    assert finding.hint


def test_a_collapse_is_found_whatever_the_format() -> None:
    falling = tuple((i, 2.0 ** (15 - i), True) for i in range(8))
    for kind in ("", "bfloat16"):
        stats = _healthy(format=kind, window=None, steps=_path(falling))
        assert _only(stats).verdict is Verdict.FAIL


def test_a_scale_that_fell_below_one_fails() -> None:
    trajectory = ((0, 2.0, True), (1, 1.0, True), (2, 0.5, True), (3, 0.25, False))
    finding = _only(_healthy(window=None, steps=_path(trajectory)))
    assert finding.verdict is Verdict.FAIL
    assert "fell below 1, from 2 to 2^-2" in finding.message


def test_a_scale_below_one_where_the_gradients_ask_for_it_warns() -> None:
    huge = _window(huge=GradientHistogram({17: 100}, 2.0**17))
    trajectory = ((0, 2.0, True), (1, 1.0, True), (2, 0.5, True), (3, 0.25, False))
    finding = _only(_healthy(window=huge, steps=_path(trajectory)))
    assert finding.verdict is Verdict.WARN
    assert "average the loss" in finding.hint
    chosen = _only(_healthy(window=huge, steps=_path([(0, 0.25, False)])))
    assert chosen.verdict is Verdict.PASS


def test_a_module_that_loses_more_than_half_of_its_gradient_is_found() -> None:
    window = scale_window({"body": BODY, "head.weight": GradientHistogram({-41: 560, -10: 440}, 2.0**-10)}, share=0.1)
    finding = _only(_healthy(window=window))
    assert finding.verdict is Verdict.FAIL
    assert finding.observed == 0.56
    assert finding.where.module == "head.weight"
    assert "no loss scale does both: head.weight needs 2^17 or more, body overflows above 2^15" in finding.message
    assert "head.weight or body" in finding.hint


def test_a_real_run_that_serves_refutes_an_empty_window() -> None:
    window = scale_window({"body": BODY, "head": GradientHistogram({-41: 560}, 2.0**-41)}, share=0.1)
    assert (
        _only(_healthy(window=window, verified=((2.0**15, 0.5, False), (2.0**16, 0.0, True)))).verdict is Verdict.FAIL
    )
    assert _only(_healthy(window=window, verified=((2.0**15, 0.0, False),))).verdict is Verdict.WARN


def test_a_scale_below_the_window_fails() -> None:
    window = _window(0.1, low=GradientHistogram({-35: 50, -30: 50}, 2.0**-30))
    finding = _only(_healthy(window=window, steps=_path([(0, 2.0**8, False)])))
    assert finding.verdict is Verdict.FAIL
    assert (finding.observed, finding.limit) == (0.5, 0.1)
    assert "the loss scale 256 loses 50 % of low" in finding.message
    assert "init_scale=2.0**45" in finding.hint


def test_float16_without_a_scaler_fails_where_its_gradients_flush() -> None:
    window = _window(0.1, low=GradientHistogram({-35: 50, -30: 50}, 2.0**-30))
    finding = _only(LossScaleStats(False, (), "loop", "float16", window))
    assert finding.verdict is Verdict.FAIL
    assert "without a loss scale 100 % of low are lost" in finding.message
    assert "torch.amp.GradScaler" in finding.hint


def test_float16_without_a_scaler_passes_where_its_gradients_are_large() -> None:
    window = _window(0.1, large=GradientHistogram({-10: 50}, 2.0**-10))
    finding = _only(LossScaleStats(False, (), "loop", "float16", window))
    assert finding.verdict is Verdict.PASS
    assert "the scale 1, without a scaler, is inside" in finding.message


def test_overflow_without_a_scaler_fails_when_a_real_run_shows_it() -> None:
    window = _window(0.1, huge=GradientHistogram({17: 100}, 2.0**17))
    stats = LossScaleStats(False, (), "loop", "float16", window)
    assert _only(stats).verdict is Verdict.WARN
    assert _only(replace(stats, verified=((1.0, 0.0, True),))).verdict is Verdict.FAIL
    assert _only(replace(stats, verified=((1.0, 0.0, False),))).verdict is Verdict.PASS


def test_a_real_run_overrules_the_share_that_was_predicted() -> None:
    window = _window(0.1, low=GradientHistogram({-35: 50, -30: 50}, 2.0**-30))
    stats = _healthy(window=window, steps=_steps(2.0**8))
    refuted = _only(replace(stats, verified=((2.0**8, 0.02, False),)))
    assert refuted.verdict is Verdict.PASS
    assert "loses 50 % of low (in a real backward pass 2 %)" in refuted.message
    confirmed = _only(replace(stats, verified=((2.0**8, 0.55, False),)))
    assert confirmed.verdict is Verdict.FAIL
    assert "(in a real backward pass 55 %)" in confirmed.message


def test_ends_that_real_runs_moved_are_the_ends() -> None:
    window = _window(0.1, low=GradientHistogram({-35: 50, -30: 50}, 2.0**-30))
    assert (window.needed, window.allowed) == (11, 45)
    wider = replace(window, needed=9)
    below = _healthy(window=wider, steps=_steps(2.0**9), verified=((2.0**8, 0.4, False), (2.0**9, 0.1, False)))
    assert _only(below).verdict is Verdict.PASS
    assert _only(replace(below, steps=_steps(2.0**8))).verdict is Verdict.FAIL
    narrower = replace(window, needed=13)
    lossy = _healthy(window=narrower, steps=_steps(2.0**12), verified=((2.0**12, 0.3, False), (2.0**13, 0.0, False)))
    finding = _only(lossy)
    assert finding.verdict is Verdict.FAIL
    assert finding.observed == 0.3


@pytest.mark.parametrize(("grows", "verdict"), [(False, Verdict.WARN), (True, Verdict.PASS)])
def test_steps_that_are_skipped_again_and_again_warn_unless_the_scale_grew_before(
    grows: bool, verdict: Verdict
) -> None:
    """A scale that is set by hand never falls below 1, and the last step is taken."""
    steps = [ScalerStep(n, 2.0 ** (12 + (grows and n % 3 == 1)), n % 3 != 1, n % 3 == 1) for n in range(60)]
    paired = zip(steps, [*steps[1:], steps[-1]], strict=True)
    finding = _only(_healthy(steps=tuple(replace(step, new_scale=after.scale) for step, after in paired)))
    assert finding.verdict is verdict
    assert "the scaler skipped 20 of 60 steps" in finding.message


def test_a_loss_that_no_scale_explains_warns() -> None:
    finding = _only(_healthy(verified=((2.0**15, 0.4, False),)))
    assert finding.verdict is Verdict.WARN
    assert "gradient-underflow" in finding.hint


def test_real_runs_that_overflow_early_are_told() -> None:
    finding = _only(_healthy(steps=_steps(2.0**12), verified=((2.0**12, 0.0, False), (2.0**14, 0.0, True))))
    assert finding.verdict is Verdict.PASS
    assert "real backward passes overflow from 2^14 on" in finding.message


def test_overflow_at_the_lower_end_without_any_step_taken_fails() -> None:
    trajectory = ((0, 2.0**16, True), (1, 2.0**15, True))
    stats = _healthy(steps=_path(trajectory))
    assert _only(stats).verdict is Verdict.UNDECIDED
    window = stats.window
    assert window is not None
    assert window.low is not None
    assert _only(replace(stats, verified=((window.low, 0.0, True),))).verdict is Verdict.FAIL
    assert _only(_healthy(verified=((window.low, 0.0, True),))).verdict is Verdict.PASS


def test_between_two_powers_of_two_only_what_is_surely_lost_fails() -> None:
    window = _window(0.1, low=GradientHistogram({-30: 100}, 2.0**-30))
    assert window.low == 64.0
    assert _only(_healthy(window=window, steps=_steps(48.0))).verdict is Verdict.PASS
    assert _only(_healthy(window=window, steps=_steps(32.0))).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "", "window": None}, "no gradient of 16 bits flows"),
        ({"format": "bfloat16", "window": None}, "bfloat16 reaches as far as float32"),
        ({"window": None}, "no unscaled gradient was measured"),
        ({"window": scale_window({}, share=0.1)}, "no measured gradient has a finite, nonzero element"),
        (
            {"window": scale_window({"a": histogram_of(torch.full((3,), math.nan))}, share=0.1)},
            "3 elements of a are infinite or NaN without any scale",
        ),
        ({"steps": ()}, "no optimizer was stepped through the scaler"),
    ],
)
def test_what_was_not_looked_at_is_skipped_with_the_reason(changes: dict[str, object], reason: str) -> None:
    finding = _only(_healthy(**changes))
    assert finding.verdict is Verdict.SKIP
    assert reason in finding.message


def test_elements_that_no_scale_mends_are_told() -> None:
    window = scale_window({"a": replace(BODY, nonfinite=2), "b": replace(BODY, nonfinite=1)}, share=0.1)
    message = _only(_healthy(window=window)).message
    assert "2 elements of a and 1 other tensors are infinite or NaN without any scale" in message


def test_the_path_of_a_scaler_becomes_what_is_judged() -> None:
    path = (ScalerStep(0, 8.0, 0, 1, 4.0, ("w",)), ScalerStep(1, 4.0, 1, 0, 4.0))
    stats = LossScaleStats(True, path, "loop", "float16", None)
    assert (stats.scale_in_use, stats.last_scale) == (4.0, 4.0)
    assert stats.trajectory == ((0, 8.0, True), (1, 4.0, False))
    assert stats.skipped_by == {"w": 1}
    assert (stats.scale, replace(stats, enabled=False).scale) == (4.0, 1.0)


_HISTOGRAMS = st.dictionaries(
    st.sampled_from("abc"),
    st.dictionaries(st.integers(-140, 120), st.integers(1, 50), max_size=6).map(
        lambda d: GradientHistogram(d, 2.0 ** max(d, default=0) if d else 0.0)
    ),
    max_size=3,
)
_STATS = st.builds(
    LossScaleStats,
    st.booleans(),
    st.lists(
        st.builds(
            ScalerStep,
            st.integers(0, 99),
            st.floats(0.0, 1e9),
            st.integers(0, 1),
            st.integers(0, 1),
            st.none() | st.floats(0.0, 1e9),
            st.lists(st.sampled_from("abcdef"), max_size=3).map(tuple),
        ),
        max_size=20,
    ).map(tuple),
    st.just("loop"),
    st.sampled_from(["float16", "bfloat16", ""]),
    st.none() | st.builds(lambda h, s: scale_window(h, share=s), _HISTOGRAMS, st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    st.sampled_from([None, Where(op="aten::mm"), Where("forward", "0", "aten::mm", "t.py", 3)]),
    st.lists(st.tuples(st.floats(1e-6, 1e9), st.floats(0.0, 1.0) | st.just(math.nan), st.booleans()), max_size=4).map(
        tuple
    ),
)


@given(_STATS)
def test_any_stats_are_judged_and_survive_a_round_trip(stats: LossScaleStats) -> None:
    findings = check_loss_scale(stats, LIMITS)
    assert findings
    assert all(f.hint for f in findings if f.verdict in (Verdict.FAIL, Verdict.WARN, Verdict.UNDECIDED))
    charts = (*loss_scale_chart(stats), *window_chart(stats))
    run = Run(findings=tuple(findings), tables=loss_scale_table(stats), charts=charts)
    assert str(Run.from_json(run.to_json())) == str(run)
    for chart in charts:
        assert all(len(series.x) == len(series.y) for series in chart.series)


@given(_STATS)
def test_a_pass_says_what_it_looked_at(stats: LossScaleStats) -> None:
    for finding in check_loss_scale(stats, LIMITS):
        if finding.verdict is Verdict.PASS:
            assert stats.window is not None
            assert f"{stats.window.nonzero:,} nonzero elements" in finding.message


def _shown(stats: LossScaleStats) -> tuple[Table, Chart, Chart]:
    (table,), (path,), (lost,) = loss_scale_table(stats), loss_scale_chart(stats), window_chart(stats)
    return table, path, lost


def test_the_table_tells_each_scale_around_the_window() -> None:
    stats = _healthy(verified=((2.0**15, 0.01, False), (2.0**16, 0.0, True)))
    table, _, _ = _shown(stats)
    rows = {row[0]: row for row in table.rows}
    assert rows["32"][1:6] == ("no", 0.09, "body", 0.09, "no")
    assert rows["64"][1:6] == ("yes", 0.0, "", 0.0, "no")
    assert rows["2^15"] == ("2^15", "yes", 0.0, "", 0.0, "no", 0.01, "no")
    assert rows["2^16"] == ("2^16", "no", 0.0, "", 0.0, "body", 0.0, "yes")
    assert len(table.rows) == 10 + 2 * 3
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_wide_gap_is_thinned_out() -> None:
    window = scale_window(
        {"a": GradientHistogram({-140: 9}, 2.0**-140), "b": GradientHistogram({120: 9}, 2.0**120)}, share=0.1
    )
    table, _, _ = _shown(_healthy(window=window))
    assert len(table.rows) < 70


def test_the_charts_draw() -> None:
    stats = _healthy(verified=((2.0**15, 0.01, False),))
    _, path, lost = _shown(stats)
    assert [series.label for series in path.series] == [
        "scale", "largest that overflows nowhere", "smallest that loses little", "skipped step",
    ]  # fmt: skip
    assert list(path.series[3].x) == [0, 0, 0, 1, 1]
    assert [y for y in path.series[3].y if not math.isnan(y)] == [17, 16, 16, 15]
    assert (lost.bands[0].low, lost.bands[0].high) == (6.0, 15.0)
    for chart in (path, lost):
        assert "<path" in draw_chart(chart)


def test_nothing_measured_draws_nothing() -> None:
    stats = LossScaleStats(False, (), "loop", "", None)
    assert (loss_scale_table(stats), loss_scale_chart(stats), window_chart(stats)) == ((), (), ())


@pytest.mark.parametrize(
    ("scale", "text"), [(65536.0, "2^16"), (1.0, "1"), (256.0, "256"), (0.5, "2^-1"), (3.0, "3"), (0.0, "0")]
)
def test_scales_are_written_as_one_reads_them(scale: float, text: str) -> None:
    assert power(scale) == text
