"""Policies as tables and as JSON data, for `ampcheck policy`. No torch unless the installed one is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ampcheck.autocast.drift import compare, history, rule_of, shipped_devices, since, spans
from ampcheck.autocast.policy import load_release, releases
from ampcheck.core.environment import installed
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Table
from ampcheck.records.policy import FIXED, RECURRENT, RULES, UNKNOWN, Policy, release_of

NONE = "–"
"""The rule, in a table, of an op that autocast leaves alone."""


@dataclass(frozen=True)
class View:
    """Tables for a reader, and the same as plain data for `json.dumps`."""

    tables: tuple[Table, ...]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """A PyTorch whose policies are looked up by device: the installed one, or a release that ampcheck carries."""

    torch: str
    build: str
    dtype: str
    devices: tuple[str, ...]
    measured: Callable[[str], Policy]
    shipped: bool = True

    def policy(self, device: str) -> Policy:
        """Of a device. Raises `UsageError` naming those that there are."""
        try:
            return self.measured(device)
        except UsageError:
            if device in self.devices:
                raise
            there = ", ".join(self.devices) or "none"
            raise UsageError(f"{self} has no autocast policy for {device!r}; it has {there}") from None

    def reason(self, policy: Policy, op: str) -> str:
        """Why an overload could not be probed; of a snapshot without the error of the machine that made it."""
        if self.shipped and re.match(r"\w+ error: ", policy.unprobed[op]):
            machine = "the machine that made the snapshot"
            return f"could not be probed on {machine} (it computes on the device before it calls the op)"
        return policy.unprobed[op]

    def unprobed(self, policy: Policy) -> list[str]:
        """A line for each overload that could not be probed."""
        return [f"Not probed on {policy.device}: {op}: {self.reason(policy, op)}" for op in policy.unprobed]

    def __str__(self) -> str:
        return f"PyTorch {self.torch} ({self.build})"

    @property
    def data(self) -> dict[str, str]:
        """The PyTorch and the dtype, for JSON."""
        return {"torch": self.torch, "build": self.build, "dtype": self.dtype}


def source_of(release: str, dtype: str) -> Source:
    """A shipped release, or `installed`. Raises `UsageError` naming the releases or dtypes that there are."""
    if release == "installed":
        import torch

        from ampcheck.autocast.probe import build, low_dtype, measure_policy
        from ampcheck.autocast.state import devices, registered

        low = low_dtype(dtype)
        there = tuple(device for device in devices() if registered(device))
        return Source(torch.__version__, build(), dtype, there, lambda device: measure_policy(device, low), False)
    snapshot = load_release(release)
    there = tuple(snapshot.policies)
    snapshot.policy(there[0], dtype)  # raises for a dtype that it lacks
    return Source(snapshot.torch, snapshot.build, dtype, there, lambda device: snapshot.policy(device, dtype))


def known_best(dtype: str) -> Source:
    """The shipped release that is installed, else the installed PyTorch itself."""
    release = release_of(installed("torch"))  # empty for a PyTorch that was built in place
    return source_of(release if release in releases() else "installed", dtype)


def counts_view(source: Source) -> View:
    """Return how many overloads follow each rule on each device."""
    policies = [source.policy(device) for device in source.devices]
    counts = [policy.counts() for policy in policies]
    rows: list[tuple[str | int, ...]] = [
        (rule, *(count.get(rule, 0) for count in counts)) for rule in RULES if any(rule in count for count in counts)
    ]
    rows.append(("probed", *(len(policy.ops) for policy in policies)))
    rows.append(("registered", *(policy.registered for policy in policies)))
    note = "\n".join(line for policy in policies for line in source.unprobed(policy))
    table = Table(f"{source}, autocast to {source.dtype}", ("rule", *source.devices), rows, note=note)
    return View((table,), {**source.data, "devices": {policy.device: _counts(source, policy) for policy in policies}})


def policy_view(source: Source, device: str) -> View:
    """Every overload that autocast treats on a device, by rule."""
    policy = source.policy(device)
    groups: dict[str, list[str]] = {}
    for name, op in sorted(policy.ops.items()):
        groups.setdefault(op.rule, []).append(_short(name))
    rules = sorted(groups, key=[*RULES, *sorted(groups)].index)  # `fixed:float32` is none of RULES
    rows = [(rule, len(groups[rule]), " ".join(groups[rule])) for rule in rules]
    note = [f"Probed {len(policy.ops)} of {policy.registered} registered overloads.", *source.unprobed(policy)]
    note += [f"{rule}: {_meaning(rule)}" for rule in rules]
    title = f"{source}, autocast to {source.dtype} on {policy.device}"
    table = Table(title, ("rule", "ops", "overloads"), rows, note="\n".join(note))
    ops = {name: op.to_json() for name, op in policy.ops.items()}
    return View((table,), {**source.data, "device": policy.device, **_counts(source, policy), "ops": ops})


def diff_view(first: Source, second: Source, device: str, second_device: str) -> View:
    """Where `first` on `device` and `second` on `second_device` differ."""
    a, b = first.policy(device), second.policy(second_device)
    title, labels = f"{first}, {device} and {second_device}", (device, second_device)
    if first is not second:
        a, b = a.of("aten"), b.of("aten")  # a snapshot holds no custom ops
        title, labels = f"{first} and {second}, {device}", (release_of(first.torch), release_of(second.torch))
        labels = labels if len(set(labels)) > 1 else (str(first), str(second))
    compared = compare(a, b, first.build, second.build)
    unclear = {op: first.reason(a, op) if op in a.unprobed else second.reason(b, op) for op in compared.unclear}
    note = [f"{len(compared.changes)} of {len({*a.ops, *a.unprobed, *b.ops, *b.unprobed})} overloads differ."]
    note += [f"Left out, for only one of the builds has it: {change.op}" for change in compared.of_build]
    note += [f"Cannot be compared: {op}: {reason}" for op, reason in unclear.items()]
    rows = [
        (_short(change.op), *(change.describe(op) if op else NONE for op in (change.before, change.after)))
        for change in compared.changes
    ]
    table = Table(f"{title}, autocast to {first.dtype}", ("overload", *labels), rows, note="\n".join(note))
    data = {
        "one": {**first.data, "device": device},
        "other": {**second.data, "device": second_device},
        "changes": [
            {"op": change.op, "before": before and before.to_json(), "after": after and after.to_json()}
            for change in compared.changes
            for before, after in [(change.before, change.after)]
        ],
        "of_another_build": [change.op for change in compared.of_build],
        "not_comparable": unclear,
    }
    return View((table,), data)


def explain_view(source: Source, text: str, device: str | None = None) -> View:
    """The rule, the facts and the history of an op's overloads on every device, or on one.

    text: `aten::norm.Scalar`, `norm`, `torch.nn.functional.layer_norm`. The overloads with a rule on most devices come
    first, those without one and those by names of dimensions last. Raises `UsageError` naming similar ops for one that
    is none, and the devices for one that the source does not know.
    """
    policies = {each: source.policy(each) for each in ([device] if device is not None else source.devices)}

    def rank(name: str) -> tuple[bool, int, str]:
        ruled = sum(bool(rule_of(policy, name)) for policy in policies.values())
        by_dimname = re.search("dimname|names_", name.partition(".")[2], re.IGNORECASE) is not None
        return not ruled or by_dimname, -ruled, name

    tables, data = [], []
    for name in sorted(_find(text, policies.values()), key=rank):
        rows: list[tuple[str, str, str]] = []
        note: list[str] = []
        for device, policy in policies.items():
            rule, op = rule_of(policy, name), policy.ops.get(name)
            stretches = spans(name, device, source.dtype) if device in shipped_devices() else ()
            age = since(name, device, rule, source.dtype, under=release_of(source.torch)) if stretches else ""
            rows.append((device, op.describe() if op else rule or NONE, age))
            note.append(f"{rule or NONE}: {op.raises.splitlines()[0] if op and op.raises else _meaning(rule)}")
            if name in policy.unprobed:
                note.append(f"Not probed on {device}: {source.reason(policy, name)}")
            past = [{"from": first, "to": last, "rule": rule} for first, last, rule in stretches]
            if len(past) > 1:
                parts = (
                    f"{r or 'none'} {first}" + (f" to {last}" if last != first else "") for first, last, r in stretches
                )
                note.append(f"{device} over the releases: {', '.join(parts)}")
            data.append({"op": name, "device": device, "rule": rule, "policy": op and op.to_json(), "history": past})
        note += [*_recurrent(name, policies), *_facts_by_device(name, policies)]
        title = f"{name} under {source}, autocast to {source.dtype}"
        tables.append(Table(title, ("device", "rule", "history"), rows, note="\n".join(dict.fromkeys(note))))
    return View(tuple(tables), {**source.data, "ops": data})


def _short(op: str) -> str:
    """`mm` of `aten::mm`; ops of other namespaces keep theirs."""
    return op.removeprefix("aten::")


def _meaning(rule: str) -> str:
    if rule == UNKNOWN:
        return "it has an autocast kernel that could not be probed"
    if not rule:
        return "autocast leaves the op alone; ops that it is made of follow their own rules"
    return RULES["fixed:DTYPE" if rule.startswith(FIXED) else rule]


def _counts(source: Source, policy: Policy) -> dict[str, object]:
    counts = {"counts": policy.counts(), "probed": len(policy.ops), "registered": policy.registered}
    return {**counts, "unprobed": {op: source.reason(policy, op) for op in policy.unprobed}}


def _facts_by_device(name: str, policies: Mapping[str, Policy]) -> list[str]:
    devices: dict[str, list[str]] = {}
    for device, policy in policies.items():
        if name in policy.ops:
            devices.setdefault(policy.ops[name].list_facts(), []).append(device)
    lines = [f"inputs → passed on, on {', '.join(where)}: {facts}" for facts, where in devices.items()]
    return [*lines, "low is autocast's dtype, other the other 16-bit one."] if lines else []


def _recurrent(name: str, policies: Mapping[str, Policy]) -> list[str]:
    """The note on a recurrent layer, which has no rule of its own."""
    if name not in RECURRENT or "cuda" not in policies:
        return []
    if any(rule for device in shipped_devices() for _, rule in history(name, device)):
        return []
    ends = "ends in aten::_cudnn_rnn, which casts everything to autocast's dtype"
    return [f"cuda: {name} {ends}; that is what ampcheck emulates"]


def _find(text: str, policies: Iterable[Policy]) -> list[str]:
    """The overloads that a text names: those with a rule anywhere, else the op itself where PyTorch has it."""
    shipped = (snapshot.policy(device) for snapshot in map(load_release, releases()) for device in snapshot.policies)
    known = sorted({name for policy in (*policies, *shipped) for name in (*policy.ops, *policy.unprobed)})
    if names := _matching(text, known):
        return names
    import torch

    from ampcheck.torchtools.private import op_names

    all_ops = op_names()
    if names := _matching(text, all_ops):
        return names[:1]
    plain = {_short(name).partition(".")[0]: name.partition(".")[0] for name in [*all_ops, *known]}
    near = get_close_matches(text.rpartition("::")[2].rpartition(".")[2], plain, 5)
    meant = f"; did you mean {', '.join(plain[name] for name in near)}?" if near else ""
    raise UsageError(f"PyTorch {torch.__version__} has no op {text!r}{meant or '; ampcheck policy show lists ops'}")


def _matching(text: str, names: Sequence[str]) -> list[str]:
    """The overloads among `names` that a text means: an exact one, or all overloads of an op."""
    if text in names and "." in text:
        return [text]
    parts = text.split(".")
    # torch.linalg.vecdot is aten::linalg_vecdot; aten::norm.Scalar is written norm.Scalar as well.
    guesses = [text, f"aten::{text}", *(f"aten::{'_'.join(parts[start:])}" for start in range(len(parts)))]
    for guess in guesses:
        if matching := [name for name in names if name == guess or name.partition(".")[0] == guess]:
            return sorted(matching)
    return []
