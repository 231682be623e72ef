"""How policies differ: between two PyTorch releases, two devices, and the installed PyTorch and its shipped snapshot.

Only `assert_policy` needs torch, which it imports when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ampcheck.autocast.policy import OpPolicy, Policy, Snapshot, release_of
from ampcheck.autocast.snapshots import load_release, nearest, releases
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, passed, verify

if TYPE_CHECKING:
    import torch

UNKNOWN = "unknown"
"""What stands for the rule of an overload that has an autocast kernel but could not be probed."""

_OF_A_BUILD = re.compile(r"^ATen/(native/)?(cuda|cudnn|hip|miopen|xpu)/")
"""Source files that only the builds for an accelerator compile."""

_SNAPSHOT_HINT = "write one with `ampcheck policy snapshot` and compare by hand, or install ampcheck anew"


@dataclass(frozen=True, slots=True)
class Change:
    """An overload that two policies treat differently; None where autocast leaves it alone."""

    op: str
    before: OpPolicy | None
    after: OpPolicy | None


def diff_policies(one: Policy, other: Policy) -> tuple[Change, ...]:
    """What `other` does otherwise than `one`, by overload: the rule, the facts, the op called instead, the cast back.

    An overload whose rule only one of them could probe is no change: see `incomparable`. One that only one of them has
    is a change, its rule `unknown` where it was not probed.
    """
    names = sorted({*one.ops, *one.unprobed, *other.ops, *other.unprobed} - set(incomparable(one, other)))
    changes = (Change(name, _held(one, name), _held(other, name)) for name in names)
    return tuple(change for change in changes if _behaviour(change.before) != _behaviour(change.after))


def incomparable(one: Policy, other: Policy) -> dict[str, str]:
    """The overloads that both register and that one of them, or both, could not probe, with its reason."""
    asked = {**other.unprobed, **one.unprobed}
    both = {*one.ops, *one.unprobed} & {*other.ops, *other.unprobed}
    return {name: asked[name] for name in sorted(asked) if name in both}


def other_build(changes: tuple[Change, ...], one: str, other: str) -> tuple[Change, ...]:
    """The changes that two builds of PyTorch explain (`cpu` and `cuda 13.0`): kernels that one of them lacks.

    A kernel of which no more is known than that only the accelerator's build has it is explained as well.
    """
    if _family(one) == _family(other):
        return ()

    def explained(change: Change) -> bool:
        if change.before is not None and change.after is not None:
            return False
        only, build = (change.before, one) if change.before is not None else (change.after, other)
        assert only is not None
        return _family(build) != "cpu" and (only.rule == UNKNOWN or _OF_A_BUILD.match(only.source) is not None)

    return tuple(change for change in changes if explained(change))


def history(op: str, device: str, dtype: str = "float16") -> tuple[tuple[str, str], ...]:
    """Each shipped release with a policy of the device, oldest first, and the rule that the overload has there.

    An empty rule: autocast leaves the op alone. Raises `UsageError` for a device that no release knows.
    """
    held = [snapshot for snapshot in map(load_release, releases()) if device in snapshot.policies]
    if not held:
        raise UsageError(f"no shipped policy is about {device!r}; there are {', '.join(shipped_devices())}")
    return tuple((snapshot.release, rule_of(snapshot.policy(device, dtype), op)) for snapshot in held)


def spans(op: str, device: str, dtype: str = "float16") -> tuple[tuple[str, str, str], ...]:
    """The history as stretches of releases with one rule: (first release, last release, rule)."""
    runs = [list(run) for _, run in groupby(history(op, device, dtype), key=lambda entry: entry[1])]
    return tuple((run[0][0], run[-1][0], run[0][1]) for run in runs)


def since(op: str, device: str, rule: str, dtype: str = "float16", *, under: str = "") -> str:
    """From which release on an op has had this rule (empty: none), in words.

    `since 2.12; before: none`, or `since 2.4 or before` from the oldest shipped release on. Of several stretches with
    the rule the one with the release `under` counts, else the latest; where it has ended that is said.
    """
    stretches = spans(op, device, dtype)
    order = releases()

    def around(number: int) -> bool:
        first, last, _ = stretches[number]
        return under in order and order.index(first) <= order.index(under) <= order.index(last)

    having = [number for number, (_, _, found) in enumerate(stretches) if found == rule]
    number = max(having, key=lambda number: (around(number), number), default=None)
    if number is None:
        return f"in no release from {stretches[0][0]} to {stretches[-1][1]}"
    first, last, _ = stretches[number]
    ended = f"; until {last}" if number < len(stretches) - 1 else ""
    if number:
        return f"since {first}; before: {stretches[number - 1][2] or 'none'}{ended}"
    oldest = first == releases()[0]
    return f"since {first}{' or before' if oldest else f'; before: no autocast on {device}'}{ended}"


def rule_of(policy: Policy, op: str) -> str:
    """The rule of an overload; `unknown` where it was not probed, empty where autocast leaves it alone."""
    return UNKNOWN if op in policy.unprobed else policy.rule(op)


def shipped_devices() -> tuple[str, ...]:
    """The device types that any shipped snapshot has a policy of."""
    return tuple(dict.fromkeys(device for release in releases() for device in load_release(release).policies))


def check_policy(measured: Policy, snapshot: Snapshot, *, build: str) -> list[Finding]:
    """Judge a measured policy by a snapshot: one failure for each overload of PyTorch's own that is treated otherwise.

    measured: of any namespaces; custom ops are counted and not compared. build: of the PyTorch that was measured, as
    `Snapshot.build`; kernels that only one of two builds compiles are no drift.
    """
    (dtype,) = measured.dtypes
    subject = f"PyTorch {measured.torch}, autocast to {dtype} on {measured.device}"
    against = _named(snapshot, measured.torch)
    found = measured.of("aten")
    if measured.device not in snapshot.policies:
        message = f"{against} has no policy of {measured.device} to compare with; here {found.registered} overloads "
        verdict = Verdict.WARN if found.registered else Verdict.SKIP
        return [Finding("policy-drift", verdict, subject, f"{message}of PyTorch's own have autocast kernels")]
    if not found.registered:
        kernels = snapshot.policy(measured.device, dtype).registered
        message = f"autocast should treat {kernels} overloads as in {against}; it has no kernel at all"
        return [Finding("policy-drift", Verdict.FAIL, subject, message)]

    compared = _compare(measured, snapshot, build)
    findings = [_drift(change, subject, against) for change in compared.drift]
    expected = snapshot.policy(measured.device, dtype)
    if lost := {op: why for op, why in compared.unclear.items() if op in expected.ops}:
        named = "; ".join(f"{op} ({why})" for op, why in lost.items())
        message = f"{len(lost)} overloads should be treated as in {against} and could not be probed: {named}"
        verdict = Verdict.FAIL if len(lost) > compared.count else Verdict.WARN
        findings.append(Finding("policy-drift", verdict, subject, message))
    if not compared.drift and not compared.count:
        message = f"overloads should be compared with {against}; there was none of which both rules are known"
        findings.append(Finding("policy-drift", Verdict.FAIL, subject, message))
    elif not compared.drift:
        message = f"{compared.count} overloads are treated as in {against}"
        if compared.of_build:
            names = ", ".join(change.op for change in compared.of_build)
            message += f"; left out, for only one of the builds ({snapshot.build} and {build}) has it: {names}"
        if unknown := [op for op in compared.unclear if op in expected.unprobed]:
            message += f"; of {', '.join(unknown)} the snapshot knows no rule"
        if custom := measured.registered - found.registered:
            message += f"; {custom} custom {'op' if custom == 1 else 'ops'} of other namespaces not compared"
        findings.append(passed("policy-drift", subject, message, compared.count))
    return findings


def assert_policy(device: str = "cuda", dtype: torch.dtype | str = "float16") -> Run:
    """Assert that autocast of the installed PyTorch treats each op as the shipped snapshot of its release says.

    device: a device type (`cpu`, `cuda`, `xpu`, `mps`, `mtia`, `privateuseone`); it need not be there. dtype: what
    autocast casts to. Where the installed release has no snapshot the nearest one is the judge, and every message says
    so; without any snapshot the policy is probed and the verdict is a warning. Returns the run; raises
    `AssertionError` with every overload that is treated otherwise, and `UsageError` for an unknown device or dtype.
    """
    __tracebackhide__ = True
    from ampcheck.autocast.probe import build, measure_policy
    from ampcheck.core.environment import environment

    measured = measure_policy(device, dtype)
    (name,) = measured.dtypes
    if not releases():
        subject = f"PyTorch {measured.torch}, autocast to {name} on {measured.device}"
        message = f"{len(measured.ops)} overloads were probed and compared with nothing: no snapshot was shipped"
        missing = Finding("policy-drift", Verdict.WARN, subject, message, hint=_SNAPSHOT_HINT)
        return verify(Run(environment(), (missing,), coverage_of(measured)))
    snapshot, installed = nearest(measured.torch), build()
    findings = check_policy(measured, snapshot, build=installed)
    run = Run(environment(), tuple(findings), coverage_of(measured, snapshot, build=installed))
    return verify(run)


def coverage_of(measured: Policy, snapshot: Snapshot | None = None, *, build: str = "") -> Coverage:
    """How many overloads were probed and compared, and what was left out."""
    found = measured.of("aten")
    seen = {"overloads probed": len(measured.ops)}
    unseen = {
        "overloads that could not be probed": len(measured.unprobed),
        "custom ops, which no snapshot holds": measured.registered - found.registered,
    }
    if snapshot is not None and measured.device in snapshot.policies:
        compared = _compare(measured, snapshot, build)
        seen["overloads compared"] = compared.count
        unseen["overloads that only one of two builds registers"] = len(compared.of_build)
        unseen["overloads of which the snapshot knows no rule"] = len({*compared.unclear} & {*found.ops})
    return Coverage(seen, {reason: count for reason, count in unseen.items() if count})


@dataclass(frozen=True, slots=True)
class _Compared:
    """How many overloads were compared, which differ, and which say nothing: of another build, or not probed."""

    count: int
    drift: tuple[Change, ...]
    of_build: tuple[Change, ...]
    unclear: Mapping[str, str]


def _compare(measured: Policy, snapshot: Snapshot, build: str) -> _Compared:
    expected, found = snapshot.policy(measured.device, *measured.dtypes), measured.of("aten")
    changes, unclear = diff_policies(expected, found), incomparable(expected, found)
    of_build = other_build(changes, snapshot.build, build)
    names = {*expected.ops, *expected.unprobed, *found.ops, *found.unprobed}
    drift = tuple(change for change in changes if change not in of_build)
    return _Compared(len(names) - len(of_build) - len(unclear), drift, of_build, unclear)


def _drift(change: Change, subject: str, against: str) -> Finding:
    facts = change.before is not None and change.after is not None and change.before.rule == change.after.rule
    message = f"{change.op} should be treated as in {against}: {_told(change.before, facts)}; "
    message += f"it is: {_told(change.after, facts)}"
    if change.after is not None and change.after.source:
        message += f", by a kernel of {change.after.source}"
    hint = "either a library in this process registers kernels of PyTorch's own ops, or this PyTorch is another than "
    hint += f"the snapshot's; its history: ampcheck policy explain {change.op}"
    return Finding("policy-drift", Verdict.FAIL, subject, message, Where(op=change.op), hint=hint)


def _told(op: OpPolicy | None, facts: bool) -> str:
    if op is None:
        return "left alone"
    handed = ", ".join(f"{given}: {handed}" for given, handed in op.facts.items()) if facts else ""
    return (
        op.rule
        + (f" by way of {op.redispatch}" if op.redispatch else "")
        + (", its result cast back" if op.restores else "")
        + (f" ({handed})" if handed else "")
    )


def _named(snapshot: Snapshot, installed: str) -> str:
    name = f"the snapshot of PyTorch {snapshot.torch}"
    if snapshot.release == release_of(installed):
        return name
    return f"{name} (the nearest: PyTorch {release_of(installed)} has none)"


def _held(policy: Policy, op: str) -> OpPolicy | None:
    return OpPolicy(UNKNOWN) if op in policy.unprobed else policy.ops.get(op)


def _behaviour(op: OpPolicy | None) -> object:
    return op and (op.rule, op.facts, op.redispatch, op.restores)


def _family(build: str) -> str:
    return build.partition(" ")[0]
