"""From the record of a compiled run to its findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ampcheck.compiled.accuracy.checks import CHECKS, check_accuracy
from ampcheck.compiled.accuracy.stats import (
    AOT_EAGER,
    BACKWARD_AUTOCAST,
    EMULATED,
    AccuracyStats,
    Exceptions,
    Trial,
)
from ampcheck.core.arm import Arm
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Verdict
from ampcheck.shadow import Examination
from ampcheck.shadow.compare import ResultError, with_verdict
from ampcheck.shadow.freedom import Freedom

U16, U32 = 2.0**-8, 2.0**-24


def error(kind: str = "output", name: str = "", step: int = 0, **facts: Any) -> ResultError:
    """A result with an error of one rounding of float32; `error=` makes it larger, and beyond."""
    off, eager = facts.pop("error", U32), facts.pop("eager_error", U32)
    flagged = int(facts.pop("beyond", off > 32 * U32))
    seen = Examination(100, flagged=flagged, error=off, spread=U32, limit=32 * U32 if flagged else 0.0, impact=off)
    plain = ResultError(
        (kind, name, step), "float32", seen, U32, off,
        eager=Examination(100, error=eager), eager_norm=eager, apart=off, judged=100,
    )  # fmt: skip
    return replace(plain, **facts)


def stats(*errors: ResultError, freedom: Freedom | None = None, casts: bool = False, **facts: Any) -> AccuracyStats:
    whole = AccuracyStats("model", Arm("bfloat16"), "bfloat16", autocast=True, graphs=1)
    judged = tuple(with_verdict(e, freedom or Freedom(), casts=casts) for e in errors)
    return replace(whole, errors=judged, coverage=Coverage({"outputs": len(errors)}), **facts)


def verdicts(record: AccuracyStats, check: str) -> list[Verdict]:
    return [f.verdict for f in check_accuracy(record, Limits()) if f.check == check]


def only(record: AccuracyStats, check: str, verdict: Verdict) -> Finding:
    (finding,) = [f for f in check_accuracy(record, Limits()) if f.check == check and f.verdict is verdict]
    return finding


@pytest.mark.parametrize("kind", ["output", "loss", "update", "buffer", "gradient"])
def test_what_is_beyond_its_bound_fails_and_what_is_within_passes(kind: str) -> None:
    check = "compiled-gradient" if kind == "gradient" else "compiled-error"
    assert verdicts(stats(error(kind)), check) == [Verdict.PASS]
    found = only(stats(error(kind, error=U16)), check, Verdict.FAIL)
    assert "as near to float64 as rounding allows" in found.message
    assert (found.observed, found.limit) == (U16, 32 * U32)


def test_inf_or_nan_in_compiled_code_alone_fails_unless_eager_mode_overflows_about_as_much() -> None:
    lost = error("gradient", lost=4, seen=Examination(100, lost=4))
    assert "4 elements of gradient are inf or NaN" in only(stats(lost), "compiled-gradient", Verdict.FAIL).message
    edge = replace(lost, lost=1, eager=Examination(100, lost=2))
    assert "close to the maximum" in only(stats(edge), "compiled-gradient", Verdict.WARN).hint
    assert verdicts(stats(replace(edge, lost=50)), "compiled-gradient") == [Verdict.FAIL]
    rest = replace(edge, seen=Examination(100, lost=1, flagged=1, error=0.5))
    assert verdicts(stats(rest), "compiled-gradient") == [Verdict.FAIL], "the edge does not excuse the rest"


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


def test_a_gradient_may_differ_by_the_sides_of_kinks_and_an_output_may_not() -> None:
    kinks = Freedom(kinks=1e-4, kinked=1000)
    assert verdicts(stats(error("gradient", error=0.005), freedom=kinks), "compiled-gradient") == [Verdict.PASS]
    assert verdicts(stats(error("gradient", error=0.05), freedom=kinks), "compiled-gradient") == [Verdict.FAIL]
    assert verdicts(stats(error("gradient", step=1, error=0.05), freedom=kinks), "compiled-gradient") == [Verdict.PASS]
    assert verdicts(stats(error(error=0.005), freedom=kinks), "compiled-error") == [Verdict.FAIL]


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


def test_a_pass_names_the_largest_error_of_what_is_known() -> None:
    noise = error("gradient", "noise", error=40.0, beyond=False, seen=Examination(100, error=40.0, spread=5.0))
    found = only(stats(noise, error("gradient", "known")), "compiled-gradient", Verdict.PASS)
    assert "known" in found.message


@pytest.mark.parametrize(
    ("trials", "text"),
    [
        ((Trial(BACKWARD_AUTOCAST, True),), f'{BACKWARD_AUTOCAST} = "off"'),
        ((Trial(EMULATED, True), Trial(AOT_EAGER, True)), "emulate_precision_casts = True"),
        ((Trial(EMULATED, False), Trial(AOT_EAGER, False)), "before Inductor"),
        ((Trial(EMULATED, False), Trial(AOT_EAGER, True)), "Inductor's kernels are at fault"),
    ],
)
def test_the_stage_at_fault_and_the_setting_that_was_tried_are_named(trials: tuple[Trial, ...], text: str) -> None:
    found = only(stats(error("gradient", error=U16), trials=trials), "compiled-gradient", Verdict.FAIL)
    assert text in f"{found.message} {found.hint}"
    assert (BACKWARD_AUTOCAST in found.hint) == (trials[0].name == BACKWARD_AUTOCAST)


def test_what_only_one_side_raises_is_a_finding_in_either_direction() -> None:
    def raised(**facts: str) -> Verdict:
        (verdict,) = verdicts(stats(exceptions=Exceptions(**facts)), "compiled-exception")
        return verdict

    assert raised(compiled="ValueError: no") is Verdict.FAIL
    assert raised(eager="ValueError: no", float32="ValueError: no") is Verdict.FAIL
    assert raised(eager="ValueError: no") is Verdict.WARN
    assert raised(eager="ValueError: no", compiled="ValueError: no") is Verdict.SKIP
    assert raised(compiled="no compiler", missing="no compiler") is Verdict.SKIP


def test_other_dtypes_shapes_or_containers_fail() -> None:
    eager = {"step 0": "tuple", "step 0, 0": "float32 [2]"}
    same = stats(error(), eager_shapes=eager, compiled_shapes=dict(eager))
    assert verdicts(same, "compiled-dtype") == [Verdict.PASS]
    for other in ({"step 0, 0": "bfloat16 [2]"}, {"step 0": "list"}, {"step 0, 1": "float32 [2]"}):
        differs = replace(same, compiled_shapes={**eager, **other})
        assert verdicts(differs, "compiled-dtype") == [Verdict.FAIL], other


def test_nothing_compiled_and_nothing_compared_are_no_pass() -> None:
    for empty in (stats(error(), graphs=0), stats(), stats(exceptions=Exceptions(eager="no", compiled="no"))):
        assert Verdict.PASS not in verdicts(empty, "compiled-error")
        assert verdicts(empty, "coverage") == [Verdict.FAIL]
    random = stats(incomparable="other random numbers")
    assert {*verdicts(random, "compiled-error"), *verdicts(random, "coverage")} == {Verdict.SKIP}


def test_every_check_says_something_of_every_run() -> None:
    for record in (stats(error(), error("gradient")), stats(), stats(exceptions=Exceptions(eager="no"))):
        assert {f.check for f in check_accuracy(record, Limits())} == set(CHECKS)
