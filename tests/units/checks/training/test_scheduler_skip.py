"""The check scheduler-skip, on records."""

from __future__ import annotations

from ampcheck.checks.training.scheduler_skip import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.protocol import Act, Event, ProtocolStats


def judged(*events: Event, injected: int | None = None) -> Finding:
    (found,) = check(ProtocolStats("loop", events, 2, injected=injected), Limits())
    return found


def step(skipped: bool = False) -> Event:
    return Event(Act.SCALER_STEP, 1, "scaler", optimizers=("optimizer",), skipped=skipped)


def schedule(begins: bool = False) -> Event:
    return Event(Act.SCHEDULER_STEP, 1, "scheduler", optimizers=("optimizer",), begins=begins, file="t.py", line=9)


def test_a_scheduler_that_steps_after_a_skipped_step_fails() -> None:
    found = judged(step(), schedule(), step(skipped=True), schedule(), injected=1)
    assert (found.verdict, found.where.line, found.observed, found.limit) == (Verdict.FAIL, 9, 1, 0)
    assert "1 update but 2 scheduler steps (in a run of its own, in which the gradient of step 1" in found.message


def test_one_that_begins_before_its_optimizer_warns_and_one_that_waits_passes() -> None:
    assert judged(schedule(begins=True), step()).verdict is Verdict.WARN
    assert judged(step(skipped=True), step(), schedule()).verdict is Verdict.PASS
    assert judged(step(), schedule()).message == "no optimizer step was skipped"
    assert judged(step()).message == "no scheduler stepped"
