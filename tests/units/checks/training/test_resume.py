"""The check resume, on records. tests/units/training/test_resume.py has loops."""

from __future__ import annotations

from typing import Any

from ampcheck.checks.training.resume import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.protocol import Act, Event
from ampcheck.records.resume import NOT_DECLARED, Difference, ResumeStats, SavedStates

LIMITS = Limits()
WEIGHTS = Difference("weights", ("up.weight", "down.weight"), "up.weight differs by 0.1 of its norm", 0.1)


def judged(**facts: Any) -> Finding:
    (found,) = check(ResumeStats("loop", 3, **facts), LIMITS)
    return found


def test_a_run_that_ends_in_other_weights_names_what_was_forgotten() -> None:
    found = judged(differences=(WEIGHTS,), forgotten=(Difference("scaler", ("scaler",), "scaler: _scale 2 became 1"),))
    assert (found.verdict, found.where.module, found.observed) == (Verdict.FAIL, "up.weight", 0.1)
    assert "not as saved after loading: scaler (scaler: _scale 2 became 1)" in found.message
    assert found.hint == "save scaler.state_dict() and load it with scaler.load_state_dict()"
    losses = judged(differences=(Difference("losses", ("step 5",), "1 became 2"),))
    assert losses.verdict is Verdict.WARN
    random = judged(unaided=(WEIGHTS,), drew=True)
    assert (random.verdict, "random generators" in random.message) == (Verdict.WARN, True)


def test_equal_runs_pass_and_what_cannot_be_compared_says_why() -> None:
    assert (judged().verdict, judged().seen) == (Verdict.PASS, 6)
    assert judged(skipped=NOT_DECLARED).verdict is Verdict.SKIP
    assert judged(skipped="it is random").verdict is Verdict.INCOMPLETE
    assert judged(raised="save raised").verdict is Verdict.FAIL


def saved(*events: Event) -> list[Finding]:
    return check(SavedStates("loop", events), LIMITS)


def test_a_checkpoint_of_the_optimizer_holds_the_state_of_the_scaler() -> None:
    scale = Event(Act.SCALE, 0, "scaler", 1024.0)
    written = Event(Act.CHECKPOINT, 0, keys=("optimizer",), file="t.py", line=9)
    (lacking,) = saved(scale, written)
    assert (lacking.verdict, lacking.where.line) == (Verdict.FAIL, 9)
    (whole,) = saved(scale, Event(Act.SAVE, 0, "scaler"), written)
    assert (whole.verdict, whole.seen) == (Verdict.PASS, 1)
    assert saved(scale) == saved(written) == []


def test_a_scaler_that_takes_over_loads_the_state_of_the_one_before() -> None:
    first, update = Event(Act.SCALE, 0, "scaler", 1024.0), Event(Act.UPDATE, 0, "scaler", 1024.0, 2048.0)
    again = Event(Act.SCALE, 1, "scaler#2", 65536.0)
    (lost,) = saved(first, update, again)
    assert (lost.verdict, lost.observed, lost.limit) == (Verdict.FAIL, 65536.0, 2048.0)
    assert saved(first, update, Event(Act.LOAD, 1, "scaler#2"), again) == []
