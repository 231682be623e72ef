"""Judge the recorded calls of a model: against its lock, against the CPU's policy, and by themselves. No torch runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampcheck.autocast.calls import OpCall, PolicyCalls, is_custom
from ampcheck.autocast.drift import history, since
from ampcheck.autocast.locks.file import ANY_WAY, Locked, LockedOp
from ampcheck.autocast.policy import BANNED, RULES, release_of
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Table, Verdict, Where, passed

_NAMED = 6
"""How many modules, ops or lines a message names."""

Used = frozenset[tuple[str, str]]
"""Dtypes and module of calls, as `LockedOp.used`."""


def subject_of(calls: PolicyCalls) -> str:
    """The subject as findings name it: with the device, the dtype and whether the device was emulated."""
    how = "" if calls.device == "cpu" else ", emulated"
    return f"{calls.subject} [{calls.device} {calls.dtype}{how}]"


# The lock --------------------------------------------------------------------------------------------------------


def refresh(ways: str) -> str:
    """The hint of what differs from a lock that can be written anew in these ways."""
    return f"where the change is meant, refresh the lock: {ways}"


def check_lock(calls: PolicyCalls, locked: Locked, now: Locked, ways: str = ANY_WAY) -> list[Finding]:
    """The ops with a rule, their rules, dtypes and modules are those of the lock: one failure for each op that is not.

    calls: what was recorded. locked: the entry of the lock. now: the entry that `calls` would make. ways: how the lock
    is refreshed, for the hint.
    """
    slug = "policy-drift"
    subject = subject_of(calls)
    if broken := _broken_off(calls, slug):
        return [broken]
    if not now.ops and not locked.ops:
        message = "a lock needs an op that reaches autocast; none did, neither now nor when it was locked"
        return [Finding(slug, Verdict.FAIL, subject, message, observed=0.0, limit=1.0, unit="ops")]
    changed = [op for op in sorted({*locked.ops, *now.ops}) if _differ(locked.ops.get(op), now.ops.get(op))]
    roots = {op: then for op in changed if (then := _other_rule(op, calls, locked)) is not None}
    findings = [_ruled_otherwise(op, roots[op], calls, locked, now) for op in roots]
    affected = {module for op in roots for module in _modules(now.ops.get(op) or locked.ops.get(op))}
    for op in changed:
        if op not in roots:
            why = _why(op, roots, affected, calls, locked, now)
            findings.append(_called_otherwise(op, why, calls, locked, now))
    if findings:
        return [replace(finding, hint=refresh(ways)) for finding in findings]
    count = sum(len(op.used) for op in now.ops.values())
    message = f"as locked under PyTorch {locked.torch}: {len(now.ops)} ops in {count} combinations of dtypes and module"
    return [passed(slug, subject, message, count, observed=float(len(now.ops)), limit=1.0, unit="ops")]


def _broken_off(calls: PolicyCalls, slug: str) -> Finding | None:
    """A run that ended early, unless at a banned op, says nothing of the ops behind that place."""
    raised = calls.raised
    if raised is None or calls.policy.rule(raised.op) == BANNED:
        return None
    message = f"the model must run to its end, so that its ops can be compared; it raised {raised.message}"
    return Finding(slug, Verdict.FAIL, subject_of(calls), message, raised.where)


def _differ(was: LockedOp | None, now: LockedOp | None) -> bool:
    if was is None or now is None:
        return was is not now
    return (was.rule, was.used) != (now.rule, now.used)


def _other_rule(op: str, calls: PolicyCalls, locked: Locked) -> str | None:
    """The rule when the lock was made, where it is another one now; None where it is the same, or not known."""
    if op in locked.ops:
        then: str | None = locked.ops[op].rule
    else:
        then = _shipped_rule(op, calls, release_of(locked.torch))
    return then if then is not None and then != calls.policy.rule(op) else None


def _shipped_rule(op: str, calls: PolicyCalls, release: str) -> str | None:
    if is_custom(op):
        return None
    try:
        return dict(history(op, calls.device, calls.dtype)).get(release)
    except UsageError:
        return None


def _ruled_otherwise(op: str, then: str, calls: PolicyCalls, locked: Locked, now: Locked) -> Finding:
    rule = calls.policy.rule(op)
    message = f"{op} must be treated as when it was locked, under PyTorch {locked.torch}: {_told(then)}; under PyTorch "
    message += f"{calls.torch} it is: {_told(rule)}, {_cause(op, rule, calls, locked)}"
    was, is_ = _dtypes(locked.ops.get(op)), _dtypes(now.ops.get(op))
    if was and is_ and was != is_:
        message += f"; its tensors were {was}, they are {is_}"
    elif is_ or was:
        message += f"; its tensors are {is_}" if is_ else f"; its tensors were {was}"
    message += f"; used by {_named(_modules(now.ops.get(op) or locked.ops.get(op)), 'module')}"
    used = Used((call.dtypes, call.module) for call in calls.calls if call.op == op)
    return Finding("policy-drift", Verdict.FAIL, subject_of(calls), message, _where(op, calls, used))


def _cause(op: str, rule: str, calls: PolicyCalls, locked: Locked) -> str:
    before, after = release_of(locked.torch), release_of(calls.torch)
    if is_custom(op):
        return "a custom op: what is registered for it has changed"
    if before == after:
        return f"the release is the same: the build is another (locked with {locked.build}), or a library replaces it"
    try:
        return since(op, calls.device, rule, calls.dtype)
    except UsageError:
        return f"between {before} and {after}, of which ampcheck carries no policies"


def _why(op: str, roots: dict[str, str], affected: set[str], calls: PolicyCalls, locked: Locked, now: Locked) -> str:
    held = [entry for entry in (locked.ops.get(op), now.ops.get(op)) if entry is not None]
    modules = {module for entry in held for module in _modules(entry)}
    others = ", ".join(roots)
    if roots and len(held) == 1 and modules <= affected:
        return f"its own rule did not change; it stands in the modules of {others}, whose rule did"
    if roots:
        return f"its own rule did not change; {others}, whose rule did, may hand it other dtypes, or the model changed"
    if locked.torch == calls.torch:
        return "its rule is the same: the model's own call changed"
    return (
        f"its rule is the same under {locked.torch} and {calls.torch}: the model's own call changed, or PyTorch makes "
        "one of its ops of others"
    )


def _called_otherwise(op: str, why: str, calls: PolicyCalls, locked: Locked, now: Locked) -> Finding:
    was, is_ = locked.ops.get(op), now.ops.get(op)
    lost = was.used - (is_.used if is_ else Used()) if was else Used()
    new = is_.used - (was.used if was else Used()) if is_ else Used()
    if was is None:
        told = f"only locked ops may be called; {op} ({calls.policy.rule(op)}; {_dtypes(is_)}) is called too, in "
        told += _named(_modules(is_), "module") + _lines(is_, new)
    elif is_ is None:
        told = f"every locked op must be called; {op} ({was.rule}; {_dtypes(was)}) no longer is, in "
        told += _named(_modules(was), "module") + _lines(was, lost, "when locked ")
    else:
        told = f"{op} ({is_.rule}) must be called as locked"
        told += f"; no longer: {_uses(was, lost, 'when locked ')}" if lost else ""
        told += f"; new: {_uses(is_, new)}" if new else ""
    message = f"{told} ({why})"
    return Finding("policy-drift", Verdict.FAIL, subject_of(calls), message, _where(op, calls, new or lost))


def _uses(op: LockedOp, used: Used, when: str = "") -> str:
    told = []
    for dtypes in sorted({dtypes for dtypes, _ in used}):
        of_these = frozenset(use for use in used if use[0] == dtypes)
        modules = sorted(module for _, module in of_these)
        told.append(f"{dtypes} in {_named(modules, 'module')}{_lines(op, of_these, when)}")
    return "; ".join(told)


def _lines(op: LockedOp | None, used: Used, when: str = "") -> str:
    """`, at models.py:12`, of the calls in these dtypes and modules."""
    held = op.calls.items() if op is not None else ()
    lines = {place for dtypes, places in held for module, place in places if place and (dtypes, module) in used}
    return f", {when}at {_listed(sorted(lines, key=_by_line))}" if lines else ""


def _by_line(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _modules(op: LockedOp | None) -> list[str]:
    return sorted({module for _, module in op.used}) if op is not None else []


def _dtypes(op: LockedOp | None) -> str:
    return ", ".join(sorted(op.calls)) if op is not None else ""


def _told(rule: str) -> str:
    return f"{rule} ({RULES[rule]})" if rule in RULES else rule or "left alone"


def _where(op: str, calls: PolicyCalls, used: Used) -> Where:
    """Of the first call in these dtypes and modules. Where there is none now, no line: the op's others are innocent."""
    found = (call.where for call in calls.calls if call.op == op and (call.dtypes, call.module) in used)
    return next(found, Where(phase="forward", module=min(module for _, module in used) if used else "", op=op))


def _named(names: Iterable[str], what: str) -> str:
    """`2 modules: a, b`."""
    given = list(dict.fromkeys(names))
    return f"{len(given)} {what}{'s' if len(given) != 1 else ''}: {_listed(given)}"


def _listed(names: Sequence[str]) -> str:
    """`a, b`; of the longest lists the end is left out."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(name or "(the root)" for name in names[:_NAMED]) + more


# By themselves ---------------------------------------------------------------------------------------------------


def check_banned(calls: PolicyCalls) -> list[Finding]:
    """No op is called that autocast bans on the device."""
    slug = "policy-banned"
    subject = subject_of(calls)
    findings = []
    banned = {call.op: call for call in reversed(calls.calls) if call.rule == BANNED}
    for op, call in sorted(banned.items()):
        text = " ".join(calls.policy.ops[op].raises.split())
        first, _, rest = text.partition(". ")
        raised = calls.raised is not None and calls.raised.op == op
        verdict, what = (Verdict.FAIL, "raises") if raised else (Verdict.WARN, "raised, which the model caught")
        modules = _named((c.module for c in calls.calls if c.op == op), "module")
        message = f"no op may be called that autocast bans on {calls.device}; {op} {what}: {first or text} ({modules})"
        hint = rest or "leave autocast around it: torch.autocast(..., enabled=False), with float32 inputs"
        findings.append(Finding(slug, verdict, subject, message, call.where, hint=hint))
    ops = len({call.op for call in calls.ruled})
    return findings or [_clean(slug, calls, f"none of {ops} ops is banned", ops)]


def check_unregistered(calls: PolicyCalls) -> list[Finding]:
    """No custom op gets floating tensors under autocast without a kernel that tells autocast what to do."""
    slug = "policy-unregistered"
    subject = subject_of(calls)
    findings = []
    for op in sorted({call.op for call in calls.unregistered}):
        found = [call for call in calls.unregistered if call.op == op]
        raised = calls.raised is not None and calls.raised.op == op
        mixed = [call for call in found if _is_mixed(call)]
        dtypes = ", ".join(dict.fromkeys(call.given for call in found))
        message = f"a custom op should have an autocast kernel on {calls.device}; {op} has none: it is never cast and "
        message += f"got {dtypes} in {_named((call.module for call in found), 'module')}"
        if raised and calls.raised is not None:
            message += f"; it raised {calls.raised.message}"
        hint = f"register one: torch.library.register_autocast({op!r}, {calls.device!r}, dtype); or cast inside the op"
        verdict = Verdict.FAIL if raised and mixed else Verdict.WARN
        findings.append(Finding(slug, verdict, subject, message, (mixed or found)[0].where, hint=hint))
    custom = {call.op for call in calls.calls if is_custom(call.op)}
    return findings or [_clean(slug, calls, f"none of {len(custom)} custom ops is left alone by autocast", len(custom))]


def _is_mixed(call: OpCall) -> bool:
    return len(_floats(call.given)) > 1


def _floats(dtypes: str) -> set[str]:
    """The floating dtypes among those of a call."""
    words = dtypes.replace("[", " ").replace("]", " ").replace("|", " ").split()
    return {word for word in words if "float" in word}


def _clean(slug: str, calls: PolicyCalls, text: str, seen: int) -> Finding:
    if calls.raised is not None or not calls.calls:
        reason = f"the run raised {calls.raised.message}" if calls.raised else "no op reached autocast"
        return Finding(slug, Verdict.SKIP, subject_of(calls), f"not judged: {reason}")
    return passed(slug, subject_of(calls), text, seen)


# Between the CPU and a device ------------------------------------------------------------------------------------


def check_gap(cpu: PolicyCalls, device: PolicyCalls) -> tuple[list[Finding], Table]:
    """Which ops of a model autocast treats otherwise on the CPU than on the device, all of them in the table.

    A warning where the CPU computes wider than the device, or the device bans the op: a test on the CPU cannot see
    what overflows or raises there. Both runs are of the same model in the same dtype.
    """
    slug = "policy-gap"
    subject = subject_of(device)
    rows = [_row(op, cpu, device) for op in _gap(cpu, device)]
    columns = ("op", "on cpu", f"on {device.device}", "dtypes on cpu", f"dtypes on {device.device}", "modules")
    title = f"Ops that autocast treats otherwise on cpu than on {device.device}"
    table = Table(title, columns, rows, check=slug, note=f"{subject}, PyTorch {device.torch}.")
    for calls in (cpu, device):
        if _broken_off(calls, slug) or not calls.calls:
            return [_clean(slug, calls, "", 0)], table
    banned = sorted({call.op for call in device.calls if call.rule == BANNED} - _banned(cpu))
    found = [call for call in device.calls if _computes(call, device) and _wider(call, cpu, device)]
    causes = sorted({call.op for call in found if _is_cause(call, cpu)})
    after = sorted({call.op for call in found}.difference(causes))
    wider = [*causes, *after]
    seen = len({call.op for call in (*cpu.calls, *device.calls)})
    if not banned and not wider:
        message = f"of {seen} ops {len(rows)} are treated otherwise on cpu than on {device.device}"
        message += f" ({_listed([str(row[0]) for row in rows])})" if rows else ""
        message += "; none of them is computed wider on the cpu"
        return [passed(slug, subject, message, seen)], table
    told = [f"{_listed(causes or after)} computed in {device.dtype} there and wider on the cpu"] if wider else []
    told += [f"so, by what it is given, is {_listed(after)}"] if causes and after else []
    told += [f"{_listed(banned)} banned there"] if banned else []
    message = f"what runs on the cpu should tell what happens on {device.device}; of {seen} ops {', and '.join(told)}"
    first = next(call for call in device.calls if call.op == (wider or banned)[0])
    hint = f"judge it under the device's policy, as ampcheck audit --device {device.device} and ampcheck.emulate do"
    return [Finding(slug, Verdict.WARN, subject, message, first.where, hint=hint)], table


def _gap(cpu: PolicyCalls, device: PolicyCalls) -> list[str]:
    """The ops that either run called, with another rule or other dtypes; what is made of ruled ops counts by those."""
    return [
        op
        for op in sorted({call.op for call in (*cpu.calls, *device.calls)})
        if cpu.policy.rule(op) != device.policy.rule(op)
        or (_got(op, cpu) != _got(op, device) and _got(op, cpu) and _got(op, device))
    ]


def _row(op: str, cpu: PolicyCalls, device: PolicyCalls) -> Sequence[str]:
    modules = sorted({call.module for call in (*cpu.calls, *device.calls) if call.op == op})
    dtypes = [", ".join(sorted(_got(op, calls))) or "inside another op" for calls in (cpu, device)]
    rules = [calls.policy.rule(op) or "left alone" for calls in (cpu, device)]
    return (op, *rules, *dtypes, _named(modules, "module"))


def _got(op: str, calls: PolicyCalls) -> set[str]:
    return {call.got for call in calls.calls if call.op == op}


def _banned(calls: PolicyCalls) -> set[str]:
    return {op for op, policy in calls.policy.ops.items() if policy.rule == BANNED}


def _computes(call: OpCall, calls: PolicyCalls) -> bool:
    """Whether this call computes in autocast's dtype, by itself and not through ops that it is made of."""
    made_of_others = not call.rule and call.op in calls.composite
    # An op without a rule that takes mixed dtypes promotes them by itself.
    return not made_of_others and "dtype=float32" not in call.got and _floats(call.got) == {calls.dtype}


def _wider(call: OpCall, cpu: PolicyCalls, device: PolicyCalls) -> bool:
    """Whether the CPU computes in a wider dtype what this call of the device does."""
    same = [other for other in cpu.calls if (other.op, other.module) == (call.op, call.module)]
    if same:
        return not any(_is_low(other, cpu) for other in same)
    # Inside another op's kernel on the CPU: one that the device takes apart, and the CPU widens.
    apart = {other.op for other in device.calls if not other.rule and other.op in device.composite}
    around = [other for other in cpu.calls if other.op in apart and other.module == call.module and other.rule]
    return bool(around) and not any(_computes(other, cpu) for other in around)


def _is_low(call: OpCall, calls: PolicyCalls) -> bool:
    """Whether a call computes in autocast's dtype, by itself or through an op that it is made of."""
    if call.rule or call.op not in calls.composite:
        return _computes(call, calls)
    place = (call.module, call.file, call.line)
    parts = [other for other in calls.calls if (other.module, other.file, other.line) == place and other.op != call.op]
    return _floats(call.given) == {calls.dtype} or any(_computes(part, calls) for part in parts)


def _is_cause(call: OpCall, cpu: PolicyCalls) -> bool:
    """Whether the CPU gave the op the same and computed it wider; else it was given wider tensors by another."""
    same = [other for other in cpu.calls if (other.op, other.module) == (call.op, call.module)]
    return not same or any(_floats(other.given) == _floats(call.given) for other in same)
