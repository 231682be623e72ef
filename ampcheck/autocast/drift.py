"""Differences of policies: between two PyTorch releases, two devices, and the installed PyTorch and its snapshot.

Nothing here needs torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby

from ampcheck.autocast.policy import Snapshot, load_release, releases
from ampcheck.checks import findings
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run
from ampcheck.records.policy import UNKNOWN, Change, Comparison, InstalledPolicy, OpPolicy, Policy, release_of

_OF_ACCELERATOR_BUILD = re.compile(r"^ATen/(native/)?(cuda|cudnn|hip|miopen|xpu)/")
"""Source files that only the builds for an accelerator compile."""


def compare(first: Policy, second: Policy, first_build: str = "", second_build: str = "") -> Comparison:
    """Return what `second` does otherwise than `first`: the rule, the facts, the op called instead, the cast back.

    An overload that only one of them has is a change, its rule `unknown` where it was not probed; builds (`cpu` and
    `cuda 13.0`) explain it where only the accelerator's build can have it.
    """
    names, second_names = {*first.ops, *first.unprobed}, {*second.ops, *second.unprobed}
    reasons = {**second.unprobed, **first.unprobed}
    unclear = {name: reasons[name] for name in sorted(reasons) if name in names & second_names}
    compared = sorted((names | second_names).difference(unclear))
    pairs = (Change(name, _op(first, name), _op(second, name)) for name in compared)
    changes = [change for change in pairs if _behaviour(change.before) != _behaviour(change.after)]
    of_build = tuple(change for change in changes if _explained(change, first_build, second_build))
    drift = tuple(change for change in changes if change not in of_build)
    return Comparison(len(compared) - len(of_build), drift, of_build, unclear)


def _explained(change: Change, first_build: str, second_build: str) -> bool:
    first, second = first_build.partition(" ")[0], second_build.partition(" ")[0]
    if first == second or (change.before is not None and change.after is not None):
        return False
    op, build = (change.before, first) if change.before is not None else (change.after, second)
    return op is not None and build != "cpu" and (op.rule == UNKNOWN or bool(_OF_ACCELERATOR_BUILD.match(op.source)))


def history(op: str, device: str, dtype: str = "float16") -> tuple[tuple[str, str], ...]:
    """Each shipped release with a policy of the device, oldest first, and the rule that the overload has there.

    An empty rule: autocast leaves the op alone. Raises `UsageError` for a device that no release knows.
    """
    known = [snapshot for snapshot in map(load_release, releases()) if device in snapshot.policies]
    if not known:
        raise UsageError(f"no shipped policy is about {device!r}; there are {', '.join(shipped_devices())}")
    return tuple((snapshot.release, rule_of(snapshot.policy(device, dtype), op)) for snapshot in known)


def spans(op: str, device: str, dtype: str = "float16") -> tuple[tuple[str, str, str], ...]:
    """The history as stretches of releases with one rule: (first release, last release, rule)."""
    runs = [list(run) for _, run in groupby(history(op, device, dtype), key=lambda entry: entry[1])]
    return tuple((run[0][0], run[-1][0], run[0][1]) for run in runs)


def since(op: str, device: str, rule: str, dtype: str = "float16", *, under: str = "") -> str:
    """The release from which on an op has had this rule (empty: none), in words.

    `since 2.12; before: none`, or `since 2.4 or before` from the oldest shipped release on. Of several stretches with
    the rule the one with the release `under` counts, else the latest; a stretch that has ended is marked so.
    """
    stretches = spans(op, device, dtype)
    order = releases()

    def around(number: int) -> bool:
        first, last, _ = stretches[number]
        return under in order and order.index(first) <= order.index(under) <= order.index(last)

    having = [number for number, stretch in enumerate(stretches) if stretch[2] == rule]
    number = max(having, key=lambda number: (around(number), number), default=None)
    if number is None:
        return f"in no release from {stretches[0][0]} to {stretches[-1][1]}"
    first, last, _ = stretches[number]
    ended = f"; until {last}" if number < len(stretches) - 1 else ""
    if number:
        return f"since {first}; before: {stretches[number - 1][2] or 'none'}{ended}"
    return f"since {first}{' or before' if first == order[0] else f'; before: no autocast on {device}'}{ended}"


def rule_of(policy: Policy, op: str) -> str:
    """The rule of an overload; `unknown` where it was not probed, empty where autocast leaves it alone."""
    return UNKNOWN if op in policy.unprobed else policy.rule(op)


def shipped_devices() -> tuple[str, ...]:
    """The device types that any shipped snapshot has a policy of."""
    return tuple(dict.fromkeys(device for release in releases() for device in load_release(release).policies))


def judge_drift(measured: Policy, snapshot: Snapshot | None, *, build: str) -> Run:
    """Judge a measured policy by a snapshot: one failure for each overload of PyTorch's own that is treated otherwise.

    measured: of any namespaces; custom ops are counted and not compared. build: of the PyTorch that was measured, as
    `Snapshot.build`; kernels that only one of two builds compiles are no drift. Without a snapshot: a warning.
    """
    policy, compared = measured.of("aten"), None
    installed = InstalledPolicy(measured)
    seen = {"overloads probed": len(measured.ops)}
    unseen = {
        "overloads that could not be probed": len(measured.unprobed),
        "custom ops, which no snapshot holds": measured.registered - policy.registered,
    }
    if snapshot is not None:
        installed = replace(installed, snapshot=_name(snapshot, measured), builds=(snapshot.build, build))
    if snapshot is not None and measured.device in snapshot.policies:
        expected = snapshot.policy(measured.device, *measured.dtypes)
        compared = compare(expected, policy, *installed.builds)
        installed = replace(installed, expected=expected, compared=compared)
        seen["overloads compared"] = compared.count
        unseen["overloads that only one of two builds registers"] = len(compared.of_build)
        unseen["overloads of which the snapshot knows no rule"] = len({*compared.unclear} & {*policy.ops})
    coverage = Coverage(seen, {reason: count for reason, count in unseen.items() if count})
    return Run(findings=tuple(findings(installed, Limits())), coverage=coverage)


def _name(snapshot: Snapshot, measured: Policy) -> str:
    release = release_of(measured.torch)
    nearest = "" if snapshot.release == release else f" (the nearest: PyTorch {release} has none)"
    return f"the snapshot of PyTorch {snapshot.torch}{nearest}"


def _op(policy: Policy, op: str) -> OpPolicy | None:
    return OpPolicy(UNKNOWN) if op in policy.unprobed else policy.ops.get(op)


def _behaviour(op: OpPolicy | None) -> object:
    return op and (op.rule, op.facts, op.redispatch, op.restores)
