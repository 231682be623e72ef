"""The check overflow, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.run import Verdict, Where
from ampcheck.records import faults
from ampcheck.records.faults import Fault
from ampcheck.records.results import Examination
from checks.range.records import (
    CARRIED,
    FAULT,
    HEALTHY,
    LOSSY,
    LOST,
    OUTPUT,
    PLACE,
    SEEN,
    found,
    run_findings,
    run_verdicts,
    site,
    verdicts,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_an_infinite_output_fails_also_where_no_op_was_seen_to_make_it() -> None:
    infinite = replace(OUTPUT, seen=replace(SEEN, lost=3))
    assert run_verdicts(replace(HEALTHY, errors=(infinite,)), "overflow") == [Verdict.FAIL]
    loss = replace(infinite, key=("loss", "", 0))
    assert run_verdicts(replace(HEALTHY, errors=(OUTPUT, loss)), "overflow") == [Verdict.FAIL]


def test_an_absorbed_overflow_warns_one_that_reaches_a_result_fails_and_a_mask_is_silent() -> None:
    lost = replace(FAULT, kind=faults.OVERFLOW, examination=Examination(8, lost=2), exact_amax=1e6)
    assert run_verdicts(replace(HEALTHY, faults=(lost,)), "overflow") == [Verdict.FAIL]
    assert run_verdicts(replace(HEALTHY, faults=(replace(lost, reaches={}),)), "overflow") == [Verdict.WARN]
    assert run_verdicts(replace(HEALTHY, faults=(replace(lost, kind=faults.MASK),)), "overflow") == [Verdict.PASS]


def test_an_absorbed_overflow_of_the_scaled_backward_is_silent() -> None:
    """No `GradScaler` sees it: a relu that was off takes it away, and the step is made."""
    lost = replace(
        FAULT, kind=faults.OVERFLOW, where=Where(phase="backward"), examination=Examination(8, lost=2), reaches={}
    )
    scaled = replace(HEALTHY, scale=2.0**16, faults=(lost,))
    assert run_verdicts(scaled, "overflow") == [Verdict.PASS]
    assert run_verdicts(replace(scaled, scale=1.0), "overflow") == [Verdict.WARN]
    assert run_verdicts(replace(scaled, faults=(replace(lost, reaches={"weight": 1.0}),)), "overflow") == [Verdict.FAIL]


def test_an_overflow_of_a_backward_pass_names_the_loss_scale_as_a_cure() -> None:
    """Its line is forward code, which the message does not blame."""
    place = replace(PLACE, phase="backward", op="aten::_to_copy")
    fault = Fault(faults.OVERFLOW, place, "float16", LOSSY, (4, 16), 1e6, 0.0, 1e6, reaches={"gradient w": 1.0})
    stats = replace(HEALTHY, faults=(fault,), sources={("model.py", 3): "y = x.float()"}, scale=128.0)
    (finding,) = run_findings(stats, "overflow")
    assert "_to_copy in the backward pass at `y = x.float()`" in finding.message
    assert "torch.amp.GradScaler lower the loss scale (here 128)" in finding.hint
    forward = replace(stats, faults=(replace(fault, where=replace(place, phase="forward")),))
    (finding,) = run_findings(forward, "overflow")
    assert "loss scale" not in finding.hint


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


def test_the_worst_come_first_and_no_more_than_a_reader_takes() -> None:
    many = [site(place, **LOST) for place in range(8)]

    assert len(found("overflow", *many)) == 5
