"""The check peak-memory, on records."""

from __future__ import annotations

from ampcheck.checks.speed.peak_memory import check
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Verdict
from ampcheck.records.startup import StartupStats
from checks.speed.records import HIT, launch, starts

MIB = 2**20


def peak(compiled: int | None, eager: int | None = 100 * MIB) -> StartupStats:
    cold, before = launch(memory=compiled, memory_untold="no profiler"), launch(memory=eager, graph=None)
    return starts(launch(HIT), cold, before)


def test_a_compiled_step_needs_about_the_memory_of_an_eager_one() -> None:
    (fits,) = check(peak(111 * MIB), StartupLimits())
    assert (fits.verdict, fits.observed, fits.limit) == (Verdict.PASS, 111 * MIB, 100 * MIB * 1.1 + MIB)
    (more,) = check(peak(150 * MIB), StartupLimits())
    assert (more.verdict, "it needs 150 MiB, 1.5 times as much" in more.message) == (Verdict.FAIL, True)


def test_bytes_alone_are_judged_without_eager_and_unknown_memory_is_skipped() -> None:
    (bytes_alone,) = check(peak(2 * MIB, None), StartupLimits(memory=None, bytes=MIB))
    assert (bytes_alone.verdict, bytes_alone.limit) == (Verdict.FAIL, MIB)
    (unknown,) = check(peak(None), StartupLimits())
    assert (unknown.verdict, unknown.message[-11:]) == (Verdict.SKIP, "no profiler")
    assert check(peak(2 * MIB), StartupLimits(memory=None)) == []
