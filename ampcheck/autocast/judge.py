"""Verdicts on autocast itself: `assert_policy`, and for `audit` the ops that a model sends through it and its use."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ampcheck.autocast.calls import measure_calls
from ampcheck.autocast.drift import judge_drift
from ampcheck.autocast.emulate import arm_of
from ampcheck.autocast.guards.guard import GUARD_CHECKS as GUARD_CHECKS
from ampcheck.autocast.guards.guard import judge_call
from ampcheck.autocast.locks.lock import (
    Devices,
    Dtypes,
    LockTarget,
    PathLike,
    callers_folder,
    compare_lock,
    gap_table,
    write_lock,
)
from ampcheck.autocast.policy import load_release, nearest, releases
from ampcheck.autocast.probe import build, measure_policy
from ampcheck.autocast.state import short
from ampcheck.checks import findings as findings_of
from ampcheck.checks import needing
from ampcheck.core.arguments import DType
from ampcheck.core.arm import armed
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.plan import Plan
from ampcheck.core.run import Coverage, Finding, Run, Table
from ampcheck.core.subject import Kind, Subject
from ampcheck.core.updating import is_updating
from ampcheck.outcome.raising import verify
from ampcheck.records.policy import OtherPolicy, PolicyCalls, PolicyGap
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import is_users

POLICY_CHECKS = (*needing(PolicyGap.__name__), *needing(PolicyCalls.__name__))
CHECKS = (*dict.fromkeys((*GUARD_CHECKS, *POLICY_CHECKS)),)

STEPS = 3
"""Steps of a training loop that run: the first fills the optimizer's state, the second uses it, the third uses a
scale that the scaler may have changed."""


@restoring
def assert_policy(
    target: object = None,
    *,
    release: str | None = None,
    lock: PathLike | None = None,
    device: Devices | None = None,
    dtype: DType | Sequence[DType] | None = None,
    name: str = "",
) -> Run:
    """Assert that autocast treats ops as expected: those of a model as its lock says, or without a model all of them.

    Without `target`, autocast of the installed PyTorch is compared with the shipped snapshot: of `release`, by default
    its own, else the nearest, which every message then says. device: one device type, `cuda` by default; the device
    itself may be absent. dtype: one that autocast casts to, `float16` by default.

    With `target`, a model must send the same ops through autocast, under the same rules and in the same dtypes, as its
    lock says. target: `package.module:function`, `path/to/file.py:function`, a `Subject` or one of its shapes; a
    relative file is searched in the working directory, then next to the calling test and in the folders above it, up to
    the project's. lock: the file or its folder; by default `ampcheck.lock.json` next to the file of the function, or of
    the caller. device, dtype: one or several of those that were locked; all by default. release: whose policy is
    followed instead of that of the installed PyTorch. name: of the entry, where the target is no text. Under
    `pytest --ampcheck-update` the entries are written instead.

    Returns the run. Raises `AssertionError` with each op that differs, and where there is no lock; `UsageError` for an
    unknown device, dtype or release, and for a lock that is damaged, of a newer schema or without an entry for the
    model.
    """
    __tracebackhide__ = True
    if target is None:
        if lock is not None or name:
            raise UsageError(
                "lock and name are about a model: give assert_policy the model, or the name of its function, as target"
            )
        return verify(_judge_installed(device or "cuda", dtype or "float16", release))
    try:
        locked = LockTarget.of(target, lock, name, near=callers_folder())
    except UsageError as error:
        raise error.with_traceback(None) from _users_own(error.__cause__)
    try:
        update = is_updating() and release is None
        run = write_lock(locked, device, dtype) if update else compare_lock(locked, device, dtype, release=release)
    except UsageError as error:
        raise error.with_traceback(None) from None  # the lock's fault: the traceback of ampcheck does not help
    return verify(run)


def _judge_installed(device: Devices, dtype: Dtypes, release: str | None) -> Run:
    if not isinstance(device, str) or not isinstance(dtype, (str, torch.dtype)):
        raise UsageError("without a model assert_policy compares one device and one dtype; call it for each")
    measured = measure_policy(device, dtype)
    snapshot = load_release(release) if release is not None else nearest(measured.torch) if releases() else None
    return replace(judge_drift(measured, snapshot, build=build()), environment=environment())


def _users_own(cause: BaseException | None) -> BaseException | None:
    """The cause of an error where the user's code raised it, whose lines are worth reading."""
    frames = traceback.walk_tb(cause.__traceback__) if cause is not None else ()
    return cause if any(is_users(frame.f_code.co_filename) for frame, _ in frames) else None


def judge_policy(plan: Plan) -> Run:
    """Return what autocast on the device type of the plan does to the ops that its model calls, in each dtype; for
    another device than the CPU also where it differs from the CPU's."""
    subject, device = plan.subject, plan.policy
    dtypes = [getattr(torch, name) for name in plan.dtypes]
    wanted = [slug for slug in POLICY_CHECKS if plan.judges(slug)]
    findings: list[Finding] = []
    tables: list[Table] = []
    seen: dict[str, int] = {}
    for dtype in dtypes if wanted else ():
        calls = measure_calls(subject, device=device, dtype=dtype)
        findings += findings_of(calls, plan.limits, wanted)
        seen["ops under autocast"] = seen.get("ops under autocast", 0) + len({call.op for call in calls.calls})
        if device == "cpu" and dtype == dtypes[0] and releases():
            other = OtherPolicy(calls, nearest(calls.torch).policy("cuda", short(dtype)))
            findings += findings_of(other, plan.limits, wanted)
        elif device != "cpu" and "policy-gap" in wanted:
            gap = PolicyGap(measure_calls(subject, device="cpu", dtype=dtype), calls, judged=True)
            findings += findings_of(gap, plan.limits, wanted)
            tables.append(gap_table(gap))
    return Run(findings=tuple(findings), coverage=Coverage(seen), tables=tuple(tables))


def emulated_name(subject: Subject) -> str:
    """The name of a subject in findings, with the device that is emulated."""
    return armed(subject.name, arm_of())


def judge_use(subject: Subject, checks: Collection[str] | None = None) -> Run:
    """Run a callable, or the first steps of a training loop, under the guards.

    checks: of `GUARD_CHECKS`, all by default. Under an emulation every finding names the device. A training loop that
    runs no op fails. Raises `UsageError` where no name is one of them.
    """
    wanted = None if checks is None else [slug for slug in GUARD_CHECKS if slug in checks]
    if wanted == []:
        raise UsageError(
            f"{subject.name} is of kind '{subject.kind.value}', of which the use of autocast is judged: "
            f"{', '.join(GUARD_CHECKS)}; asked for was {', '.join(checks or ())}"
        )

    def body() -> object:
        if subject.kind is Kind.CALL:
            return subject.run_call()
        if callable(run := subject.shape.get("run")):
            return run()
        return [subject.run_step(number) for number in range(STEPS)]

    steps = subject.kind is Kind.TRAINING and not callable(subject.shape.get("run"))
    must_run = subject.kind is Kind.TRAINING
    return judge_call(body, emulated_name(subject), wanted, must_run=must_run, program=not steps)
