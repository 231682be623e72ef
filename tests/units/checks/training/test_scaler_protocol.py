"""The check scaler-protocol, on records. tests/units/training/test_protocol.py has each rule of it."""

from __future__ import annotations

from typing import Any

from ampcheck.checks.training.scaler_protocol import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.records.protocol import Act, Event, ProtocolStats
from ampcheck.records.reductions import Drift, ReplicaStats

SCALE = Event(Act.SCALE, 0, "scaler", 1024.0)
BACKWARD = Event(Act.BACKWARD, 0, "scaler", 1024.0, scaled=True, optimizers=("optimizer",), file="t.py", line=4)
CLIP = Event(Act.CLIP, 0, optimizers=("optimizer",), limit=1.0, file="t.py", line=5)
UNSCALE = Event(Act.UNSCALE, 0, "scaler", 1024.0, optimizers=("optimizer",))
STEP = Event(Act.SCALER_STEP, 0, "scaler", 1024.0, optimizers=("optimizer",))
UPDATE = Event(Act.UPDATE, 0, "scaler", 1024.0, 1024.0)


def judged(*events: Event, **facts: Any) -> list[Finding]:
    return check(ProtocolStats("loop", events, 1, **facts), Limits())


def test_calls_in_their_order_pass_and_a_clip_of_scaled_gradients_fails() -> None:
    (right,) = judged(SCALE, BACKWARD, UNSCALE, CLIP, STEP, UPDATE)
    assert (right.verdict, right.seen) == (Verdict.PASS, 3)
    (clip,) = judged(SCALE, BACKWARD, CLIP, STEP, UPDATE)
    assert (clip.verdict, clip.where.line, clip.kind) == (Verdict.FAIL, 5, "clip")
    assert "those of optimizer still were 1024 times too large" in clip.message
    assert [f.verdict for f in judged(SCALE, BACKWARD, CLIP, STEP, UPDATE, invariant=True)] == [Verdict.PASS]


def test_float16_without_a_scaler_fails_where_gradients_vanish() -> None:
    plain = Event(Act.BACKWARD, 0, low=("float16",), optimizers=("optimizer",), file="t.py", line=4)
    (vanish,) = judged(plain, lost=0.5)
    assert (vanish.verdict, vanish.observed, vanish.limit) == (Verdict.FAIL, 0.5, 0.1)
    (risk,) = judged(plain, lost=0.0)
    assert risk.verdict is Verdict.WARN
    assert judged()[0].verdict is Verdict.SKIP


def test_ranks_that_a_loss_scale_sets_apart_fail() -> None:
    drift = Drift(1, (0, 1), ("weight",), text="their scales differ", hint="step alike", scaler=True)
    (found,) = check(ReplicaStats("loop", drift, Where("update", step=1)), Limits())
    assert (found.verdict, found.observed, found.unit, found.hint) == (Verdict.FAIL, 1, "parameters", "step alike")
    assert "1 parameter (weight) of ranks 0, 1 part in step 1 and do not meet again" in found.message
