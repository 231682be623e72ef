"""Requires: Autocast of the installed PyTorch treats each op as the shipped snapshot of its release says. Fails for
each overload whose rule, facts or replacement differ, that appeared, or that is gone. With a lock: the model sends the
same ops through autocast, in the same modules and dtypes; fails for each op that differs.

Measured: Each overload with an autocast kernel is called with small stand-ins, and the dtypes that it passes on are
compared. No device is needed. Where the release has no snapshot the nearest one is used.

Causes: A library that registers kernels of PyTorch's own ops, a patched or nightly PyTorch, a release newer than this
ampcheck.

Fix: Look at ampcheck policy explain OP and ampcheck policy diff X.Y installed, and find who registers the kernel; cast
by hand where the model needs the former rule. A lock is refreshed by pytest --ampcheck-update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampcheck.checks.policy import counted_modules, listed_names
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.records.policy import RULES, Comparison, InstalledPolicy, LockComparison, LockedOp, Policy, PolicyCalls

CHECK = Check(
    "policy-drift",
    "policy",
    __doc__,
    unit="ops",
    needs=("LockComparison", "InstalledPolicy"),
    order=300,
    evidence=("docs/examples/checks/policy-drift",),
)

_REFRESH = "where the change is meant, refresh the lock: {}"


def check(record: LockComparison | InstalledPolicy, limits: Limits) -> Iterator[Finding]:
    """Ops are treated as the lock of a model says, or as the snapshot of the release: one failure for each other op."""
    return _of_lock(record) if isinstance(record, LockComparison) else _of_installed(record)


def _of_lock(lock: LockComparison) -> Iterator[Finding]:
    calls, locked, now = lock.calls, lock.locked, lock.now
    if calls.ended_early and calls.raised is not None:
        message = f"the model must run to its end, so that its ops can be compared; it raised {calls.raised.message}"
        yield CHECK.fail(lock.name, message, where=calls.raised.where)
    elif not now.ops and not locked.ops:
        message = "a lock needs an op that reaches autocast; none did, neither now nor when it was locked"
        yield CHECK.fail(lock.name, message, observed=0, limit=1)
    elif lock.changed:
        findings = [_other_rule(op, lock) for op in lock.rules]
        affected = {module for op in lock.rules for module in _modules(now.ops.get(op) or locked.ops.get(op))}
        others = (op for op in lock.changed if op not in lock.rules)
        findings += [_other_calls(op, _cause_of_call(op, affected, lock), lock) for op in others]
        yield from (replace(finding, hint=_REFRESH.format(lock.command)) for finding in findings)
    else:
        count, ops = sum(len(op.used) for op in now.ops.values()), len(now.ops)
        message = f"as locked under PyTorch {locked.torch}: {ops} ops in {count} combinations of dtypes and module"
        yield CHECK.passed(lock.name, message, count, observed=ops, limit=1)


def _other_rule(op: str, lock: LockComparison) -> Finding:
    calls, locked, now = lock.calls, lock.locked, lock.now
    former, why = lock.rules[op]
    message = f"{op} must be treated as when it was locked, under PyTorch {locked.torch}: {_describe(former)}; under "
    message += f"PyTorch {calls.torch} it is: {_describe(calls.policy.rule(op))}, {why}"
    before, after = _dtypes(locked.ops.get(op)), _dtypes(now.ops.get(op))
    if before and after and before != after:
        message += f"; its tensors were {before}, they are {after}"
    elif after or before:
        message += f"; its tensors are {after}" if after else f"; its tensors were {before}"
    message += f"; used by {counted_modules(_modules(now.ops.get(op) or locked.ops.get(op)))}"
    used = frozenset((call.dtypes, call.module) for call in calls.calls if call.op == op)
    return CHECK.fail(calls.name, message, where=_where(op, calls, used))


def _cause_of_call(op: str, affected: set[str], lock: LockComparison) -> str:
    locked, now = lock.locked, lock.now
    entries = [entry for entry in (locked.ops.get(op), now.ops.get(op)) if entry is not None]
    modules = {module for entry in entries for module in _modules(entry)}
    others = ", ".join(lock.rules)
    if lock.rules and len(entries) == 1 and modules <= affected:
        return f"its own rule did not change; it is in the modules of {others}, whose rule did"
    if lock.rules:
        return f"its own rule did not change; {others}, whose rule did, may pass it other dtypes, or the model changed"
    if locked.torch == lock.calls.torch:
        return "its rule is the same: the model's own call changed"
    return (
        f"its rule is the same under {locked.torch} and {lock.calls.torch}: the model's own call changed, or PyTorch "
        "makes one of its ops of others"
    )


def _other_calls(op: str, cause: str, lock: LockComparison) -> Finding:
    calls = lock.calls
    before, after = lock.locked.ops.get(op), lock.now.ops.get(op)
    used_before, used_after = (
        entry.used if entry is not None else frozenset[tuple[str, str]]() for entry in (before, after)
    )
    lost, new = used_before - used_after, used_after - used_before
    if before is None:
        message = f"only locked ops may be called; {op} ({calls.policy.rule(op)}; {_dtypes(after)}) is called too, in "
        message += counted_modules(_modules(after)) + _lines(after, new)
    elif after is None:
        message = f"every locked op must be called; {op} ({before.rule}; {_dtypes(before)}) no longer is, in "
        message += counted_modules(_modules(before)) + _lines(before, lost, "when locked ")
    else:
        message = f"{op} ({after.rule}) must be called as locked"
        message += f"; no longer: {_uses(before, lost, 'when locked ')}" if lost else ""
        message += f"; new: {_uses(after, new)}" if new else ""
    return CHECK.fail(calls.name, f"{message} ({cause})", where=_where(op, calls, new or lost))


def _uses(op: LockedOp, used: frozenset[tuple[str, str]], when: str = "") -> str:
    parts = []
    for dtypes in sorted({dtypes for dtypes, _ in used}):
        same = frozenset(use for use in used if use[0] == dtypes)
        parts.append(f"{dtypes} in {counted_modules(sorted(module for _, module in same))}{_lines(op, same, when)}")
    return "; ".join(parts)


def _lines(op: LockedOp | None, used: frozenset[tuple[str, str]], when: str = "") -> str:
    """`, at models.py:12`, of the calls in these dtypes and modules."""
    calls = op.calls.items() if op is not None else ()
    lines = {line for dtypes, sites in calls for module, line in sites if line and (dtypes, module) in used}

    def by_number(line: str) -> tuple[str, int]:
        file, _, number = line.rpartition(":")
        return file, int(number) if number.isdigit() else 0

    return f", {when}at {listed_names(sorted(lines, key=by_number))}" if lines else ""


def _modules(op: LockedOp | None) -> list[str]:
    return sorted({module for _, module in op.used}) if op is not None else []


def _dtypes(op: LockedOp | None) -> str:
    return ", ".join(sorted(op.calls)) if op is not None else ""


def _describe(rule: str) -> str:
    return f"{rule} ({RULES[rule]})" if rule in RULES else rule or "left alone"


def _where(op: str, calls: PolicyCalls, used: frozenset[tuple[str, str]]) -> Where:
    """Of the first call in these dtypes and modules; without a line where there is none now."""
    sites = (call.where for call in calls.calls if call.op == op and (call.dtypes, call.module) in used)
    return next(sites, Where(phase="forward", module=min(module for _, module in used) if used else "", op=op))


def _of_installed(installed: InstalledPolicy) -> Iterator[Finding]:
    measured, snapshot = installed.measured, installed.snapshot
    own = measured.of("aten")
    if not snapshot:
        message = f"{len(measured.ops)} overloads were probed and compared with nothing: no snapshot was shipped"
        hint = "write one with `ampcheck policy snapshot` and compare by hand, or install ampcheck again"
        yield CHECK.warn(installed.name, message, hint=hint)
    elif installed.expected is None or installed.compared is None:
        message = f"{snapshot} has no policy of {measured.device} to compare with; here "
        message += f"{own.registered} overloads of PyTorch's own have autocast kernels"
        yield CHECK.finding(Verdict.WARN if own.registered else Verdict.SKIP, installed.name, message)
    elif not own.registered:
        expected = installed.expected.registered
        message = f"autocast should treat {expected} overloads as in {snapshot}; it has no kernel at all"
        yield CHECK.fail(installed.name, message)
    else:
        yield from _compared(installed, own, installed.expected, installed.compared)


def _compared(installed: InstalledPolicy, own: Policy, expected: Policy, compared: Comparison) -> Iterator[Finding]:
    snapshot = installed.snapshot
    for change in compared.changes:
        message = f"{change.op} should be treated as in {snapshot}: {change.describe(change.before)}; "
        message += f"it is: {change.describe(change.after)}"
        if change.after is not None and change.after.source:
            message += f", by a kernel of {change.after.source}"
        hint = (
            "either a library in this process registers kernels of PyTorch's own ops, or this PyTorch is another than "
            f"the snapshot's; its history: ampcheck policy explain {change.op}"
        )
        yield CHECK.fail(installed.name, message, where=Where(op=change.op), hint=hint)
    if lost := [f"{op} ({why})" for op, why in compared.unclear.items() if op in expected.ops]:
        message = f"{len(lost)} overloads should be treated as in {snapshot} and could not be probed: {'; '.join(lost)}"
        yield CHECK.finding(Verdict.FAIL if len(lost) > compared.count else Verdict.WARN, installed.name, message)
    if compared.changes:
        return
    if not compared.count:
        message = f"overloads should be compared with {snapshot}; there was none of which both rules are known"
        yield CHECK.fail(installed.name, message)
        return
    message = f"{compared.count} overloads are treated as in {snapshot}"
    if compared.of_build:
        names = ", ".join(change.op for change in compared.of_build)
        message += f"; left out, for only one of the builds ({' and '.join(installed.builds)}) has it: {names}"
    if unknown := [op for op in compared.unclear if op in expected.unprobed]:
        message += f"; of {', '.join(unknown)} the snapshot knows no rule"
    if custom := installed.measured.registered - own.registered:
        message += f"; {custom} custom {'op' if custom == 1 else 'ops'} of other namespaces not compared"
    yield CHECK.passed(installed.name, message, compared.count)
