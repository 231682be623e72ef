"""What is concluded from statistics. No graph runs here: the statistics are made by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.records.telemetry import SiteStats, TelemetryStats
from ampcheck.telemetry.checks import check_telemetry, telemetry_tables

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP
LIMITS = Limits()


def site(order: int = 0, phase: str = "forward", **told: object) -> SiteStats:
    """A cast to float16 of 100 values around 1 in each of 10 calls."""
    where = Where(phase, f"blocks.{order}", "aten::gelu", "model.py", 10 + order)
    plain = SiteStats(where, "float16", True, order=(0, order), calls=10, numel=1000, amax=1.0, smallest=0.5, fed=True)
    return dataclasses.replace(plain, **told)


def stats(*sites: SiteStats, **told: object) -> TelemetryStats:
    return TelemetryStats("model", "casts", sites=sites, **({"graphs": 2, "calls": 20, "measured": 20} | told))


def found(check: str, *sites: SiteStats, harmed: bool | None = None) -> list[Finding]:
    return [one for one in check_telemetry(stats(*sites), LIMITS, harmed=harmed) if one.check == check]


def verdicts(check: str, *sites: SiteStats, harmed: bool | None = None) -> list[Verdict]:
    return [one.verdict for one in found(check, *sites, harmed=harmed)]


LOST = {"overflowed": 3, "bad": 2, "born": 2, "first": 4}
CARRIED = {"infs": 3, "bad": 2, "born": 0, "first": 4}
GRADIENT = {"phase": "backward", "infs": 3, "first": 0}


def test_values_that_are_well_are_a_pass_of_every_check_with_what_was_looked_at() -> None:
    findings = check_telemetry(stats(site(), site(1, "backward")), LIMITS)

    assert [one.check for one in findings] == [
        "overflow",
        "nonfinite-gradient",
        "silent-zero",
        "flush",
        "headroom",
        "coverage",
    ]
    assert {one.verdict for one in findings} == {PASS}
    assert all("2 graphs" in one.message for one in findings)


def test_an_overflow_that_later_values_carry_on_fails_at_the_value_where_it_began() -> None:
    (finding,) = found("overflow", site(), site(1, **LOST), site(2, **CARRIED))

    assert finding.verdict is FAIL
    assert finding.where == Where("forward", "blocks.1", "aten::gelu", "model.py", 11, step=4)
    assert "3 elements beyond float16" in finding.message
    assert "1 later values carry it on" in finding.message
    assert finding.hint


def test_an_overflow_that_nothing_carries_on_is_a_warning() -> None:
    (finding,) = found("overflow", site(0, **LOST), site(1))

    assert finding.verdict is WARN
    assert "no later measured value is inf or NaN" in finding.message


def test_an_overflow_in_the_last_value_of_all_fails_since_it_is_what_comes_out() -> None:
    assert verdicts("overflow", site(), site(1, **LOST)) == [FAIL]


@pytest.mark.parametrize(("harmed", "verdict"), [(True, FAIL), (False, WARN)])
def test_a_judge_of_the_outputs_has_the_last_word_on_an_overflow(harmed: bool, verdict: Verdict) -> None:
    assert verdicts("overflow", site(0, **LOST), site(1), harmed=harmed) == [verdict]


def test_an_infinity_that_the_model_writes_as_a_mask_is_no_finding() -> None:
    masked = site(0, infs=500, bad=10, born=0, first=0, written=True)

    assert verdicts("overflow", masked, site(1, infs=500, bad=10, born=0)) == [PASS]


def test_an_infinity_that_came_from_outside_of_the_graph_is_told_where_it_first_overflowed_only() -> None:
    inherited = site(1, infs=3, bad=2, born=2, first=4)  # of another graph behind a graph break

    assert [one.where.module for one in found("overflow", site(0, **LOST), inherited)] == ["blocks.0"]


def test_gradients_that_overflow_until_the_scaler_has_backed_off_are_a_pass() -> None:
    (finding,) = found("nonfinite-gradient", site(), site(1, **GRADIENT, bad=3, born=3, last=False))

    assert finding.verdict is PASS
    assert "finite again" in finding.message


def test_gradients_that_overflow_in_every_call_fail_where_it_begins() -> None:
    (finding,) = found(
        "nonfinite-gradient",
        site(),
        site(1, **GRADIENT, bad=10, born=10, last=True),
        site(2, **GRADIENT, bad=10, born=0, last=True),
    )

    assert finding.verdict is FAIL
    assert (finding.where.phase, finding.where.module) == ("backward", "blocks.1")


def test_gradients_that_overflowed_in_the_last_call_but_not_in_all_are_a_warning() -> None:
    assert verdicts("nonfinite-gradient", site(), site(1, **GRADIENT, bad=3, born=3, last=True)) == [WARN]


def test_a_gradient_that_never_becomes_finite_is_not_hidden_by_one_before_it_that_does() -> None:
    (finding,) = found(
        "nonfinite-gradient",
        site(),
        site(1, **GRADIENT, bad=3, born=3, last=False),
        site(2, **GRADIENT, bad=10, born=10, last=True),
    )

    assert finding.verdict is FAIL
    assert finding.where.module == "blocks.2"


def test_one_overflowing_call_does_not_tell_that_a_scaler_never_settles() -> None:
    once = site(1, **GRADIENT, calls=1, bad=1, born=1, last=True)

    assert verdicts("nonfinite-gradient", site(), once) == [WARN]


def test_a_pass_tells_what_was_not_looked_at() -> None:
    seen = stats(site(), every=10, calls=40, measured=4, unseen={"graphs to which no statistics could be added": 1})
    (finding,) = [one for one in check_telemetry(seen, LIMITS) if one.check == "coverage"]
    assert finding.verdict is PASS
    assert "no statistics could be added (1x)" in finding.message
    assert "(36x)" in finding.message


def test_gradients_of_a_forward_that_overflows_are_not_judged() -> None:
    (finding,) = found("nonfinite-gradient", site(0, **LOST), site(1, **GRADIENT, bad=10, born=10))

    assert finding.verdict is SKIP
    assert "see overflow" in finding.message


def test_without_backward_nothing_is_said_of_gradients() -> None:
    assert not found("nonfinite-gradient", site())


@pytest.mark.parametrize(("phase", "verdict"), [("backward", FAIL), ("forward", WARN)])
def test_a_cast_that_makes_everything_zero_in_every_call_is_a_silent_zero(phase: str, verdict: Verdict) -> None:
    empty = site(1, phase, flushed=1000, emptied=10, amax=1e-9, smallest=1e-10, lost=1.0)

    (finding,) = found("silent-zero", site(), empty)

    assert finding.verdict is verdict
    assert finding.where.phase == phase
    assert not [one for one in found("flush", site(), empty) if one.verdict is not PASS], "it is told once"


def test_a_cast_that_made_everything_zero_in_some_calls_is_none() -> None:
    assert verdicts("silent-zero", site(0, flushed=500, emptied=5)) == [PASS]


def test_a_flush_warns_from_where_it_loses_more_of_the_norm_than_a_rounding() -> None:
    roundoff = 2.0**-11

    assert verdicts("flush", site(0, flushed=100, lost=0.99 * roundoff)) == [PASS]
    (finding,) = found("flush", site(0, flushed=100, lost=1.01 * roundoff))
    assert finding.verdict is WARN
    assert (finding.observed, finding.limit) == (1.01 * roundoff, roundoff)


@pytest.mark.parametrize(("amax", "verdict"), [(65504 / 4, PASS), (65504 / 3.9, WARN)])
def test_headroom_warns_within_a_factor_of_the_end_of_the_format(amax: float, verdict: Verdict) -> None:
    assert verdicts("headroom", site(0, amax=amax)) == [verdict]


def test_gradients_near_the_end_are_where_a_loss_scale_holds_them() -> None:
    assert verdicts("headroom", site(), site(1, "backward", amax=60000.0)) == [PASS]


def test_the_worst_come_first_and_no_more_than_a_reader_takes() -> None:
    many = [site(place, **LOST) for place in range(8)]

    assert len(found("overflow", *many)) == 5


def test_nothing_measured_is_a_failure_that_names_what_was_not_seen() -> None:
    (finding,) = check_telemetry(stats(measured=0, unseen={"graphs that could not be compiled": 2}), LIMITS)

    assert (finding.check, finding.verdict) == ("coverage", FAIL)
    assert "graphs that could not be compiled (2x)" in finding.message


@pytest.mark.parametrize(("level", "told"), [("casts", True), ("all", False)])
def test_where_nothing_was_measured_a_wider_level_is_named_if_there_is_one(level: str, told: bool) -> None:
    (finding,) = check_telemetry(dataclasses.replace(stats(measured=0), level=level), LIMITS)

    assert finding.verdict is FAIL
    assert ("level='all'" in finding.hint) is told


def test_a_release_that_cannot_be_watched_is_a_skip_with_the_reason() -> None:
    (finding,) = check_telemetry(stats(measured=0, skipped="PyTorch 9.9 is new"), LIMITS)

    assert (finding.check, finding.verdict) == ("coverage", SKIP)
    assert "PyTorch 9.9 is new" in finding.message


def test_the_table_has_what_lost_most_first_and_says_what_measuring_changed() -> None:
    quiet, flushed, lost = site(), site(1, flushed=9, lost=0.5), site(2, **LOST)

    (table,) = telemetry_tables(stats(quiet, flushed, lost, perturbation=0.0))
    (changed,) = telemetry_tables(stats(quiet, perturbation=1e-4, perturbed=1))

    module = table.columns.index("module")
    assert [row[module] for row in table.rows] == ["blocks.2", "blocks.1", "blocks.0"]
    assert "changed no result" in table.note
    assert "by at most 0.0001" in changed.note
    assert telemetry_tables(stats()) == ()


def test_statistics_of_the_same_value_in_two_graphs_add_up() -> None:
    both = site(0, **LOST, amax=2.0) + site(0, amax=3.0, smallest=0.25)

    assert (both.calls, both.numel, both.overflowed, both.first, both.last) == (20, 2000, 3, 4, False)
    assert (both.amax, both.smallest) == (3.0, 0.25)
    assert math.isinf(SiteStats(Where(), "float16", True).smallest)
