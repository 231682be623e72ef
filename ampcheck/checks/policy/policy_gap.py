"""Requires: A CPU test represents the target device. A lock of both warns where the CPU computes an op of the model
wider than the device does, or the device bans it; an audit under the device's policy passes, as it sees what happens
there. The table lists every op whose autocast rule differs.

Measured: Forward and backward run on the CPU twice, under the CPU's autocast policy and under the device's, and the
dtypes that each op gets after autocast are compared by op and module.

Causes: The CPU keeps in float32 what CUDA computes in float16 (PyTorch has a list of ops for each device), so that an
overflow there cannot be seen here; CUDA and XPU ban binary_cross_entropy, the CPU does not.

Fix: Test under the device's policy (ampcheck audit --device cuda, ampcheck.emulate), or cast in the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.policy import floats, listed_names, passed
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import MODELS
from ampcheck.records.policy import (
    APPEND_DTYPE,
    BANNED,
    FP32,
    LOWER,
    SET_DTYPE,
    OpCall,
    OtherPolicy,
    PolicyCalls,
    PolicyGap,
)

CHECK = Check(
    "policy-gap",
    "policy",
    __doc__,
    subjects=MODELS,
    needs=("PolicyGap", "OtherPolicy"),
    order=301,
    evidence=("docs/examples/checks/policy-gap", "reports/found/ignite-ssim-0-255"),
)

_WIDE = (FP32, SET_DTYPE, APPEND_DTYPE)
"""Rules by which an op computes in float32."""


def check(record: PolicyGap | OtherPolicy, limits: Limits) -> Iterator[Finding]:
    """The CPU computes the ops of a model as the device does."""
    return _of_runs(record) if isinstance(record, PolicyGap) else _of_rules(record)


def _of_runs(gap: PolicyGap) -> Iterator[Finding]:
    """A warning where the CPU computes wider than the device, or the device bans the op: a test on the CPU cannot see
    what overflows or raises there."""
    subject, cpu, device = gap.name, gap.cpu, gap.device
    for calls in (cpu, device):
        if calls.ended_early or not calls.calls:
            yield passed(CHECK, calls, "", 0)
            return
    banned_on_cpu = {op for op, policy in cpu.policy.ops.items() if policy.rule == BANNED}
    banned = sorted({call.op for call in device.calls if call.rule == BANNED} - banned_on_cpu)
    wider = [call for call in device.calls if _computes_low(call, device) and _is_wider_on_cpu(call, cpu, device)]
    causes = sorted({call.op for call in wider if _is_cause(call, cpu)})
    effects = sorted({call.op for call in wider}.difference(causes))
    count, differing = len(gap.ops), gap.differing
    if not banned and not wider:
        message = f"of {count} ops {len(differing)} are treated otherwise on cpu than on {device.device}"
        message += f" ({listed_names(differing)})" if differing else ""
        message += "; none of them is computed wider on the cpu"
        yield CHECK.passed(subject, message, count)
        return
    parts = (
        [f"{listed_names(causes or effects)} computed in {device.dtype} there and wider on the cpu"] if wider else []
    )
    parts += [f"so, because of its inputs, is {listed_names(effects)}"] if causes and effects else []
    parts += [f"{listed_names(banned)} banned there"] if banned else []
    message = f"of {count} ops {', and '.join(parts)}"
    if gap.judged:
        yield CHECK.passed(subject, f"judged under {device.device}'s policy; {message}", count)
        return
    message = f"what runs on the cpu should show what happens on {device.device}; {message}"
    first = next(call for call in device.calls if call.op == [*causes, *effects, *banned][0])
    hint = f"judge it under the device's policy, as ampcheck audit --device {device.device} and ampcheck.emulate do"
    yield CHECK.warn(subject, message, where=first.where, hint=hint)


def _of_rules(record: OtherPolicy) -> Iterator[Finding]:
    """Not judged: what another device's autocast does otherwise with the inputs on the CPU, bans first."""
    calls, other = record.calls, record.other
    by_act: dict[str, set[str]] = {"bans": set(), "computes in 16 bits": set(), "computes in float32": set()}
    for call in calls.calls:
        rule, own = other.rule(call.op), calls.policy.rule(call.op)
        if rule == BANNED != own:
            by_act["bans"].add(call.op)
        elif rule == LOWER and "float32" in call.passed:
            by_act["computes in 16 bits"].add(call.op)
        elif rule in _WIDE and own not in _WIDE and calls.dtype in call.passed:
            by_act["computes in float32"].add(call.op)
    if acts := [f"{act} {listed_names(sorted(ops))}" for act, ops in by_act.items() if ops]:
        name = other.device.upper()
        message = f"{name} judges otherwise: its autocast {', '.join(acts)}; --device {other.device} judges by it"
        yield CHECK.skip(record.name, message)


def _computes_low(call: OpCall, calls: PolicyCalls) -> bool:
    """Return whether this call computes in autocast's dtype, by itself and not through ops that it is made of."""
    made_of_others = not call.rule and call.op in calls.composite
    # An op without a rule that takes mixed dtypes promotes them by itself.
    return not made_of_others and "dtype=float32" not in call.passed and floats(call.passed) == {calls.dtype}


def _is_wider_on_cpu(call: OpCall, cpu: PolicyCalls, device: PolicyCalls) -> bool:
    same = [other for other in cpu.calls if (other.op, other.module) == (call.op, call.module)]
    if same:
        return not any(_is_low(other, cpu) for other in same)
    # Inside another op's kernel on the CPU: one that the device takes apart, and the CPU widens.
    apart = {other.op for other in device.calls if not other.rule and other.op in device.composite}
    around = [other for other in cpu.calls if other.op in apart and other.module == call.module and other.rule]
    return bool(around) and not any(_computes_low(other, cpu) for other in around)


def _is_low(call: OpCall, calls: PolicyCalls) -> bool:
    """Return whether a call computes in autocast's dtype, by itself or through an op that it is made of."""
    if call.rule or call.op not in calls.composite:
        return _computes_low(call, calls)
    site = (call.module, call.file, call.line)
    parts = [other for other in calls.calls if (other.module, other.file, other.line) == site and other.op != call.op]
    return floats(call.inputs) == {calls.dtype} or any(_computes_low(part, calls) for part in parts)


def _is_cause(call: OpCall, cpu: PolicyCalls) -> bool:
    """Return whether the CPU passed the op the same and computed it wider; else another op passed it wider tensors."""
    same = [other for other in cpu.calls if (other.op, other.module) == (call.op, call.module)]
    return not same or any(floats(other.inputs) == floats(call.inputs) for other in same)
