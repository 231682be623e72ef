"""Lock which ops a model sends through autocast, under which rules and in which dtypes, and assert that it stays so."""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ampcheck.autocast.calls import CallRecorder, PolicyCalls, measure_calls, seeded
from ampcheck.autocast.locks.checks import check_banned, check_gap, check_lock, check_unregistered, refresh, subject_of
from ampcheck.autocast.locks.file import (
    ANY_WAY,
    BY_PYTEST,
    NAME,
    Entries,
    Locked,
    LockedOp,
    LockFile,
    is_updating,
    update,
)
from ampcheck.autocast.policy import BANNED
from ampcheck.autocast.probe import DTYPES, build, low_dtype
from ampcheck.autocast.state import device_type
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict, passed, verify
from ampcheck.core.subject import Subject, as_subject, load_subject
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import is_users

DEVICES = ("cpu", "cuda")
"""What is locked unless other devices are asked for."""

Devices: TypeAlias = "str | Sequence[str]"
Dtypes: TypeAlias = "str | torch.dtype | Sequence[str | torch.dtype]"


@restoring
def assert_policy_lock(
    target: Any,
    *,
    path: str | os.PathLike[str] | None = None,
    device: Devices | None = None,
    dtype: Dtypes | None = None,
    name: str = "",
) -> Run:
    """Assert that a model sends the same ops through autocast, under the same rules and in the same dtypes, as locked.

    target: `package.module:factory`, `path/to/file.py:factory`, a `Subject` or one of its shapes; a relative file is
    searched in the working directory, then beside the calling test and in the folders above it, up to the project's.
    path: the lock, a file or its folder; by default `ampcheck.lock.json` beside the file of the factory, or of the
    caller. device, dtype: one or several of those that were locked; all of them by default. name: of the entry, where
    the target is no text.

    Under `pytest --ampcheck-update` the entries are written anew instead. Returns the run; raises `AssertionError` with
    each op that differs, since which release and in which modules, and where there is no lock; `UsageError` for a lock
    that is damaged, of a newer schema or without an entry for the model.
    """
    __tracebackhide__ = True
    try:
        found = LockTarget.of(target, path, name, near=_callers_folder())
    except UsageError as error:
        raise error.with_traceback(None) from _users_own(error.__cause__)
    try:
        run = write_lock(found, device, dtype) if is_updating() else compare_lock(found, device, dtype)
    except UsageError as error:
        raise error.with_traceback(None) from None  # the lock's fault: nobody has to read our source
    return verify(run)


@dataclass(frozen=True, slots=True)
class LockTarget:
    """What is locked, the name of its entry, the file, and how the entry is written."""

    subject: Subject
    entry: str
    file: Path
    ways: str = ANY_WAY

    @classmethod
    def of(
        cls, target: Any, path: str | os.PathLike[str] | None = None, name: str = "", *, near: Path | None = None
    ) -> LockTarget:
        """Load the target; its entry is named `file.py:factory`, however the target was spelled.

        near: a relative file is searched there and in the folders above, up to the project's, where the working
        directory has none. Raises `UsageError` naming the folders where it lies in none of them.
        """
        if isinstance(target, str):
            place, _, attribute = target.rpartition(":")
            place = str(_found(Path(place), near)) if place.endswith(".py") else place
            loaded = f"{place}:{attribute}" if place else target
            with seeded():  # weights decide which experts a router calls; the same ones each time
                subject = load_subject(loaded)
            subject = replace(subject, name=target) if subject.name == loaded else subject
            source = Path(place if place.endswith(".py") else sys.modules[place].__file__ or place)
            entry, folder = name or f"{source.name}:{attribute}", source.parent
            ways = BY_PYTEST if name else ANY_WAY  # the command names entries by their factory
        else:
            ways = BY_PYTEST
            subject = as_subject(target, name or "subject")
            entry, folder = name or subject.name, _callers_folder()
            if entry == "subject":
                raise UsageError("a lock needs a name for the model: assert_policy_lock(..., name='my model')")
        return cls(subject, entry, lock_path(path, folder), ways)


def _found(file: Path, near: Path | None) -> Path:
    if file.is_file() or file.is_absolute():
        return file
    folders = _up_to_the_project(near) if near is not None else []
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    searched = ", ".join(map(str, dict.fromkeys([Path.cwd(), *folders])))
    raise UsageError(f"there is no file {file}; searched in {searched}")


def _up_to_the_project(folder: Path) -> list[Path]:
    """The folder and those above it, up to the project's own; without a project the folder alone."""
    above = [folder, *folder.parents]
    tops = (n for n, each in enumerate(above) if (each / "pyproject.toml").is_file() or (each / ".git").exists())
    return above[: next(tops, 0) + 1]


def lock_path(path: str | os.PathLike[str] | None, folder: Path) -> Path:
    """The lock at `path`, a file or a folder; by default in `folder`."""
    given = Path(folder if path is None else path)
    return (given / NAME if given.is_dir() else given).absolute()


def write_lock(target: LockTarget, device: Devices | None = None, dtype: Dtypes | None = None) -> Run:
    """Record and write the entries; by default those that are there, else of the CPU and CUDA in both dtypes.

    Raises `UsageError`, and writes nothing, where no op reaches autocast and where the model raises, unless at an op
    that autocast bans on the device; it names each device and dtype of which that is so, and those that can be locked.
    """
    held = LockFile.load(target.file).targets.get(target.entry, {}) if target.file.exists() else {}
    known = [key.split("/") for key in held]
    devices = _devices(device) or tuple(dict.fromkeys(key[0] for key in known)) or DEVICES
    dtypes = _dtypes(dtype) or tuple(dict.fromkeys(key[1] for key in known)) or _dtypes(DTYPES)
    measured = [measure_calls(target.subject, device=key[0], dtype=key[1]) for key in product(devices, dtypes)]
    _require_whole(measured)
    update(target.file, target.entry, {_key(calls): to_locked(calls, target.file.parent) for calls in measured})
    return _run(measured, [_locked_anew(calls, target.file) for calls in measured])


def compare_lock(
    target: LockTarget, device: Devices | None = None, dtype: Dtypes | None = None, *, release: str | None = None
) -> Run:
    """Record and compare the entries that were asked for, by default all; `verify` raises what it finds.

    release: of PyTorch, whose shipped policy is followed, to see what an update would change; the installed by default.
    """
    if not target.file.exists():
        return Run(environment(), (_missing(target.subject.name, target.entry, target.file, target.ways),))
    held = LockFile.load(target.file).entries(target.entry, target.file.name, target.ways)
    keys = _asked(held, _devices(device), _dtypes(dtype), target)
    pairs = (key.split("/") for key in keys)
    measured = [measure_calls(target.subject, device=d, dtype=t, release=release) for d, t in pairs]
    findings = []
    for calls in measured:
        findings += check_lock(calls, held[_key(calls)], to_locked(calls, target.file.parent), target.ways)
    return _run(measured, findings)


@contextmanager
def locked_calls(entry: str, file: Path, *, device: str = "cpu") -> Iterator[None]:
    """Compare what the block sends through autocast with the lock's entry, or write it under `--ampcheck-update`.

    device: whose policy the block follows. A damaged lock is told before the block runs; else the block's own exception
    comes first. Raises as `assert_policy_lock`.
    """
    __tracebackhide__ = True
    lock = LockFile.load(file) if file.exists() else None
    with CallRecorder(device) as recorder:
        yield
    measured = [recorder.calls(entry, dtype) for dtype in sorted(recorder.dtypes, key=str)]
    measured = [calls for calls in measured if calls.ruled]
    if not measured:
        message = "a lock needs an op that autocast acts on; none ran on tensors of the CPU inside a region of autocast"
        verify(Run(environment(), (Finding("policy-drift", Verdict.FAIL, entry, message),)))
    now = {_key(calls): to_locked(calls, file.parent) for calls in measured}
    findings = []
    if is_updating():
        update(file, entry, now, whole=True)
        findings = [_locked_anew(calls, file) for calls in measured]
    elif lock is None:
        findings = [_missing(entry, entry, file, BY_PYTEST)]
    else:
        held = lock.entries(entry, file.name, BY_PYTEST)
        for calls in measured:
            key = _key(calls)
            findings += check_lock(calls, held[key], now[key], BY_PYTEST) if key in held else []
        if held.keys() != now.keys():
            message = f"autocast must be used as locked, on {_listed(held)}; it is used on {_listed(now)}"
            findings.append(Finding("policy-drift", Verdict.FAIL, entry, message, hint=refresh(BY_PYTEST)))
    verify(_run(measured, findings))


def to_locked(calls: PolicyCalls, folder: Path) -> Locked:
    """The entry that these calls make in a lock that lies in `folder`: ops with a rule alone."""
    ops: dict[str, LockedOp] = {}
    for op in sorted({call.op for call in calls.ruled}):
        places: dict[str, set[tuple[str, str]]] = {}
        for call in calls.ruled:
            if call.op == op:
                place = f"{_portable(call.file, folder)}:{call.line}" if call.file else ""
                places.setdefault(call.dtypes, set()).add((call.module, place))
        ops[op] = LockedOp(calls.policy.rule(op), {dtypes: tuple(sorted(at)) for dtypes, at in sorted(places.items())})
    return Locked(calls.torch, build(), ops)


def _portable(file: str, folder: Path) -> str:
    """A source file relative to the lock's folder, or to the folder that its package lies in."""
    path = Path(file).resolve()
    if not path.is_file():  # relative to site-packages already
        return Path(file).as_posix()
    if path.is_relative_to(folder.resolve()):
        return path.relative_to(folder.resolve()).as_posix()
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top).as_posix()


def _require_whole(measured: Sequence[PolicyCalls]) -> None:
    reasons: dict[str, list[str]] = {}
    for calls in measured:
        if reason := _not_whole(calls):
            reasons.setdefault(reason, []).append(_key(calls))
    if not reasons:
        return
    told = "; ".join(f"on {', '.join(keys)} {reason}" for reason, keys in reasons.items())
    whole = [calls for calls in measured if not _not_whole(calls)]
    mend = f"these work: {_options(whole)}" if whole else "none of them works"
    raise UsageError(f"{measured[0].subject} cannot be locked: {told}; nothing was locked; {mend}")


def _not_whole(calls: PolicyCalls) -> str:
    raised = calls.raised
    if raised is not None and calls.policy.rule(raised.op) != BANNED:
        return f"it raised {raised.message} ({raised.where})"
    return "" if calls.ruled else "no op reaches autocast, there is nothing to lock"


def _options(measured: Sequence[PolicyCalls]) -> str:
    """What to ask for so that these are locked: `--device cpu --dtype bfloat16, then --device cuda --dtype ...`."""
    dtypes: dict[str, list[str]] = {}
    for calls in measured:
        dtypes.setdefault(calls.device, []).append(calls.dtype)
    devices: dict[tuple[str, ...], list[str]] = {}
    for device, held in dtypes.items():
        devices.setdefault(tuple(held), []).append(device)
    if is_updating():
        calls_ = (f"device={tuple(names)}, dtype={held}" for held, names in devices.items())
        return ", and in a second call ".join(calls_)
    return ", then ".join(f"--device {','.join(names)} --dtype {','.join(held)}" for held, names in devices.items())


def _missing(subject: str, entry: str, file: Path, ways: str) -> Finding:
    message = f"{entry} must be locked in {file.name}; there is no such file in {file.parent}"
    hint = f"make it with {ways}, and commit it"
    return Finding("policy-drift", Verdict.FAIL, subject, message, hint=hint)


def _locked_anew(calls: PolicyCalls, file: Path) -> Finding:
    ops = len({call.op for call in calls.ruled})
    ended = f"; it ends where {calls.raised.op} is banned" if calls.raised else ""
    message = f"{ops} ops are locked in {file.name} as PyTorch {calls.torch} treats them{ended}"
    return passed("policy-drift", subject_of(calls), message, ops, observed=float(ops), limit=1.0, unit="ops")


def _run(measured: Sequence[PolicyCalls], findings: Iterable[Finding]) -> Run:
    found, tables = list(findings), list[Table]()
    for calls in measured:
        found += [*check_banned(calls), *check_unregistered(calls)]
    on_cpu = {calls.dtype: calls for calls in measured if calls.device == "cpu"}
    for calls in measured:
        if calls.device != "cpu" and calls.dtype in on_cpu:
            gap, table = check_gap(on_cpu[calls.dtype], calls)
            found += gap
            tables.append(table)
    seen = {
        "ops": sum(len({call.op for call in calls.calls}) for calls in measured),
        "calls": sum(call.count for calls in measured for call in calls.calls),
    }
    unseen = Counter(f"backward, which raised {calls.no_backward}" for calls in measured if calls.no_backward)
    return Run(environment(), tuple(found), Coverage(seen, unseen), tuple(table for table in tables if table.rows))


def _asked(held: Entries, devices: tuple[str, ...], dtypes: tuple[str, ...], target: LockTarget) -> list[str]:
    keys = [
        key
        for key in held
        if (not devices or key.split("/")[0] in devices) and (not dtypes or key.split("/")[1] in dtypes)
    ]
    wanted = {f"{device}/{dtype}" for device, dtype in product(devices, dtypes)}
    lacking = wanted.difference(held) or {d for d in devices or dtypes if not any(d in key.split("/") for key in keys)}
    if lacking or not keys:
        raise UsageError(
            f"{target.file.name} holds {target.entry} for {_listed(held)}, not for "
            f"{', '.join(sorted(lacking)) or 'any device'}: lock that too with {target.ways}"
        )
    return keys


def _devices(given: Devices | None) -> tuple[str, ...]:
    names = (given,) if isinstance(given, (str, torch.device)) else tuple(given or ())
    return tuple(dict.fromkeys(device_type(name) for name in names))


def _dtypes(given: Dtypes | None) -> tuple[str, ...]:
    names = (given,) if isinstance(given, (str, torch.dtype)) else tuple(given or ())
    return tuple(dict.fromkeys(str(low_dtype(name)).removeprefix("torch.") for name in names))


def _key(calls: PolicyCalls) -> str:
    return f"{calls.device}/{calls.dtype}"


def _listed(entries: Entries) -> str:
    return ", ".join(sorted(entries)) or "nothing"


def _users_own(cause: BaseException | None) -> BaseException | None:
    """The cause of an error where it arose in the user's code, whose lines are worth reading."""
    frames = traceback.walk_tb(cause.__traceback__) if cause is not None else ()
    return cause if any(is_users(frame.f_code.co_filename) for frame, _ in frames) else None


def _callers_folder() -> Path:
    """Of the file that calls us from outside of this package."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return Path(frame.f_code.co_filename).parent
