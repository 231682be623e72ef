"""Autocast rules of the installed PyTorch for each op on each kind of device, and for the ops of the demo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampcheck import demo
from ampcheck.autocast.drift import judge_drift
from ampcheck.autocast.observe import OpDtypes, observe_ops
from ampcheck.autocast.policy import nearest, releases
from ampcheck.autocast.probe import build
from ampcheck.autocast.views import Source, View, counts_view, diff_view, policy_view, source_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Finding, Run, Scalar, Table, Verdict
from ampcheck.tools.lab.lab import Expectations, run_of

PAIR = ("cpu", "cuda")
"""The two devices whose difference is shown op by op."""


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """probed, registered: overloads with an autocast kernel, by device. changed: how many differ between `PAIR`.
    drift: findings of the check against the shipped snapshots. ops: of the demo, by device."""

    device: str
    probed: Mapping[str, int]
    registered: Mapping[str, int]
    changed: int
    drift: Sequence[Finding]
    ops: Mapping[str, OpDtypes]


def measure_policies(device: str = "cpu", *, progress: Progress = silent) -> PolicyStats:
    """Probe every device type, and observe the demo in bfloat16 under the policies of `PAIR` and of `device`."""
    progress("probing every device", 0, 3)
    source = source_of("installed", "float16")
    policies = {name: source.policy(name) for name in source.devices}
    drift: list[Finding] = []
    if releases():
        snapshot, installed = nearest(source.torch), build()
        for policy in policies.values():
            drift += judge_drift(policy, snapshot, build=installed).findings
    changed = len(diff_view(source, source, *PAIR).data["changes"])
    ops = {}
    kinds = list(dict.fromkeys((*PAIR, device.partition(":")[0])))
    for number, kind in enumerate(kinds):
        progress(f"the ops of the demo under {kind}", 1 + number, 1 + len(kinds))
        ops[kind] = observe_ops(demo.subject(), device=kind, dtype="bfloat16", compile=False, name="the demo")
    probed = {name: len(policy.ops) for name, policy in policies.items()}
    registered = {name: policy.registered for name, policy in policies.items()}
    return PolicyStats(device, probed, registered, changed, drift, ops)


def check_policies(stats: PolicyStats) -> list[Finding]:
    """Every overload was probed; PyTorch follows the snapshot of its release; the demo's ops follow the rules."""
    lab = Expectations("policy", stats.device)
    probed, registered = sum(stats.probed.values()), sum(stats.registered.values())
    expected = f"each overload with an autocast kernel reveals its rule, on {len(stats.probed)} kinds of devices"
    outcome = f"{probed} of {registered} do; CPU and CUDA treat {stats.changed} overloads differently"
    lab.expect(expected, outcome, probed == registered > 0, seen=registered)
    wrong = [finding.message for finding in stats.drift if finding.verdict in (Verdict.FAIL, Verdict.WARN)]
    compared = sum(finding.seen or 0 for finding in stats.drift)
    if wrong or compared:
        expected = "the installed PyTorch treats ops as the snapshot of its release that ampcheck carries"
        outcome = "; ".join(wrong[:3]) or f"so it does on {len(stats.probed)} devices"
        lab.expect(expected, outcome, not wrong, seen=compared, warns=True)
    elif stats.drift:
        lab.skip(stats.drift[0].message)
    else:
        lab.skip("ampcheck carries no snapshot to compare this PyTorch with")
    for kind, observed in stats.ops.items():
        low = [op for op in observed.ops if op.rule == "lower_precision"]
        right = sum(observed.dtype in op.compute for op in low)
        expected = f"ops of the demo that autocast lowers under {kind} compute in {observed.dtype}"
        outcome = f"{right} of {len(low)} do, of {len(observed.ops)} kinds of calls"
        lab.expect(expected, outcome, right == len(low) > 0, seen=len(low))
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables: rules by device, where CPU and CUDA differ, overloads of each device, the demo's ops side by side."""
    stats = measure_policies(device, progress=progress)
    source = source_of("installed", "float16")
    views = [counts_view(source), diff_view(source, source, *PAIR), *device_views(source, device)]
    counts, *tables = (table for view in views for table in view.tables)
    seen = {
        "overloads with an autocast kernel": sum(stats.probed.values()),
        "ops of the demo": len(stats.ops[PAIR[0]].ops),
    }
    return run_of(check_policies(stats), seen, tables=(counts, ops_table(stats.ops), *tables))


def device_views(source: Source, device: str) -> list[View]:
    """The overloads of each device, `PAIR` and `device` first."""
    kinds = dict.fromkeys((*PAIR, device.partition(":")[0], *source.devices))
    return [policy_view(source, kind) for kind in kinds if kind in source.devices]


def ops_table(ops: Mapping[str, OpDtypes]) -> Table:
    """Each op of the demo with its rule and the dtypes it computes in, on each device."""
    rows: list[tuple[Scalar, ...]] = []
    for name in dict.fromkeys(op.op for observed in ops.values() for op in observed.ops):
        row: list[Scalar] = [name]
        for observed in ops.values():
            calls = [op for op in observed.ops if op.op == name]
            row.append(_alternatives(op.rule or "left alone" for op in calls) or "not called")
            row.append(_alternatives(" ".join(dict.fromkeys(t for t in op.compute if "float" in t)) for op in calls))
        rows.append(tuple(row))
    columns = ["op", *(part for kind in ops for part in (f"{kind}: rule", f"{kind}: computes in"))]
    title = f"The ops of the demo under autocast to {next(iter(ops.values())).dtype}"
    note = "Forward, in the order of the calls, without integers. or: the calls differ."
    return Table(title, columns, rows, note=note)


def _alternatives(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts))
