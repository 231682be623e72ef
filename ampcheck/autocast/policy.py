"""What autocast does to each op, as data: one `Policy` a device, one `Snapshot` a PyTorch. No torch here.

A policy maps an overload (`aten::mm`, `aten::norm.Scalar`) to its rule and to the raw facts behind the rule. ampcheck
carries one snapshot for each minor release of PyTorch, made by running that release.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import write_atomically
from ampcheck.core.json_files import read_json

SCHEMA = 1
"""Version of a snapshot's JSON form. 1: the first."""

DATA = Path(__file__).parent / "data"

LOWER, FP32, SET_DTYPE, APPEND_DTYPE = "lower_precision", "fp32", "fp32_set_opt_dtype", "fp32_append_dtype"
PROMOTE, BANNED, FIXED, OTHER = "promote", "banned", "fixed:", "other"

RULES: Mapping[str, str] = MappingProxyType(
    {
        LOWER: "floating inputs are cast to autocast's dtype",
        FP32: "floating inputs are cast to float32",
        SET_DTYPE: "inputs stay; the op's dtype argument becomes float32 unless it was given",
        APPEND_DTYPE: "inputs stay; the op is replaced by its overload with a dtype argument, float32",
        PROMOTE: "inputs are cast to the widest dtype among them, float32 or autocast's",
        BANNED: "the op raises",
        "fixed:DTYPE": "a custom op: floating inputs are cast to the dtype it was registered with",
        OTHER: "none of these; see the facts",
    }
)
"""Each rule and what it does to tensors of the device that are floating and not float64."""

RECURRENT = tuple(
    f"aten::{cell}.{form}" for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
)
"""Composites that end in cuDNN's fused layer on CUDA, whose autocast kernel casts everything to autocast's dtype
(`aten/src/ATen/cudnn/AutocastRNN.cpp`). On the CPU they end in other ops and have no float16 kernel."""


@dataclass(frozen=True, slots=True)
class OpPolicy:
    """The rule of one overload and the facts behind it.

    facts: input dtypes to the dtypes that autocast passes to the op. `low` is autocast's dtype, `other` the other
    16-bit one, `low+float32` a first tensor of low and float32 for the rest. One name is passed on where all tensors
    get the same dtype; `dtype=float32` is a dtype argument that autocast sets, `-> low` a result that it casts,
    `raises` an exception. redispatch: the overload that is called instead. restores: the result is cast back. raises:
    PyTorch's own message. source: the file that registers the kernel.
    """

    rule: str
    facts: Mapping[str, str] = field(default_factory=dict)
    redispatch: str = ""
    restores: bool = False
    raises: str = ""
    source: str = ""

    def describe(self, *, facts: bool = False) -> str:
        """The rule and what else the kernel does, such as `fp32, calls norm.dtype (low → float32)`."""
        calls = f", calls {self.redispatch.removeprefix('aten::')}" if self.redispatch else ""
        restores = ", casts its result back" if self.restores else ""
        return self.rule + calls + restores + (f" ({self.list_facts()})" if facts else "")

    def list_facts(self) -> str:
        """`low → low, float32 → low`."""
        return ", ".join(f"{inputs} → {passed}" for inputs, passed in self.facts.items())

    def to_json(self) -> dict[str, object]:
        """This record without empty fields."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: dict(value) if name == "facts" else value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class Policy:
    """What autocast does on one device type under one PyTorch.

    dtypes: autocast's dtypes for which this was measured. ops: overload to rule. unprobed: overload to the reason why
    its rule is unknown; together they are every overload with an autocast kernel.
    """

    device: str
    torch: str
    dtypes: tuple[str, ...]
    ops: Mapping[str, OpPolicy]
    unprobed: Mapping[str, str] = field(default_factory=dict)

    @property
    def registered(self) -> int:
        """How many overloads have an autocast kernel."""
        return len(self.ops) + len(self.unprobed)

    def rule(self, op: str) -> str:
        """The rule of an overload; empty for an op that autocast leaves alone."""
        return self.ops[op].rule if op in self.ops else ""

    def counts(self) -> dict[str, int]:
        """How many overloads follow each rule, in the order of `RULES`."""
        count = Counter("fixed:DTYPE" if op.rule.startswith(FIXED) else op.rule for op in self.ops.values())
        return {rule: count[rule] for rule in RULES if count[rule]}

    def of(self, namespace: str) -> Policy:
        """The overloads of one namespace, such as `aten`."""
        return replace(
            self,
            ops={name: op for name, op in self.ops.items() if name.startswith(f"{namespace}::")},
            unprobed={name: why for name, why in self.unprobed.items() if name.startswith(f"{namespace}::")},
        )


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


def release_of(version: str) -> str:
    """`2.13` of `2.13.0+cpu`, `2.14` of `2.14.0.dev20250101`."""
    return ".".join(version.split("+")[0].split(".")[:2])


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
