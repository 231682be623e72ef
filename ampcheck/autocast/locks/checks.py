"""Judge the recorded calls of a model: against its lock, against the CPU's policy, and by themselves. No torch runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ampcheck.autocast.calls import OpCall, PolicyCalls, is_custom
from ampcheck.autocast.drift import history, since
from ampcheck.autocast.locks.file import ANY_COMMAND, Locked, LockedOp
from ampcheck.autocast.policy import APPEND_DTYPE, BANNED, FP32, LOWER, RULES, SET_DTYPE, Policy, release_of
from ampcheck.catalog.autocast import POLICY_BANNED, POLICY_DRIFT, POLICY_GAP, POLICY_UNREGISTERED
from ampcheck.core.arm import POLICY, Arm, armed
from ampcheck.core.check import Check
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Table, Verdict, Where
from ampcheck.core.text import counted, listed

_LISTED = 6
"""How many modules, ops or lines a message lists."""

_WIDE = (FP32, SET_DTYPE, APPEND_DTYPE)
"""Rules by which an op computes in float32."""

Used = frozenset[tuple[str, str]]
"""Dtypes and module of calls, as `LockedOp.used`."""


def subject_of(calls: PolicyCalls) -> str:
    """The subject as findings name it: with the device, the dtype and whether the device was emulated."""
    return armed(calls.subject, Arm(calls.dtype, POLICY, calls.device, release_of(calls.torch)))


# The lock --------------------------------------------------------------------------------------------------------


def check_lock(calls: PolicyCalls, locked: Locked, now: Locked, command: str = ANY_COMMAND) -> list[Finding]:
    """The ops with a rule, their rules, dtypes and modules are those of the lock: one failure for each op that is not.

    locked: the entry of the lock. now: the entry that `calls` would make. command: refreshes the lock, for the hint.
    """
    subject = subject_of(calls)
    if _ended_early(calls) and calls.raised is not None:
        message = f"the model must run to its end, so that its ops can be compared; it raised {calls.raised.message}"
        return [POLICY_DRIFT.fail(subject, message, where=calls.raised.where)]
    if not now.ops and not locked.ops:
        message = "a lock needs an op that reaches autocast; none did, neither now nor when it was locked"
        return [POLICY_DRIFT.fail(subject, message, observed=0, limit=1)]
    changed = [op for op in sorted({*locked.ops, *now.ops}) if _differ(locked.ops.get(op), now.ops.get(op))]
    roots = {op: rule for op in changed if (rule := _former_rule(op, calls, locked)) is not None}
    findings = [_other_rule(op, rule, calls, locked, now) for op, rule in roots.items()]
    affected = {module for op in roots for module in _modules(now.ops.get(op) or locked.ops.get(op))}
    for op in changed:
        if op not in roots:
            cause = _cause_of_call(op, list(roots), affected, calls, locked, now)
            findings.append(_other_calls(op, cause, calls, locked, now))
    if findings:
        return [
            replace(finding, hint=f"where the change is meant, refresh the lock: {command}") for finding in findings
        ]
    count = sum(len(op.used) for op in now.ops.values())
    message = f"as locked under PyTorch {locked.torch}: {len(now.ops)} ops in {count} combinations of dtypes and module"
    return [POLICY_DRIFT.passed(subject, message, count, observed=len(now.ops), limit=1)]


def _ended_early(calls: PolicyCalls) -> bool:
    """Whether the run ended early, unless at a banned op: it says nothing of the ops behind that place."""
    return calls.raised is not None and calls.policy.rule(calls.raised.op) != BANNED


def _differ(before: LockedOp | None, now: LockedOp | None) -> bool:
    return before is None or now is None or (before.rule, before.used) != (now.rule, now.used)


def _former_rule(op: str, calls: PolicyCalls, locked: Locked) -> str | None:
    """The rule when the lock was made, where it differs from the present one; None where it is equal or unknown."""
    former: str | None = None
    if op in locked.ops:
        former = locked.ops[op].rule
    elif not is_custom(op):
        try:
            former = dict(history(op, calls.device, calls.dtype)).get(release_of(locked.torch))
        except UsageError:
            return None
    return former if former != calls.policy.rule(op) else None


def _other_rule(op: str, former: str, calls: PolicyCalls, locked: Locked, now: Locked) -> Finding:
    rule = calls.policy.rule(op)
    message = f"{op} must be treated as when it was locked, under PyTorch {locked.torch}: {_describe(former)}; under "
    message += f"PyTorch {calls.torch} it is: {_describe(rule)}, {_cause_of_rule(op, rule, calls, locked)}"
    before, after = _dtypes(locked.ops.get(op)), _dtypes(now.ops.get(op))
    if before and after and before != after:
        message += f"; its tensors were {before}, they are {after}"
    elif after or before:
        message += f"; its tensors are {after}" if after else f"; its tensors were {before}"
    message += f"; used by {_counted(_modules(now.ops.get(op) or locked.ops.get(op)))}"
    used = Used((call.dtypes, call.module) for call in calls.calls if call.op == op)
    return POLICY_DRIFT.fail(subject_of(calls), message, where=_where(op, calls, used))


def _cause_of_rule(op: str, rule: str, calls: PolicyCalls, locked: Locked) -> str:
    before, after = release_of(locked.torch), release_of(calls.torch)
    if is_custom(op):
        return "a custom op: what is registered for it has changed"
    if before == after:
        return f"the release is the same: the build is another (locked with {locked.build}), or a library replaces it"
    try:
        return since(op, calls.device, rule, calls.dtype)
    except UsageError:
        return f"between {before} and {after}, of which ampcheck carries no policies"


def _cause_of_call(
    op: str, roots: list[str], affected: set[str], calls: PolicyCalls, locked: Locked, now: Locked
) -> str:
    entries = [entry for entry in (locked.ops.get(op), now.ops.get(op)) if entry is not None]
    modules = {module for entry in entries for module in _modules(entry)}
    others = ", ".join(roots)
    if roots and len(entries) == 1 and modules <= affected:
        return f"its own rule did not change; it is in the modules of {others}, whose rule did"
    if roots:
        return f"its own rule did not change; {others}, whose rule did, may pass it other dtypes, or the model changed"
    if locked.torch == calls.torch:
        return "its rule is the same: the model's own call changed"
    return (
        f"its rule is the same under {locked.torch} and {calls.torch}: the model's own call changed, or PyTorch makes "
        "one of its ops of others"
    )


def _other_calls(op: str, cause: str, calls: PolicyCalls, locked: Locked, now: Locked) -> Finding:
    before, after = locked.ops.get(op), now.ops.get(op)
    used_before, used_after = (entry.used if entry is not None else Used() for entry in (before, after))
    lost, new = used_before - used_after, used_after - used_before
    if before is None:
        message = f"only locked ops may be called; {op} ({calls.policy.rule(op)}; {_dtypes(after)}) is called too, in "
        message += _counted(_modules(after)) + _lines(after, new)
    elif after is None:
        message = f"every locked op must be called; {op} ({before.rule}; {_dtypes(before)}) no longer is, in "
        message += _counted(_modules(before)) + _lines(before, lost, "when locked ")
    else:
        message = f"{op} ({after.rule}) must be called as locked"
        message += f"; no longer: {_uses(before, lost, 'when locked ')}" if lost else ""
        message += f"; new: {_uses(after, new)}" if new else ""
    return POLICY_DRIFT.fail(subject_of(calls), f"{message} ({cause})", where=_where(op, calls, new or lost))


def _uses(op: LockedOp, used: Used, when: str = "") -> str:
    parts = []
    for dtypes in sorted({dtypes for dtypes, _ in used}):
        same = frozenset(use for use in used if use[0] == dtypes)
        parts.append(f"{dtypes} in {_counted(sorted(module for _, module in same))}{_lines(op, same, when)}")
    return "; ".join(parts)


def _lines(op: LockedOp | None, used: Used, when: str = "") -> str:
    """`, at models.py:12`, of the calls in these dtypes and modules."""
    calls = op.calls.items() if op is not None else ()
    lines = {line for dtypes, sites in calls for module, line in sites if line and (dtypes, module) in used}

    def by_number(line: str) -> tuple[str, int]:
        file, _, number = line.rpartition(":")
        return file, int(number) if number.isdigit() else 0

    return f", {when}at {_listed(sorted(lines, key=by_number))}" if lines else ""


def _modules(op: LockedOp | None) -> list[str]:
    return sorted({module for _, module in op.used}) if op is not None else []


def _dtypes(op: LockedOp | None) -> str:
    return ", ".join(sorted(op.calls)) if op is not None else ""


def _describe(rule: str) -> str:
    return f"{rule} ({RULES[rule]})" if rule in RULES else rule or "left alone"


def _where(op: str, calls: PolicyCalls, used: Used) -> Where:
    """Of the first call in these dtypes and modules; without a line where there is none now."""
    sites = (call.where for call in calls.calls if call.op == op and (call.dtypes, call.module) in used)
    return next(sites, Where(phase="forward", module=min(module for _, module in used) if used else "", op=op))


def _counted(modules: Iterable[str]) -> str:
    """`2 modules: a, b`."""
    names = list(dict.fromkeys(modules))
    return f"{len(names)} module{'s' if len(names) != 1 else ''}: {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    """`a, b`; the longest lists are cut."""
    return listed((name or "(the root)" for name in names), _LISTED)


# By themselves ---------------------------------------------------------------------------------------------------


def check_banned(calls: PolicyCalls) -> list[Finding]:
    """No op is called that autocast bans on the device."""
    findings = []
    banned = {call.op: call for call in reversed(calls.calls) if call.rule == BANNED}
    for op, call in sorted(banned.items()):
        text = " ".join(calls.policy.ops[op].raises.split())
        first, _, rest = text.partition(". ")
        raised = calls.raised is not None and calls.raised.op == op
        verdict, what = (Verdict.FAIL, "raises") if raised else (Verdict.WARN, "raised, which the model caught")
        modules = _counted(call.module for call in calls.calls if call.op == op)
        message = f"no op may be called that autocast bans on {calls.device}; {op} {what}: {first or text} ({modules})"
        hint = rest or "leave autocast around it: torch.autocast(..., enabled=False), with float32 inputs"
        findings.append(POLICY_BANNED.finding(verdict, subject_of(calls), message, where=call.where, hint=hint))
    ops = len({call.op for call in calls.ruled})
    return findings or [_clean(POLICY_BANNED, calls, f"none of {counted(ops, 'ops')} is banned", ops)]


def check_unregistered(calls: PolicyCalls) -> list[Finding]:
    """No custom op gets floating tensors under autocast without an autocast kernel."""
    findings = []
    for op in sorted({call.op for call in calls.unregistered}):
        of_op = [call for call in calls.unregistered if call.op == op]
        mixed = [call for call in of_op if len(_floats(call.inputs)) > 1]
        dtypes = ", ".join(dict.fromkeys(call.inputs for call in of_op))
        message = f"a custom op should have an autocast kernel on {calls.device}; {op} has none: it is never cast and "
        message += f"got {dtypes} in {_counted(call.module for call in of_op)}"
        verdict = Verdict.WARN
        if calls.raised is not None and calls.raised.op == op:
            message += f"; it raised {calls.raised.message}"
            verdict = Verdict.FAIL if mixed else Verdict.WARN
        hint = f"register one: torch.library.register_autocast({op!r}, {calls.device!r}, dtype); or cast inside the op"
        where = (mixed or of_op)[0].where
        findings.append(POLICY_UNREGISTERED.finding(verdict, subject_of(calls), message, where=where, hint=hint))
    custom = len({call.op for call in calls.calls if is_custom(call.op)})
    message = f"autocast casts the inputs of all {custom} custom ops" if custom else "no custom op ran under autocast"
    return findings or [_clean(POLICY_UNREGISTERED, calls, message, custom)]


def _floats(dtypes: str) -> set[str]:
    """The floating dtypes among those of a call."""
    words = dtypes.replace("[", " ").replace("]", " ").replace("|", " ").split()
    return {word for word in words if "float" in word}


def _clean(check: Check, calls: PolicyCalls, text: str, seen: int) -> Finding:
    if calls.raised is not None or not calls.calls:
        reason = f"the run raised {calls.raised.message}" if calls.raised else "no op reached autocast"
        return check.skip(subject_of(calls), f"not judged: {reason}")
    return check.passed(subject_of(calls), text, seen)


# Between the CPU and a device ------------------------------------------------------------------------------------


def check_gap(cpu: PolicyCalls, device: PolicyCalls, *, judged: bool = False) -> tuple[list[Finding], Table]:
    """Which ops of a model autocast treats otherwise on the CPU than on the device, all of them in the table.

    A warning where the CPU computes wider than the device, or the device bans the op: a test on the CPU cannot see
    what overflows or raises there. Both runs are of the same model in the same dtype. judged: the values are judged
    under the device's policy beside this, so that nothing is left to warn of.
    """
    subject = subject_of(device)
    names = sorted({call.op for call in (*cpu.calls, *device.calls)})
    rows = [_row(op, cpu, device) for op in names if _differs(op, cpu, device)]
    columns = ("op", "on cpu", f"on {device.device}", "dtypes on cpu", f"dtypes on {device.device}", "modules")
    title = f"Ops that autocast treats otherwise on cpu than on {device.device}"
    table = Table(title, columns, rows, check=POLICY_GAP.slug, note=f"{subject}, PyTorch {device.torch}.")
    for calls in (cpu, device):
        if _ended_early(calls) or not calls.calls:
            return [_clean(POLICY_GAP, calls, "", 0)], table
    banned_on_cpu = {op for op, policy in cpu.policy.ops.items() if policy.rule == BANNED}
    banned = sorted({call.op for call in device.calls if call.rule == BANNED} - banned_on_cpu)
    wider = [call for call in device.calls if _computes_low(call, device) and _is_wider_on_cpu(call, cpu, device)]
    causes = sorted({call.op for call in wider if _is_cause(call, cpu)})
    effects = sorted({call.op for call in wider}.difference(causes))
    if not banned and not wider:
        message = f"of {len(names)} ops {len(rows)} are treated otherwise on cpu than on {device.device}"
        message += f" ({_listed([str(row[0]) for row in rows])})" if rows else ""
        message += "; none of them is computed wider on the cpu"
        return [POLICY_GAP.passed(subject, message, len(names))], table
    parts = [f"{_listed(causes or effects)} computed in {device.dtype} there and wider on the cpu"] if wider else []
    parts += [f"so, because of its inputs, is {_listed(effects)}"] if causes and effects else []
    parts += [f"{_listed(banned)} banned there"] if banned else []
    message = f"of {len(names)} ops {', and '.join(parts)}"
    if judged:
        return [POLICY_GAP.passed(subject, f"judged under {device.device}'s policy; {message}", len(names))], table
    message = f"what runs on the cpu should show what happens on {device.device}; {message}"
    first = next(call for call in device.calls if call.op == [*causes, *effects, *banned][0])
    hint = f"judge it under the device's policy, as ampcheck audit --device {device.device} and ampcheck.emulate do"
    return [POLICY_GAP.warn(subject, message, where=first.where, hint=hint)], table


def check_elsewhere(calls: PolicyCalls, other: Policy) -> Iterator[Finding]:
    """`policy-gap` of a run on the CPU: not judged, with what another device's autocast does otherwise, bans first.

    By the rules alone, for the inputs that ops have on the CPU: nothing is run again.
    """
    by_act: dict[str, set[str]] = {"bans": set(), "computes in 16 bits": set(), "computes in float32": set()}
    for call in calls.calls:
        rule, own = other.rule(call.op), calls.policy.rule(call.op)
        if rule == BANNED != own:
            by_act["bans"].add(call.op)
        elif rule == LOWER and "float32" in call.passed:
            by_act["computes in 16 bits"].add(call.op)
        elif rule in _WIDE and own not in _WIDE and calls.dtype in call.passed:
            by_act["computes in float32"].add(call.op)
    if acts := [f"{act} {_listed(sorted(ops))}" for act, ops in by_act.items() if ops]:
        name = other.device.upper()
        message = f"{name} judges otherwise: its autocast {', '.join(acts)}; --device {other.device} judges by it"
        yield POLICY_GAP.skip(subject_of(calls), message)


def _differs(op: str, cpu: PolicyCalls, device: PolicyCalls) -> bool:
    """Whether an op has another rule or other dtypes; an op made of ruled ops counts by those."""
    on_cpu, on_device = _passed(op, cpu), _passed(op, device)
    other_rule = cpu.policy.rule(op) != device.policy.rule(op)
    return other_rule or bool(on_cpu != on_device and on_cpu and on_device)


def _row(op: str, cpu: PolicyCalls, device: PolicyCalls) -> Sequence[str]:
    modules = sorted({call.module for call in (*cpu.calls, *device.calls) if call.op == op})
    dtypes = [", ".join(sorted(_passed(op, calls))) or "inside another op" for calls in (cpu, device)]
    rules = [calls.policy.rule(op) or "left alone" for calls in (cpu, device)]
    return (op, *rules, *dtypes, _counted(modules))


def _passed(op: str, calls: PolicyCalls) -> set[str]:
    return {call.passed for call in calls.calls if call.op == op}


def _computes_low(call: OpCall, calls: PolicyCalls) -> bool:
    """Whether this call computes in autocast's dtype, by itself and not through ops that it is made of."""
    made_of_others = not call.rule and call.op in calls.composite
    # An op without a rule that takes mixed dtypes promotes them by itself.
    return not made_of_others and "dtype=float32" not in call.passed and _floats(call.passed) == {calls.dtype}


def _is_wider_on_cpu(call: OpCall, cpu: PolicyCalls, device: PolicyCalls) -> bool:
    same = [other for other in cpu.calls if (other.op, other.module) == (call.op, call.module)]
    if same:
        return not any(_is_low(other, cpu) for other in same)
    # Inside another op's kernel on the CPU: one that the device takes apart, and the CPU widens.
    apart = {other.op for other in device.calls if not other.rule and other.op in device.composite}
    around = [other for other in cpu.calls if other.op in apart and other.module == call.module and other.rule]
    return bool(around) and not any(_computes_low(other, cpu) for other in around)


def _is_low(call: OpCall, calls: PolicyCalls) -> bool:
    """Whether a call computes in autocast's dtype, by itself or through an op that it is made of."""
    if call.rule or call.op not in calls.composite:
        return _computes_low(call, calls)
    site = (call.module, call.file, call.line)
    parts = [other for other in calls.calls if (other.module, other.file, other.line) == site and other.op != call.op]
    return _floats(call.inputs) == {calls.dtype} or any(_computes_low(part, calls) for part in parts)


def _is_cause(call: OpCall, cpu: PolicyCalls) -> bool:
    """Whether the CPU passed the op the same and computed it wider; else another op passed it wider tensors."""
    same = [other for other in cpu.calls if (other.op, other.module) == (call.op, call.module)]
    return not same or any(_floats(other.inputs) == _floats(call.inputs) for other in same)
