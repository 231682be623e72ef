"""The check autocast-state, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.autocast.autocast_state import check
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Verdict
from ampcheck.records.graphs import GraphStats
from checks.autocast.records import LIMITS, block
from checks.range.records import HEALTHY


def test_each_setting_that_a_block_leaves_changed_is_named() -> None:
    (kept,) = check(block(), LIMITS)
    assert (kept.verdict, kept.seen) == (Verdict.PASS, 20)
    (left,) = check(block(changed={"autocast of cpu": (False, True), "TF32": ("off", "on")}), LIMITS)
    assert (left.verdict, left.observed, left.limit) == (Verdict.FAIL, 2, 0)
    assert "autocast of cpu was False and is True; TF32 was off and is on" in left.message
    assert "an exception inside a region" in left.hint
    (other,) = check(block(changed={"TF32": ("off", "on")}), LIMITS)
    assert "finally block" in other.hint


def test_a_model_and_a_compiled_call_leave_them_too() -> None:
    assert list(check(HEALTHY, LIMITS)) == []
    (model,) = check(replace(HEALTHY, left={"grad mode": ("on", "off")}), LIMITS)
    assert (model.verdict, model.where.phase) == (Verdict.FAIL, "forward")
    assert "grad mode was on and is off" in model.message
    graphs = GraphStats("model", state_changes={"autocast": ("off", "on")}, changed_by="eager")
    (compiled,) = check(graphs, GraphLimits())
    assert (compiled.verdict, compiled.where.phase) == (Verdict.FAIL, "compile")
    assert "autocast off before and on after under backend='eager'" in compiled.message
    assert list(check(replace(graphs, state_changes={}), GraphLimits())) == []
