"""What is concluded from statistics. No graph runs here: the statistics are made by hand."""

from __future__ import annotations

import math

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
