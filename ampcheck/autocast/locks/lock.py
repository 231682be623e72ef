"""Lock which ops a model sends through autocast, under which rules and in which dtypes, and compare them later."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ampcheck.autocast.calls import CallRecorder, measure_calls
from ampcheck.autocast.device import is_present
from ampcheck.autocast.drift import history, since
from ampcheck.autocast.locks.file import ANY_COMMAND, BY_PYTEST, NAME, Entries, LockFile, update
from ampcheck.autocast.probe import build
from ampcheck.autocast.state import device_type
from ampcheck.checks import findings as findings_of
from ampcheck.checks.policy import counted_modules
from ampcheck.checks.policy.policy_drift import CHECK as POLICY_DRIFT
from ampcheck.core.arguments import LOW, parse_dtypes
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Table
from ampcheck.core.subject import Subject, as_subject, is_architecture, load_subject, package_root
from ampcheck.core.updating import is_updating
from ampcheck.outcome.raising import verify
from ampcheck.records.policy import (
    LockComparison,
    Locked,
    LockedOp,
    PolicyCalls,
    PolicyGap,
    is_custom,
    release_of,
)
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.source import users_frame

DEVICES = ("cpu", "cuda")
"""Locked unless other devices are named."""

PathLike: TypeAlias = "str | os.PathLike[str]"
Devices: TypeAlias = "str | Sequence[str]"
Dtypes: TypeAlias = "str | torch.dtype | Sequence[str | torch.dtype]"


@dataclass(frozen=True, slots=True)
class LockTarget:
    """The model that is locked, the name of its entry, the file, and the command that writes the entry."""

    subject: Subject
    entry: str
    file: Path
    command: str = ANY_COMMAND

    @classmethod
    def of(cls, target: Any, path: PathLike | None = None, name: str = "", *, near: Path | None = None) -> LockTarget:
        """Load the target; its entry is named `file.py:function`, however the target was spelled.

        near: a relative file is searched there and in the folders above, up to the project's, where the working
        directory has none. Raises `UsageError` naming the folders where none of them has it.
        """
        if not isinstance(target, str):
            subject = as_subject(target, name or "subject")
            entry = name or subject.name
            if entry == "subject":
                raise UsageError("a lock needs a name for the model: assert_policy(..., name='my model')")
            return cls(subject, entry, lock_path(path, callers_folder()), BY_PYTEST)
        module, _, factory = target.rpartition(":")
        module = str(_search(Path(module), near)) if module.endswith(".py") else module
        loaded = f"{module}:{factory}" if module else target
        with seeded(
            "cuda" if is_present("cuda") else "cpu"
        ):  # weights decide which experts a router calls; the same ones each time
            subject = load_subject(loaded)
        if is_architecture(target):  # of a library's code, beside which no lock belongs
            return cls(subject, name or target, lock_path(path, Path.cwd()), BY_PYTEST if name else ANY_COMMAND)
        subject = replace(subject, name=target) if subject.name == loaded else subject
        source = Path(module if module.endswith(".py") else sys.modules[module].__file__ or module)
        command = BY_PYTEST if name else ANY_COMMAND  # the command line names entries by their factory
        return cls(subject, name or f"{source.name}:{factory}", lock_path(path, source.parent), command)


def _search(file: Path, near: Path | None) -> Path:
    """A file in the working directory, else in `near` or a folder above it, up to the project's own."""
    if file.is_file() or file.is_absolute():
        return file
    folders = [near, *near.parents] if near is not None else []
    tops = (n for n, each in enumerate(folders) if (each / "pyproject.toml").is_file() or (each / ".git").exists())
    folders = folders[: next(tops, 0) + 1]  # without a project the folder alone
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    searched = ", ".join(map(str, dict.fromkeys([Path.cwd(), *folders])))
    raise UsageError(f"there is no file {file}; searched in {searched}")


def lock_path(path: PathLike | None, folder: Path) -> Path:
    """The lock at `path`, a file or a folder; by default in `folder`."""
    location = Path(folder if path is None else path)
    return (location / NAME if location.is_dir() else location).absolute()


def callers_folder() -> Path:
    """The folder of the file that calls from outside of this package."""
    return Path(users_frame(sys._getframe())[0]).parent


def write_lock(target: LockTarget, device: Devices | None = None, dtype: Dtypes | None = None) -> Run:
    """Record and write the entries; by default those that are there, else of the CPU and CUDA in both dtypes.

    Raises `UsageError`, and writes nothing, where no op reaches autocast and where the model raises, unless at an op
    that autocast bans on the device; it lists these devices and dtypes, and those that can be locked.
    """
    entries = LockFile.load(target.file).targets.get(target.entry, {}) if target.file.exists() else {}
    known = [key.split("/") for key in entries]
    devices = _devices(device) or tuple(dict.fromkeys(key[0] for key in known)) or DEVICES
    dtypes = _dtypes(dtype) or tuple(dict.fromkeys(key[1] for key in known)) or LOW
    measured = [measure_calls(target.subject, device=key[0], dtype=key[1]) for key in product(devices, dtypes)]
    _require_complete(measured)
    update(target.file, target.entry, {calls.key: to_locked(calls, target.file.parent) for calls in measured})
    return _run(measured, [_written(calls, target.file) for calls in measured])


def compare_lock(
    target: LockTarget, device: Devices | None = None, dtype: Dtypes | None = None, *, release: str | None = None
) -> Run:
    """Record and compare the entries of these devices and dtypes, by default all.

    release: of PyTorch, whose shipped policy is followed, to see what an update would change; the installed by default.
    """
    if not target.file.exists():
        return Run(environment(), (_no_file(target.subject.name, target.entry, target.file, target.command),))
    entries = LockFile.load(target.file).entries(target.entry, target.file.name, target.command)
    findings, measured = [], []
    for key in _chosen(entries, _devices(device), _dtypes(dtype), target):
        kind, low = key.split("/")
        calls = measure_calls(target.subject, device=kind, dtype=low, release=release)
        measured.append(calls)
        findings += judge_lock(calls, entries[calls.key], to_locked(calls, target.file.parent), target.command)
    return _run(measured, findings)


def judge_lock(calls: PolicyCalls, locked: Locked, now: Locked, command: str = ANY_COMMAND) -> list[Finding]:
    """Compare calls with their lock. locked: its entry. now: the entry that the calls make. command: refreshes it."""
    lock = LockComparison(calls, locked, now, command)
    former = {op: rule for op in lock.changed if (rule := _former_rule(op, calls, locked)) is not None}
    rules = {op: (rule, _cause_of_rule(op, calls, locked)) for op, rule in former.items()}
    return findings_of(replace(lock, rules=rules), Limits())


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


def _cause_of_rule(op: str, calls: PolicyCalls, locked: Locked) -> str:
    before, after = release_of(locked.torch), release_of(calls.torch)
    if is_custom(op):
        return "a custom op: what is registered for it has changed"
    if before == after:
        return f"the release is the same: the build is another (locked with {locked.build}), or a library replaces it"
    try:
        return since(op, calls.device, calls.policy.rule(op), calls.dtype)
    except UsageError:
        return f"between {before} and {after}, of which ampcheck carries no policies"


def gap_table(gap: PolicyGap) -> Table:
    """The ops of a model that autocast treats otherwise on the CPU than on a device."""
    there = gap.device.device
    columns = ("op", "on cpu", f"on {there}", "dtypes on cpu", f"dtypes on {there}", "modules")
    title = f"Ops that autocast treats otherwise on cpu than on {there}"
    rows = [_row(op, gap.cpu, gap.device) for op in gap.differing]
    return Table(title, columns, rows, check="policy-gap", note=f"{gap.name}, PyTorch {gap.device.torch}.")


def _row(op: str, cpu: PolicyCalls, device: PolicyCalls) -> Sequence[str]:
    modules = sorted({call.module for call in (*cpu.calls, *device.calls) if call.op == op})
    dtypes = [", ".join(sorted(calls.passed(op))) or "inside another op" for calls in (cpu, device)]
    rules = [calls.policy.rule(op) or "left alone" for calls in (cpu, device)]
    return (op, *rules, *dtypes, counted_modules(modules))


@contextmanager
def locked_calls(entry: str, file: Path, *, device: str = "cpu") -> Iterator[None]:
    """Compare what the block sends through autocast with the lock's entry, or write it under `--ampcheck-update`.

    device: whose policy the block follows. A damaged lock raises before the block runs; else the block's own exception
    comes first. Raises as `assert_policy`.
    """
    __tracebackhide__ = True
    lock = LockFile.load(file) if file.exists() else None
    recorder = CallRecorder(device)
    with recorder.recording():
        yield
    measured = [recorder.calls(entry, dtype) for dtype in sorted(recorder.dtypes, key=str)]
    measured = [calls for calls in measured if calls.ruled]
    if not measured:
        message = "a lock needs an op that autocast acts on; none ran on tensors of the CPU inside a region of autocast"
        verify(Run(environment(), (POLICY_DRIFT.fail(entry, message),)))
    now = {calls.key: to_locked(calls, file.parent) for calls in measured}
    findings = []
    if is_updating():
        update(file, entry, now, whole=True)
        findings = [_written(calls, file) for calls in measured]
    elif lock is None:
        findings = [_no_file(entry, entry, file, BY_PYTEST)]
    else:
        entries = lock.entries(entry, file.name, BY_PYTEST)
        for calls in measured:
            if calls.key in entries:
                findings += judge_lock(calls, entries[calls.key], now[calls.key], BY_PYTEST)
        if entries.keys() != now.keys():
            message = f"autocast must be used as locked, on {_keys(entries)}; it is used on {_keys(now)}"
            hint = f"where the change is meant, refresh the lock: {BY_PYTEST}"
            findings.append(POLICY_DRIFT.fail(entry, message, hint=hint))
    verify(_run(measured, findings))


def to_locked(calls: PolicyCalls, folder: Path) -> Locked:
    """The entry that these calls make in a lock in `folder`: ops with a rule alone."""
    sites: dict[str, dict[str, set[tuple[str, str]]]] = {}
    for call in calls.ruled:
        line = f"{_portable(call.file, folder)}:{call.line}" if call.file else ""
        sites.setdefault(call.op, {}).setdefault(call.dtypes, set()).add((call.module, line))
    ops = {
        op: LockedOp(calls.policy.rule(op), {dtypes: tuple(sorted(at)) for dtypes, at in sorted(by_dtypes.items())})
        for op, by_dtypes in sorted(sites.items())
    }
    return Locked(calls.torch, build(), ops)


def _portable(file: str, folder: Path) -> str:
    """A source file relative to the lock's folder, or to the folder of its package."""
    path = Path(file).resolve()
    if not path.is_file():  # relative to site-packages already
        return Path(file).as_posix()
    if path.is_relative_to(folder.resolve()):
        return path.relative_to(folder.resolve()).as_posix()
    return path.relative_to(package_root(path)).as_posix()


def _require_complete(measured: Sequence[PolicyCalls]) -> None:
    keys_by_reason: dict[str, list[str]] = {}
    complete = []
    for calls in measured:
        if (raised := calls.raised) is not None and calls.ended_early:
            keys_by_reason.setdefault(f"it raised {raised.message} ({raised.where})", []).append(calls.key)
        elif not calls.ruled:
            keys_by_reason.setdefault("no op reaches autocast, there is nothing to lock", []).append(calls.key)
        else:
            complete.append(calls)
    if keys_by_reason:
        reasons = "; ".join(f"on {', '.join(keys)} {reason}" for reason, keys in keys_by_reason.items())
        works = f"these work: {_options(complete)}" if complete else "none of them works"
        raise UsageError(f"{measured[0].subject} cannot be locked: {reasons}; nothing was locked; {works}")


def _options(measured: Sequence[PolicyCalls]) -> str:
    """The options that lock these: `--device cpu --dtype bfloat16, then --device cuda --dtype ...`."""
    dtypes: dict[str, list[str]] = {}
    for calls in measured:
        dtypes.setdefault(calls.device, []).append(calls.dtype)
    devices: dict[tuple[str, ...], list[str]] = {}
    for device, of_device in dtypes.items():
        devices.setdefault(tuple(of_device), []).append(device)
    if is_updating():
        return ", and in a second call ".join(f"device={tuple(d)}, dtype={t}" for t, d in devices.items())
    return ", then ".join(f"--device {','.join(d)} --dtype {','.join(t)}" for t, d in devices.items())


def _no_file(subject: str, entry: str, file: Path, command: str) -> Finding:
    message = f"{entry} must be locked in {file.name}; there is no such file in {file.parent}"
    return POLICY_DRIFT.fail(subject, message, hint=f"make it with {command}, and commit it")


def _written(calls: PolicyCalls, file: Path) -> Finding:
    ops = len({call.op for call in calls.ruled})
    ended = f"; it ends where {calls.raised.op} is banned" if calls.raised else ""
    message = f"{ops} ops are locked in {file.name} as PyTorch {calls.torch} treats them{ended}"
    return POLICY_DRIFT.passed(calls.name, message, ops, observed=ops, limit=1)


def _run(measured: Sequence[PolicyCalls], lock_findings: Iterable[Finding]) -> Run:
    findings, tables = list(lock_findings), list[Table]()
    for calls in measured:
        findings += findings_of(calls, Limits())
    on_cpu = {calls.dtype: calls for calls in measured if calls.device == "cpu"}
    for calls in measured:
        if calls.device != "cpu" and calls.dtype in on_cpu:
            gap = PolicyGap(on_cpu[calls.dtype], calls)
            findings += findings_of(gap, Limits())
            tables += [gap_table(gap)] if gap.differing else []
    seen = {
        "ops": sum(len({call.op for call in calls.calls}) for calls in measured),
        "calls": sum(call.count for calls in measured for call in calls.calls),
    }
    unseen = Counter(f"backward, which raised {calls.no_backward}" for calls in measured if calls.no_backward)
    return Run(environment(), tuple(findings), Coverage(seen, unseen), tuple(tables))


def _chosen(entries: Entries, devices: tuple[str, ...], dtypes: tuple[str, ...], target: LockTarget) -> list[str]:
    """The entries of these devices and dtypes. Raises `UsageError` naming those that are missing."""
    pairs = {key: key.split("/") for key in entries}
    keys = [key for key, (d, t) in pairs.items() if (not devices or d in devices) and (not dtypes or t in dtypes)]
    missing = {f"{device}/{dtype}" for device, dtype in product(devices, dtypes)}.difference(entries)
    missing = missing or {name for name in devices or dtypes if not any(name in pairs[key] for key in keys)}
    if missing or not keys:
        raise UsageError(
            f"{target.file.name} holds {target.entry} for {_keys(entries)}, not for "
            f"{', '.join(sorted(missing)) or 'any device'}: lock that too with {target.command}"
        )
    return keys


def _devices(devices: Devices | None) -> tuple[str, ...]:
    names = (devices,) if isinstance(devices, (str, torch.device)) else tuple(devices or ())
    return tuple(dict.fromkeys(device_type(name) for name in names))


def _dtypes(dtypes: Dtypes | None) -> tuple[str, ...]:
    return tuple(parse_dtypes(dtypes)) if dtypes else ()


def _keys(entries: Entries) -> str:
    return ", ".join(sorted(entries)) or "nothing"
