"""The check policy-drift, on records."""

from __future__ import annotations

from ampcheck.checks.policy.policy_drift import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.records.policy import (
    Change,
    Comparison,
    InstalledPolicy,
    LockComparison,
    Locked,
    LockedOp,
    OpPolicy,
    PolicyCalls,
    Raised,
)
from checks.policy.records import called, calls, policy

LIMITS = Limits()
CALLS = calls(called("aten::mm"))
LOCKED = Locked(
    "2.12.0", "cpu", {"aten::mm": LockedOp("lower_precision", {"float32 -> float16": (("net", "m.py:3"),)})}
)


def lock(locked: Locked, now: Locked = LOCKED, ran: PolicyCalls = CALLS, **rules: tuple[str, str]) -> LockComparison:
    return LockComparison(ran, locked, now, "CMD", {f"aten::{name}": rule for name, rule in rules.items()})


def test_a_lock_that_holds_counts_its_ops() -> None:
    (held,) = check(lock(LOCKED), LIMITS)
    assert (held.verdict, held.seen, held.observed) == (Verdict.PASS, 1, 1)
    assert "as locked under PyTorch 2.12.0: 1 ops in 1 combinations of dtypes and module" in held.message


def test_another_rule_is_a_failure_of_the_op_and_the_cause_of_others() -> None:
    other = Locked("2.12.0", "cpu", {"aten::mm": LockedOp("fp32", LOCKED.ops["aten::mm"].calls)})
    (rule,) = check(lock(other, mm=("fp32", "since 2.13")), LIMITS)
    assert (rule.verdict, rule.where.op, rule.where.line) == (Verdict.FAIL, "aten::mm", 3)
    assert "PyTorch 2.12.0: fp32 (floating inputs are cast to float32)" in rule.message
    assert "since 2.13; its tensors are float32 -> float16; used by 1 module: net" in rule.message
    assert rule.hint == "where the change is meant, refresh the lock: CMD"
    more = Locked("2.12.0", "cpu", other.ops | {"aten::exp": LockedOp("fp32", {"float16 -> float32": (("net", ""),)})})
    _, gone = check(lock(more, mm=("fp32", "since 2.13")), LIMITS)
    assert "every locked op must be called; aten::exp" in gone.message
    assert "it is in the modules of aten::mm, whose rule did" in gone.message


def test_a_model_that_ended_early_or_has_no_op_is_not_compared() -> None:
    (early,) = check(lock(LOCKED, ran=calls(raised=Raised("ValueError: no", "", Where()))), LIMITS)
    assert (early.verdict, "it raised ValueError: no" in early.message) == (Verdict.FAIL, True)
    empty = Locked("2.12.0", "cpu", {})
    (nothing,) = check(lock(empty, empty), LIMITS)
    assert (nothing.verdict, nothing.observed, nothing.limit) == (Verdict.FAIL, 0, 1)


def installed(*changes: Change, count: int = 2) -> InstalledPolicy:
    compared = Comparison(count, changes, (), {})
    return InstalledPolicy(policy(), "the snapshot of PyTorch 2.13.0", ("cpu", "cuda 13.0"), policy(), compared)


def test_the_installed_policy_differs_op_by_op_from_its_snapshot() -> None:
    (same,) = check(installed(), LIMITS)
    assert (same.verdict, same.seen) == (Verdict.PASS, 2)
    change = Change("aten::mm", OpPolicy("lower_precision"), OpPolicy("fp32", source="mine.cpp"))
    (found,) = check(installed(change), LIMITS)
    assert (found.verdict, found.where.op) == (Verdict.FAIL, "aten::mm")
    assert "2.13.0: lower_precision; it is: fp32, by a kernel of mine.cpp" in found.message
    (nothing,) = check(installed(count=0), LIMITS)
    assert nothing.verdict is Verdict.FAIL


def test_without_a_snapshot_of_the_device_it_warns() -> None:
    (alone,) = check(InstalledPolicy(policy()), LIMITS)
    assert (alone.verdict, "no snapshot was shipped" in alone.message) == (Verdict.WARN, True)
    (device,) = check(InstalledPolicy(policy(), "the snapshot"), LIMITS)
    assert (device.verdict, "has no policy of cuda to compare with" in device.message) == (Verdict.WARN, True)
