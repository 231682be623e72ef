"""The check compiled-error, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.run import Verdict
from ampcheck.records.results import Examination
from ampcheck.shadow.freedom import Freedom
from checks.compile.records import U16, U32, error, only, stats, verdicts


@pytest.mark.parametrize("kind", ["output", "loss", "update", "buffer", "gradient"])
def test_what_is_beyond_its_bound_fails_and_what_is_within_passes(kind: str) -> None:
    check = "compiled-gradient" if kind == "gradient" else "compiled-error"
    assert verdicts(stats(error(kind)), check) == [Verdict.PASS]
    found = only(stats(error(kind, error=U16)), check, Verdict.FAIL)
    assert "as near to float64 as rounding allows" in found.message
    assert (found.observed, found.limit) == (U16, 32 * U32)


def test_an_overflow_that_compilation_hides_is_a_warning() -> None:
    hidden = error(hidden=7, eager=Examination(100, lost=7))
    assert "eager mode overflows" in only(stats(hidden), "compiled-error", Verdict.WARN).message
    assert Verdict.FAIL not in verdicts(stats(hidden), "compiled-error")


def test_what_a_decision_near_a_tie_moves_is_a_warning_at_most() -> None:
    moved = error(error=0.3)
    assert verdicts(stats(moved), "compiled-error") == [Verdict.FAIL]
    near = Freedom(near_ties=3, decided=100)
    assert verdicts(stats(moved, freedom=near), "compiled-error") == [Verdict.WARN]
    assert verdicts(stats(error(error=30.0), freedom=near), "compiled-error") == [Verdict.FAIL]


def test_an_index_may_turn_at_a_near_tie_and_nowhere_else() -> None:
    index = error(dtype="int64", error=0.01)
    assert verdicts(stats(index), "compiled-error") == [Verdict.FAIL]
    assert verdicts(stats(index, freedom=Freedom(1, 10)), "compiled-error") == [Verdict.WARN]
    assert verdicts(stats(error(dtype="int64", error=0.5), freedom=Freedom(1, 10)), "compiled-error") == [Verdict.FAIL]


def test_a_cast_that_the_author_means_must_not_be_left_out() -> None:
    finer = error(eager_error=U16, apart=U16, unit=U16)
    assert verdicts(stats(finer, casts=True), "compiled-error") == [Verdict.FAIL]
    assert verdicts(stats(finer), "compiled-error") == [Verdict.PASS]
    assert verdicts(stats(replace(finer, apart=U16 / 4), casts=True), "compiled-error") == [Verdict.PASS]


def test_a_float32_output_with_sixteen_bits_of_digits_in_eager_mode_alone_is_a_warning() -> None:
    finer = error(eager_error=U16, apart=U16, unit=U16, beyond=False)
    assert verdicts(stats(finer, autocast=False), "compiled-error") == [Verdict.PASS, Verdict.WARN]
    assert verdicts(stats(finer), "compiled-error") == [Verdict.PASS]
    coarse = error(error=U16 / 2, eager_error=U16, apart=U16, unit=U16, beyond=False)
    assert verdicts(stats(coarse, autocast=False), "compiled-error") == [Verdict.PASS]


def test_of_what_nothing_is_known_there_is_no_verdict() -> None:
    nan = error(judged=0, nan=100)
    assert verdicts(stats(nan), "compiled-error") == [Verdict.INCOMPLETE]
    assert verdicts(stats(nan), "coverage") == [Verdict.INCOMPLETE]
    empty = error(judged=0)
    assert verdicts(stats(empty), "compiled-error") == [Verdict.SKIP]
    assert verdicts(stats(empty), "coverage") == [Verdict.SKIP]
    assert verdicts(stats(empty, error(name="other")), "compiled-error") == [Verdict.PASS, Verdict.SKIP]
