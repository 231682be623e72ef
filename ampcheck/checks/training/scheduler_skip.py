"""Requires: A learning rate scheduler steps only where its optimizer stepped. Fails when it steps after scaler.step has
skipped the optimizer; warns when a new one steps before its optimizer did for the first time.

Measured: Optimizer steps, skipped ones and scheduler steps are compared. If the scaler skips none by itself, one
gradient is made infinite in a run of its own.

Causes: A call of scheduler.step() after scaler.step(optimizer), whose return value does not show whether it stepped.

Fix: Compare scaler.get_scale() before and after scaler.update(), and step the scheduler only if it did not fall.
"""

from __future__ import annotations

from collections import defaultdict

from ampcheck.checks.training._order import stepped_first
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.core.text import counted
from ampcheck.records.protocol import Act, Event, ProtocolStats

CHECK = Check(
    "scheduler-skip",
    "training",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("ProtocolStats",),
    order=603,
    evidence=("tests/corpus/training/warm_up_counts_skipped_steps",),
)


def check(stats: ProtocolStats, limits: Limits) -> list[Finding]:
    """A scheduler does not step where the scaler skipped its optimizer's step."""
    steps = [e for e in stats.events if e.act is Act.SCHEDULER_STEP]
    skips = [e for e in stats.events if e.act is Act.SCALER_STEP and e.skipped]
    if not steps:
        return [CHECK.absent(stats.subject, "no scheduler stepped")]
    early = stepped_first(stats.events)
    since: dict[str, list[Event]] = defaultdict(list)
    wrong: list[tuple[Event, Event]] = []
    for event in stats.events:
        if event.act is Act.SCALER_STEP:
            for scheduler in {e.who for e in steps if e.optimizers == event.optimizers}:
                since[scheduler].append(event)
        elif event.act is Act.SCHEDULER_STEP:
            before = since.pop(event.who, [])
            if before and all(step.skipped for step in before):
                wrong.append((event, before[-1]))
    if not wrong and early is not None:
        hint = "call scheduler.step() after optimizer.step()"
        return [CHECK.warn(stats.subject, early[1], where=early[0].where, hint=hint)]
    if not skips:
        return [CHECK.absent(stats.subject, "no optimizer step was skipped")]
    if not wrong:
        text = f"the scaler skipped {counted(len(skips), 'optimizer steps')}, and no scheduler stepped for one of them"
        return [CHECK.passed(stats.subject, text, len(skips))]
    done = sum(e.act is Act.SCALER_STEP and not e.skipped for e in stats.events)
    first, skipped = wrong[0]
    message = (
        f"a scheduler must step with the optimizer; {first.who} stepped {counted(len(wrong), 'times')} after "
        f"scaler.step had skipped {skipped.optimizers[0]}: {counted(done, 'updates')} but "
        f"{counted(len(steps), 'scheduler steps')}{stats.in_trial}"
    )
    hint = (
        "compare the scale around scaler.update() and step the scheduler only where it did not fall: "
        "before = scaler.get_scale(); scaler.update(); if scaler.get_scale() >= before: scheduler.step()"
    )
    shown = Evidence(where=first.where, observed=len(wrong), limit=0.0, unit="steps", hint=hint)
    return [CHECK.fail(stats.subject, message, **shown)]
