"""The check stagnation, on records. tests/units/training/test_stagnation.py has loops."""

from __future__ import annotations

from typing import Any

from ampcheck.checks.training.stagnation import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.stagnation import AVERAGE, SUM, Decay, StagnationStats, Stop, TensorUpdates, VanishedConstant


def updates(lost: int = 0, role: str = "parameter", **facts: Any) -> TensorUpdates:
    plain: dict[str, Any] = {"moved": 100, "lost": lost, "steps": 3}
    return TensorUpdates(role, "weight", "bfloat16", 100, **(plain | facts))


def judged(*tensors: TensorUpdates, **facts: Any) -> list[Finding]:
    plain: dict[str, Any] = {"steps": 3, "looked": 4, "narrow": len(tensors), "tensors": tensors}
    return check(StagnationStats("loop", **(plain | facts)), Limits())


def test_updates_that_are_lost_fail_from_nine_tenths_on_and_warn_from_half() -> None:
    verdicts = [judged(updates(lost))[0].verdict for lost in (95, 60, 10)]
    assert verdicts == [Verdict.FAIL, Verdict.WARN, Verdict.PASS]
    (doubtful,) = judged(updates(95, doubt="only 4 updates"))
    assert (doubtful.verdict, "(only 4 updates)" in doubtful.message) == (Verdict.WARN, True)
    (carried,) = judged(updates(95, compensates=True))
    assert carried.verdict is Verdict.PASS


def test_a_decay_that_changes_nothing_fails() -> None:
    (found,) = judged(updates(decay=Decay(0.9999, 100, 95, "aten::mul_")))
    assert (found.verdict, found.where.op, found.observed) == (Verdict.FAIL, "aten::mul_", 0.95)


def test_a_sum_and_an_average_that_stand_still_say_when() -> None:
    (stops,) = judged(updates(role="buffer", stop=Stop(SUM, 1.0, 0.9, 250, 256.0, 1.0)))
    assert (stops.verdict, stops.observed, stops.unit) == (Verdict.FAIL, 250, "steps")
    assert "integer" in stops.hint
    far, near = (Stop(AVERAGE, 0.999, distance, 40, 1.0, 0.1) for distance in (0.5, 0.15))
    assert [judged(updates(role="state", stop=stop))[0].verdict for stop in (far, near)] == [Verdict.FAIL, Verdict.WARN]


def test_a_constant_that_vanishes_names_its_option() -> None:
    constant = VanishedConstant(1e-8, "float16", "aten::add", "t.py", 3, 2, ("exp_avg_sq",), "eps")
    (found,) = judged(vanished=(constant,), tensors=())
    assert (found.verdict, found.kind, found.names, found.where.line) == (Verdict.FAIL, "guard", ("exp_avg_sq",), 3)
    assert "but eps of the optimizer, 1e-08, rounds to zero in float16" in found.message


def test_what_was_not_updated_is_incomplete_and_float32_passes() -> None:
    (waiting,) = judged(updates(moved=0, steps=0), waiting=frozenset({"other"}))
    assert (waiting.verdict, "other have gradients" in waiting.message) == (Verdict.INCOMPLETE, True)
    assert (judged()[0].verdict, judged()[0].seen) == (Verdict.PASS, 4)
    assert judged(steps=0, error="step 0: no").pop().message.endswith("no step came to its end: step 0: no")
