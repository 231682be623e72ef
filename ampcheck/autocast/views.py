"""Policies as tables and as JSON data, for `ampcheck policy`. No torch unless the installed one is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ampcheck.autocast.drift import (
    UNKNOWN,
    Change,
    diff_policies,
    history,
    incomparable,
    other_build,
    rule_of,
    shipped_devices,
    since,
    spans,
)
from ampcheck.autocast.policy import FIXED, RULES, OpPolicy, Policy, release_of
from ampcheck.autocast.snapshots import load_release, releases
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Table

NONE = "–"
"""The rule, in a table, of an op that autocast leaves alone."""

NO_DEVICE = (
    "could not be probed on the machine that made the snapshot (it computes on the device before it calls the op)"
)
"""What stands for a device's own error in a snapshot: it speaks of a machine that is not the reader's."""

_NAMES = re.compile(r"dimname|names_", re.IGNORECASE)
"""Overloads that take the names of dimensions, which hardly anybody calls."""

_ALONE = "autocast leaves the op alone; ops that it is made of follow their own rules"


@dataclass(frozen=True)
class View:
    """What is shown: tables for a reader, and the same as plain data for `json.dumps`."""

    tables: tuple[Table, ...]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """A PyTorch whose policies can be asked for by device: the installed one, or a release that ampcheck carries."""

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
        """Why an overload could not be probed, in words that hold on the reader's machine."""
        reason = policy.unprobed[op]
        return NO_DEVICE if self.shipped and re.match(r"\w+ error: ", reason) else reason

    def __str__(self) -> str:
        return f"PyTorch {self.torch} ({self.build})"

    @property
    def data(self) -> dict[str, str]:
        """What names it."""
        return {"torch": self.torch, "build": self.build, "dtype": self.dtype}


def source_of(release: str, dtype: str) -> Source:
    """A shipped release, or `installed`. Raises `UsageError` naming the releases or dtypes that there are."""
    if release == "installed":
        import torch

        from ampcheck.autocast.probe import build, low_dtype, measure_policy
        from ampcheck.autocast.state import devices, registered

        low = low_dtype(dtype)
        known = tuple(device for device in devices() if registered(device))
        return Source(
            torch.__version__, build(), dtype, known, lambda device: measure_policy(device, low), shipped=False
        )
    snapshot = load_release(release)
    held = tuple(snapshot.policies)
    snapshot.policy(held[0], dtype)  # raises for a dtype that it lacks
    return Source(snapshot.torch, snapshot.build, dtype, held, lambda device: snapshot.policy(device, dtype))


def known_best(dtype: str) -> Source:
    """The shipped release that is installed, else the installed PyTorch itself."""
    try:
        release = release_of(version("torch"))
    except PackageNotFoundError:  # a PyTorch that was built in place
        release = ""
    return source_of(release if release in releases() else "installed", dtype)


def counts_view(source: Source) -> View:
    """How many overloads follow each rule on each device."""
    policies = [source.policy(device) for device in source.devices]
    rows: list[tuple[str | int, ...]] = [
        (rule, *(policy.counts().get(rule, 0) for policy in policies))
        for rule in RULES
        if any(rule in policy.counts() for policy in policies)
    ]
    rows.append(("probed", *(len(policy.ops) for policy in policies)))
    rows.append(("registered", *(policy.registered for policy in policies)))
    note = "\n".join(line for policy in policies for line in _unprobed(source, policy))
    table = Table(f"{source}, autocast to {source.dtype}", ("rule", *source.devices), rows, note=note)
    return View((table,), {**source.data, "devices": {policy.device: _counts(source, policy) for policy in policies}})


def policy_view(source: Source, device: str) -> View:
    """Every overload that autocast treats on a device, by rule."""
    policy = source.policy(device)
    groups: dict[str, list[str]] = {}
    for name, op in sorted(policy.ops.items()):
        groups.setdefault(op.rule, []).append(short(name))
    rules = sorted(groups, key=[*RULES, *sorted(groups)].index)  # `fixed:float32` is none of RULES
    rows = [(rule, len(groups[rule]), " ".join(groups[rule])) for rule in rules]
    note = [f"Probed {len(policy.ops)} of {policy.registered} registered overloads.", *_unprobed(source, policy)]
    note += [f"{rule}: {meaning(rule)}" for rule in rules]
    title = f"{source}, autocast to {source.dtype} on {policy.device}"
    table = Table(title, ("rule", "ops", "overloads"), rows, note="\n".join(note))
    ops = {name: op.to_json() for name, op in policy.ops.items()}
    return View((table,), {**source.data, "device": policy.device, **_counts(source, policy), "ops": ops})


def diff_view(one: Source, other: Source, device: str, compared: str) -> View:
    """Where `one` on `device` and `other` on `compared` differ."""
    a, b = one.policy(device), other.policy(compared)
    if one is not other:  # a snapshot holds no custom ops
        a, b = a.of("aten"), b.of("aten")
    changes = diff_policies(a, b)
    of_build = other_build(changes, one.build, other.build)
    shown = [change for change in changes if change not in of_build]
    where, labels = f"{one}, {device} and {compared}", (device, compared)
    if one is not other:
        where, labels = f"{one} and {other}, {device}", (release_of(one.torch), release_of(other.torch))
        labels = labels if len(set(labels)) > 1 else (str(one), str(other))
    unclear = {op: one.reason(a, op) if op in a.unprobed else other.reason(b, op) for op in incomparable(a, b)}
    note = [f"{len(shown)} of {len({*a.ops, *a.unprobed, *b.ops, *b.unprobed})} overloads differ."]
    note += [f"Left out, for only one of the builds has it: {change.op}" for change in of_build]
    note += [f"Cannot be compared: {op}: {reason}" for op, reason in unclear.items()]
    rows = [_changed(change) for change in shown]
    table = Table(f"{where}, autocast to {one.dtype}", ("overload", *labels), rows, note="\n".join(note))
    data = {
        "one": {**one.data, "device": device},
        "other": {**other.data, "device": compared},
        "changes": [
            {"op": change.op, "before": _op_to_json(change.before), "after": _op_to_json(change.after)}
            for change in shown
        ],
        "of_another_build": [change.op for change in of_build],
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
    tables, data = [], []
    for name in sorted(_find(text, policies.values()), key=lambda name: _place(name, policies.values())):
        rows: list[tuple[str, str, str]] = []
        told: list[str] = []
        for device, policy in policies.items():
            rule, op = rule_of(policy, name), policy.ops.get(name)
            stretches = spans(name, device, source.dtype) if device in shipped_devices() else ()
            age = since(name, device, rule, source.dtype, under=release_of(source.torch)) if stretches else ""
            rows.append((device, _cell(op) if op else rule or NONE, age))
            told.append(f"{rule or NONE}: {op.raises.splitlines()[0] if op and op.raises else meaning(rule)}")
            if name in policy.unprobed:
                told.append(f"Not probed on {device}: {source.reason(policy, name)}")
            if len(stretches) > 1:
                told.append(f"{device} over the releases: {', '.join(map(_stretch, stretches))}")
            past = [{"from": first, "to": last, "rule": held} for first, last, held in stretches]
            data.append({"op": name, "device": device, "rule": rule, "policy": _op_to_json(op), "history": past})
        told += [*_fused(name, policies), *_facts_by_device(name, policies)]
        title = f"{name} under {source}, autocast to {source.dtype}"
        tables.append(Table(title, ("device", "rule", "history"), rows, note="\n".join(dict.fromkeys(told))))
    return View(tuple(tables), {**source.data, "ops": data})


def short(op: str) -> str:
    """`mm` of `aten::mm`; ops of other namespaces keep theirs."""
    return op.removeprefix("aten::")


def meaning(rule: str) -> str:
    """What a rule does, in words."""
    if rule == UNKNOWN:
        return "it has an autocast kernel that could not be probed"
    key = "fixed:DTYPE" if rule.startswith(FIXED) else rule
    return RULES[key] if rule else _ALONE


def _counts(source: Source, policy: Policy) -> dict[str, Any]:
    counts = {"counts": policy.counts(), "probed": len(policy.ops), "registered": policy.registered}
    return {**counts, "unprobed": {op: source.reason(policy, op) for op in policy.unprobed}}


def _unprobed(source: Source, policy: Policy) -> list[str]:
    return [f"Not probed on {policy.device}: {op}: {source.reason(policy, op)}" for op in policy.unprobed]


def _op_to_json(op: OpPolicy | None) -> dict[str, Any] | None:
    return None if op is None else op.to_json()


def _changed(change: Change) -> tuple[str, str, str]:
    before, after = change.before, change.after
    facts = before is not None and after is not None and before.rule == after.rule
    return short(change.op), _cell(before, facts), _cell(after, facts)


def _cell(op: OpPolicy | None, facts: bool = False) -> str:
    if op is None:
        return NONE
    calls = f", calls {short(op.redispatch)}" if op.redispatch else ""
    restores = ", casts its result back" if op.restores else ""
    return op.rule + calls + restores + (f" ({_facts(op)})" if facts else "")


def _facts(op: OpPolicy) -> str:
    return ", ".join(f"{given} → {handed}" for given, handed in op.facts.items())


def _facts_by_device(name: str, policies: Mapping[str, Policy]) -> list[str]:
    devices: dict[str, list[str]] = {}
    for device, policy in policies.items():
        if name in policy.ops:
            devices.setdefault(_facts(policy.ops[name]), []).append(device)
    lines = [f"given → handed down on {', '.join(where)}: {facts}" for facts, where in devices.items()]
    return [*lines, "low is autocast's dtype, other the other 16-bit one."] if lines else []


def _fused(name: str, policies: Mapping[str, Policy]) -> list[str]:
    """What becomes of a recurrent layer, which has no rule of its own."""
    ruled = (rule for device in shipped_devices() for _, rule in history(name, device))
    if "cuda" not in policies or any(ruled):
        return []
    from ampcheck.autocast.kernels import RECURRENT  # with torch, which `_find` has asked for this op already

    if name not in RECURRENT:
        return []
    return [
        f"cuda: {name} ends in aten::_cudnn_rnn, which casts everything to autocast's dtype; that is what ampcheck "
        "emulates"
    ]


def _place(name: str, policies: Iterable[Policy]) -> tuple[bool, int, str]:
    """Where an overload stands among those of its op."""
    ruled = sum(bool(rule_of(policy, name)) for policy in policies)
    return not ruled or _NAMES.search(name.partition(".")[2]) is not None, -ruled, name


def _stretch(stretch: tuple[str, str, str]) -> str:
    first, last, rule = stretch
    return f"{rule or 'none'} {first}" + (f" to {last}" if last != first else "")


def _find(text: str, policies: Iterable[Policy]) -> list[str]:
    """The overloads that a text names: those with a rule anywhere, else the op itself where PyTorch has it."""
    held = [
        *policies,
        *(load_release(release).policy(d) for release in releases() for d in load_release(release).policies),
    ]
    known = sorted({name for policy in held for name in (*policy.ops, *policy.unprobed)})
    if found := _named(text, known):
        return found
    import torch

    everything = torch._C._dispatch_get_all_op_names()
    if found := _named(text, everything):
        return found[:1]
    plain = {short(name).partition(".")[0]: name.partition(".")[0] for name in [*everything, *known]}
    near = get_close_matches(text.rpartition("::")[2].rpartition(".")[2], plain, 5)
    meant = f"; did you mean {', '.join(plain[name] for name in near)}?" if near else ""
    raise UsageError(f"PyTorch {torch.__version__} has no op {text!r}{meant or '; ampcheck policy show lists ops'}")


def _named(text: str, names: Sequence[str]) -> list[str]:
    """The overloads among `names` that a text means: an exact one, or all overloads of an op."""
    if text in names and "." in text:
        return [text]
    parts = text.split(".")
    # torch.linalg.vecdot is aten::linalg_vecdot; aten::norm.Scalar is written norm.Scalar as well.
    guesses = [text, f"aten::{text}", *(f"aten::{'_'.join(parts[start:])}" for start in range(len(parts)))]
    for guess in guesses:
        if found := [name for name in names if name == guess or name.partition(".")[0] == guess]:
            return sorted(found)
    return []
