"""What an audit says of autocast itself: which ops a model sends through it, and how code uses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ampcheck.autocast.calls import measure_calls
from ampcheck.autocast.emulate import active
from ampcheck.autocast.guards.checks import GUARD_CHECKS as GUARD_CHECKS
from ampcheck.autocast.guards.guard import judge_call
from ampcheck.autocast.locks.checks import check_banned, check_gap, check_unregistered
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Finding, Run, Table
from ampcheck.core.subject import Kind, Subject

POLICY_CHECKS = ("policy-banned", "policy-unregistered", "policy-gap")
CHECKS = (*dict.fromkeys((*GUARD_CHECKS, *POLICY_CHECKS)),)

STEPS = 3
"""How many steps of a training loop run: the first fills the optimizer's state, the second uses it, the third a scale
that the scaler has had the chance to change."""


def judge_policy(
    subject: Subject, device: str, dtypes: Sequence[torch.dtype], checks: Collection[str] | None = None
) -> Run:
    """What autocast on a device type does to the ops that a model calls, in each dtype; for another than the CPU also
    where it differs from the CPU's. checks: of `POLICY_CHECKS`, all by default.
    """
    wanted = [slug for slug in POLICY_CHECKS if checks is None or slug in checks]
    findings: list[Finding] = []
    tables: list[Table] = []
    seen: dict[str, int] = {}
    for dtype in dtypes if wanted else ():
        calls = measure_calls(subject, device=device, dtype=dtype)
        findings += [*check_banned(calls), *check_unregistered(calls)]
        seen["ops under autocast"] = seen.get("ops under autocast", 0) + len({call.op for call in calls.calls})
        if device != "cpu" and "policy-gap" in wanted:
            found, table = check_gap(measure_calls(subject, device="cpu", dtype=dtype), calls)
            findings += found
            tables.append(table)
    return Run(findings=tuple(f for f in findings if f.check in wanted), coverage=Coverage(seen), tables=tuple(tables))


def judge_use(subject: Subject, checks: Collection[str] | None = None) -> Run:
    """Run a callable, or the first steps of a training loop, under the guards.

    checks: of `GUARD_CHECKS`, all by default. Under an emulation every finding says so. A training loop that runs no op
    fails. Raises `UsageError` where none of those asked for is one.
    """
    wanted = None if checks is None else [slug for slug in GUARD_CHECKS if slug in checks]
    if wanted == []:
        raise UsageError(
            f"{subject.name} is of kind '{subject.kind.value}', of which the use of autocast is judged: "
            f"{', '.join(GUARD_CHECKS)}; asked for was {', '.join(checks or ())}"
        )
    emulation = active()
    name = subject.name if emulation is None else f"{subject.name} [{emulation.policy.device} emulated]"
    return judge_call(_body(subject), name, wanted, must_run=subject.kind is Kind.TRAINING)


def _body(subject: Subject) -> Callable[[], Any]:
    if subject.kind is Kind.CALL:
        return subject.run_call
    whole = subject.shape.get("run")
    if callable(whole):
        loop: Callable[[], Any] = whole
        return loop
    return lambda: [subject.run_step(number) for number in range(STEPS)]
