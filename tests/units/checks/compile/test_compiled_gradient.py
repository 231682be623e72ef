"""The check compiled-gradient, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.run import Verdict
from ampcheck.records.accuracy import (
    AOT_EAGER,
    BACKWARD_AUTOCAST,
    EMULATED,
    Trial,
)
from ampcheck.records.results import Examination
from ampcheck.shadow.freedom import Freedom
from checks.compile.records import U16, error, only, stats, verdicts


def test_inf_or_nan_in_compiled_code_alone_fails_unless_eager_mode_overflows_about_as_much() -> None:
    lost = error("gradient", lost=4, seen=Examination(100, lost=4))
    assert "4 elements of gradient are inf or NaN" in only(stats(lost), "compiled-gradient", Verdict.FAIL).message
    edge = replace(lost, lost=1, eager=Examination(100, lost=2))
    assert "close to the maximum" in only(stats(edge), "compiled-gradient", Verdict.WARN).hint
    assert verdicts(stats(replace(edge, lost=50)), "compiled-gradient") == [Verdict.FAIL]
    rest = replace(edge, seen=Examination(100, lost=1, flagged=1, error=0.5))
    assert verdicts(stats(rest), "compiled-gradient") == [Verdict.FAIL], "the edge does not excuse the rest"


def test_a_gradient_may_differ_by_the_sides_of_kinks_and_an_output_may_not() -> None:
    kinks = Freedom(kinks=1e-4, kinked=1000)
    assert verdicts(stats(error("gradient", error=0.005), freedom=kinks), "compiled-gradient") == [Verdict.PASS]
    assert verdicts(stats(error("gradient", error=0.05), freedom=kinks), "compiled-gradient") == [Verdict.FAIL]
    assert verdicts(stats(error("gradient", step=1, error=0.05), freedom=kinks), "compiled-gradient") == [Verdict.PASS]
    assert verdicts(stats(error(error=0.005), freedom=kinks), "compiled-error") == [Verdict.FAIL]


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
