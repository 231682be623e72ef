"""Autocast's rules for each op, as data: one `Policy` a device, one `Snapshot` a PyTorch. No torch here.

A policy maps an overload (`aten::mm`, `aten::norm.Scalar`) to its rule and to the raw facts behind the rule. ampcheck
carries one snapshot for each minor release of PyTorch, made by running that release.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import write_atomically
from ampcheck.core.json_files import read_json
from ampcheck.records.policy import FIXED, RULES, OpPolicy, Policy, release_of

SCHEMA = 1
"""Version of a snapshot's JSON form. 1: the first."""

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The policies of every device of one PyTorch.

    torch: its version. build: `cpu`, `cuda 12.4` or another accelerator with its version. date: of the measurement.
    policies: by device type and dtype.
    """

    torch: str
    build: str
    platform: str
    date: str
    policies: Mapping[str, Mapping[str, Policy]]

    @property
    def release(self) -> str:
        """`2.13` of `2.13.0+cpu`."""
        return release_of(self.torch)

    def policy(self, device: str, dtype: str = "float16") -> Policy:
        """The policy of a device. Raises `UsageError` naming those that it has."""
        if device not in self.policies:
            raise UsageError(
                f"PyTorch {self.torch} has no autocast policy for {device!r}; it has {', '.join(self.policies)}"
            )
        by_dtype = self.policies[device]
        if dtype not in by_dtype:
            raise UsageError(f"the policy of {device} was measured for {' and '.join(by_dtype)}, not for {dtype}")
        return by_dtype[dtype]

    def to_json(self) -> dict[str, object]:
        """As data for `json.dumps`. A policy that two dtypes share is written once."""
        devices: dict[str, dict[str, object]] = {}
        for device, by_dtype in self.policies.items():
            first, *others = (
                {"ops": {name: op.to_json() for name, op in policy.ops.items()}, "unprobed": dict(policy.unprobed)}
                for policy in by_dtype.values()
            )
            devices[device] = {"dtypes": list(by_dtype), **first}
            if any(other != first for other in others):
                devices[device]["differing"] = dict(zip(list(by_dtype)[1:], others, strict=True))
        head = {"schema": SCHEMA, "torch": self.torch, "build": self.build, "platform": self.platform}
        return {**head, "date": self.date, "devices": devices}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to `path`, one op a line, whole or not at all."""
        write_atomically(path, one_op_a_line(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, shipped: bool = False) -> Snapshot:
        """The snapshot at `path`. Raises `UsageError` for any other file. shipped: nobody edits it, or merges it."""
        name = Path(path).name
        try:
            data = json.loads(Path(path).read_bytes()) if shipped else read_json(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"no autocast snapshot could be read from {name}: {error}") from error
        require_schema(data, name, "autocast snapshot", SCHEMA)
        try:
            torch, build, platform, day = (_text(data[key]) for key in ("torch", "build", "platform", "date"))
            policies = {device: _policies_from(device, torch, by_dtype) for device, by_dtype in data["devices"].items()}
            if not policies:
                raise ValueError("it names no device")
            return cls(torch, build, platform, day, policies)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{name} is damaged ({error!r:.300}): write it again with ampcheck policy snapshot"
            ) from error


@cache
def releases() -> tuple[str, ...]:
    """The releases with a snapshot, oldest first: `("2.4", ..., "2.15")`."""
    return tuple(sorted((path.stem.removeprefix("torch-") for path in DATA.glob("torch-*.json")), key=number_of))


@cache
def load_release(release: str) -> Snapshot:
    """The shipped snapshot of a release, such as `2.13` or `2.13.0+cpu`. Raises `UsageError` naming those there are."""
    short = release_of(release)
    if short not in releases():
        raise UsageError(f"ampcheck carries no policy of PyTorch {release}; it has {', '.join(releases()) or 'none'}")
    return Snapshot.load(DATA / f"torch-{short}.json", shipped=True)


def nearest(version: str) -> Snapshot:
    """The snapshot of this version's release; without one that of the newest release before it, else the oldest.

    Raises `UsageError` where nothing was shipped, which is a broken installation.
    """
    if not releases():
        raise UsageError(f"ampcheck's own policy snapshots are missing from {DATA.name}: install ampcheck again")
    wanted = number_of(release_of(version))
    before = [release for release in releases() if number_of(release) <= wanted]
    return load_release(before[-1] if before else releases()[0])


def number_of(release: str) -> tuple[int, ...]:
    """`(2, 13)` of `2.13`. Raises `UsageError` for anything else."""
    try:
        return tuple(map(int, release.split(".")))
    except ValueError:
        raise UsageError(f"{release!r} is no release of PyTorch; write one as 2.13") from None


def _policies_from(device: str, version: str, data: Mapping[str, Any]) -> dict[str, Policy]:
    def read(part: Mapping[str, Any]) -> tuple[dict[str, OpPolicy], dict[str, str]]:
        ops: dict[str, OpPolicy] = {}
        for name, fields in part["ops"].items():  # hundreds, checked without a call for each
            if not isinstance(fields, dict):
                raise TypeError(f"an OpPolicy cannot be {fields!r:.40}")
            ops[name] = op = OpPolicy(**fields)
            texts = op.rule, op.redispatch, op.raises, op.source, *op.facts.keys(), *op.facts.values()
            if set(map(type, texts)) != {str} or not isinstance(op.restores, bool):
                raise TypeError(f"an OpPolicy has other values than text: {fields!r:.80}")
            if op.rule not in RULES and not (op.rule.startswith(FIXED) and op.rule != FIXED):
                raise ValueError(f"there is no rule {op.rule!r:.80}")
        return ops, {op: _text(why) for op, why in part["unprobed"].items()}

    if not isinstance(data["dtypes"], list) or not data["dtypes"]:
        raise ValueError(f"{device} names no dtype")
    shared, others = read(data), {dtype: read(part) for dtype, part in data.get("differing", {}).items()}
    return {_text(d): Policy(device, version, (d,), *others.get(d, shared)) for d in data["dtypes"]}


def _text(value: object) -> str:
    """A string of a JSON file. Raises `TypeError` for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def one_op_a_line(data: Mapping[str, object]) -> str:
    """JSON with each object that has a `rule` on one line, so that a line-wise diff can be read."""
    ops: list[str] = []

    def fold(value: object) -> object:
        if isinstance(value, dict) and isinstance(value.get("rule"), str):
            ops.append(json.dumps(value))
            return f"\x00{len(ops) - 1}\x00"
        return {key: fold(item) for key, item in value.items()} if isinstance(value, dict) else value

    text = json.dumps(fold(data), indent=1)
    return re.sub(r'"\\u0000(\d+)\\u0000"', lambda match: ops[int(match[1])], text) + "\n"
