"""What is concluded from statistics. No graph runs here: the statistics are made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from checks.range.records import (
    LIMITS,
    LOST,
    site,
    stats,
)

from ampcheck.core.run import Verdict, Where
from ampcheck.records.telemetry import SiteStats
from ampcheck.telemetry.checks import check_telemetry, telemetry_tables

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


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


def test_a_pass_tells_what_was_not_looked_at() -> None:
    seen = stats(site(), every=10, calls=40, measured=4, unseen={"graphs to which no statistics could be added": 1})
    (finding,) = [one for one in check_telemetry(seen, LIMITS) if one.check == "coverage"]
    assert finding.verdict is PASS
    assert "no statistics could be added (1x)" in finding.message
    assert "(36x)" in finding.message


def test_nothing_measured_is_a_failure_that_names_what_was_not_seen() -> None:
    (finding,) = check_telemetry(stats(measured=0, unseen={"graphs that could not be compiled": 2}), LIMITS)

    assert (finding.check, finding.verdict) == ("coverage", FAIL)
    assert "graphs that could not be compiled (2x)" in finding.message


@pytest.mark.parametrize(("level", "told"), [("casts", True), ("all", False)])
def test_where_nothing_was_measured_a_wider_level_is_named_if_there_is_one(level: str, told: bool) -> None:
    (finding,) = check_telemetry(replace(stats(measured=0), level=level), LIMITS)

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
