"""What autocast of the installed PyTorch does to each op on each kind of device, and to the ops of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampcheck import demo
from ampcheck.autocast.drift import judge_drift
from ampcheck.autocast.observe import OpDtypes, observe_ops
from ampcheck.autocast.policy import nearest, releases
from ampcheck.autocast.probe import build
from ampcheck.autocast.views import Source, View, counts_view, diff_view, policy_view, source_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table, Verdict
from ampcheck.lab.expectations import Expectations
from ampcheck.lab.registry import check_of

CHECK = check_of("policy")

PAIR = ("cpu", "cuda")
"""The two devices whose difference is shown op by op."""


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """probed, registered: overloads with an autocast kernel, by device. changed: how many differ between `PAIR`.
    drift: what the check against the shipped snapshots says. ops: of the demo, by device."""

    device: str
    probed: dict[str, int]
    registered: dict[str, int]
    changed: int
    drift: tuple[Finding, ...]
    ops: dict[str, OpDtypes]


def measure_policies(device: str = "cpu", *, progress: Progress = silent) -> PolicyFacts:
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
    return PolicyFacts(
        device,
        {name: len(policy.ops) for name, policy in policies.items()},
        {name: policy.registered for name, policy in policies.items()},
        changed,
        tuple(drift),
        ops,
    )


def check_policies(facts: PolicyFacts) -> list[Finding]:
    """Every overload was asked; PyTorch does what its release is known for; the demo's ops follow the rules."""
    asked, there = sum(facts.probed.values()), sum(facts.registered.values())
    expected = f"each overload with an autocast kernel tells its rule, on {len(facts.probed)} kinds of devices"
    found = f"{asked} of {there} do; CPU and CUDA treat {facts.changed} overloads differently"
    lab = Expectations(CHECK, facts.device)
    lab.expect(expected, found, asked == there > 0, seen=there)
    wrong = [one for one in facts.drift if one.verdict in (Verdict.FAIL, Verdict.WARN)]
    compared = sum(one.seen or 0 for one in facts.drift)
    if wrong or compared:
        expected = "the installed PyTorch treats ops as the snapshot of its release that ampcheck carries"
        found = "; ".join(one.message for one in wrong[:3]) if wrong else f"so it does on {len(facts.probed)} devices"
        lab.expect(expected, found, not wrong, seen=compared, warns=True)
    else:
        why = facts.drift[0].message if facts.drift else "ampcheck carries no snapshot to compare this PyTorch with"
        lab.skip(why)
    for kind, seen in facts.ops.items():
        low = [op for op in seen.ops if op.rule == "lower_precision"]
        strayed = [op for op in low if seen.dtype not in op.compute]
        expected = f"what autocast lowers in the demo under {kind} computes in {seen.dtype}"
        found = f"{len(low) - len(strayed)} of {len(low)} do, of {len(seen.ops)} kinds of calls"
        lab.expect(expected, found, bool(low) and not strayed, seen=len(low))
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables: rules by device, where CPU and CUDA differ, overloads of each device, the demo's ops side by side."""
    facts = measure_policies(device, progress=progress)
    source = source_of("installed", "float16")
    views = [counts_view(source), diff_view(source, source, *PAIR), *_of_devices(source, device)]
    tables = [replace(table, check=CHECK.slug) for view in views for table in view.tables]
    return Run(
        findings=tuple(check_policies(facts)),
        coverage=Coverage(
            {
                "overloads with an autocast kernel": sum(facts.probed.values()),
                "ops of the demo": len(facts.ops[PAIR[0]].ops),
            }
        ),
        tables=(tables[0], ops_table(facts.ops), *tables[1:]),
    )


def _of_devices(source: Source, device: str) -> Sequence[View]:
    kinds = dict.fromkeys((*PAIR, device.partition(":")[0], *source.devices))
    return [policy_view(source, kind) for kind in kinds if kind in source.devices]


def ops_table(ops: dict[str, OpDtypes]) -> Table:
    """Each op of the demo with what it is given and what it computes in, on each device."""
    first = next(iter(ops.values()))
    names = dict.fromkeys(op.op for seen in ops.values() for op in seen.ops)
    rows: list[tuple[Scalar, ...]] = []
    for name in names:
        row: list[Scalar] = [name]
        for seen in ops.values():
            held = [op for op in seen.ops if op.op == name]
            row += [
                " or ".join(dict.fromkeys(op.rule or "left alone" for op in held)) or "not called",
                " or ".join(dict.fromkeys(_dtypes(op.compute) for op in held)),
            ]
        rows.append(tuple(row))
    columns = ["op", *(part for kind in ops for part in (f"{kind}: rule", f"{kind}: computes in"))]
    return Table(
        f"The ops of the demo under autocast to {first.dtype}",
        columns,
        rows,
        check=CHECK.slug,
        note="Forward, in the order of the calls; integers are left out. or: in different places.",
    )


def _dtypes(names: Sequence[str]) -> str:
    return " ".join(dict.fromkeys(name for name in names if "float" in name))
