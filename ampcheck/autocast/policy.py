"""What autocast does to each op, as data: one `Policy` a device, one `Snapshot` a PyTorch. No torch here.

A policy maps an overload (`aten::mm`, `aten::norm.Scalar`) to its rule and to the raw facts behind the rule.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import write_atomically
from ampcheck.core.json_files import read_json

SCHEMA = 1
"""Version of a snapshot's JSON form. 1: the first."""

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


@dataclass(frozen=True, slots=True)
class OpPolicy:
    """The rule of one overload and what the rule was read from.

    facts: given dtypes to what autocast hands down, `low` standing for autocast's dtype and `other` for the other
    16-bit one. `low+float32`: the first tensor is low, the rest are float32. One word is handed down where all tensors
    get the same dtype; a dtype argument that autocast sets is told as `dtype=float32`, a result that it casts as
    `-> low`, an exception as `raises`.
    redispatch: the overload that is called instead. restores: the result is cast back. raises: PyTorch's own
    message. source: the file that registers the kernel.
    """

    rule: str
    facts: Mapping[str, str] = field(default_factory=dict)
    redispatch: str = ""
    restores: bool = False
    raises: str = ""
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """This record without what is empty."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: dict(value) if name == "facts" else value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class Policy:
    """What autocast does on one device type under one PyTorch.

    dtypes: autocast's dtypes for which this was found. ops: overload to rule. unprobed: overload to the reason why its
    rule is not known; together they are every overload with an autocast kernel.
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

    def of(self, *namespaces: str) -> Policy:
        """The part of it that concerns these namespaces, such as `aten`."""

        def inside(name: str) -> bool:
            return name.partition("::")[0] in namespaces

        return replace(
            self,
            ops={name: op for name, op in self.ops.items() if inside(name)},
            unprobed={name: reason for name, reason in self.unprobed.items() if inside(name)},
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
        held = self.policies[device]
        if dtype not in held:
            raise UsageError(f"the policy of {device} was measured for {' and '.join(held)}, not for {dtype}")
        return held[dtype]

    def to_json(self) -> dict[str, Any]:
        """As data for `json.dumps`. Where two dtypes follow the same policy it stands once."""
        devices = {device: _held_to_json(held) for device, held in self.policies.items()}
        head = {"schema": SCHEMA, "torch": self.torch, "build": self.build, "platform": self.platform}
        return {**head, "date": self.date, "devices": devices}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to `path`, one op a line, whole or not at all."""
        write_atomically(path, _one_op_a_line(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """The snapshot kept at `path`. Raises `UsageError` for what is none."""
        name = Path(path).name
        try:
            data = read_json(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"no autocast snapshot could be read from {name}: {error}") from error
        require_schema(data, name, "autocast snapshot", SCHEMA)
        try:
            version = _text(data["torch"])
            policies = {device: _held_from_json(device, version, held) for device, held in data["devices"].items()}
            if not policies:
                raise ValueError("it names no device")
            return cls(version, _text(data["build"]), _text(data["platform"]), _text(data["date"]), policies)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{name} is damaged ({error!r:.300}): write it again with ampcheck policy snapshot"
            ) from error


def release_of(version: str) -> str:
    """`2.13` of `2.13.0+cpu`, `2.14` of `2.14.0.dev20250101`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _held_to_json(held: Mapping[str, Policy]) -> dict[str, Any]:
    first, *others = held.values()
    data: dict[str, Any] = {"dtypes": list(held), "ops": {name: op.to_json() for name, op in first.ops.items()}}
    data["unprobed"] = dict(first.unprobed)
    if any((other.ops, other.unprobed) != (first.ops, first.unprobed) for other in others):
        data["differing"] = {
            dtype: {
                "ops": {name: op.to_json() for name, op in policy.ops.items()},
                "unprobed": dict(policy.unprobed),
            }
            for dtype, policy in held.items()
            if policy is not first
        }
    return data


def _held_from_json(device: str, version: str, data: Mapping[str, Any]) -> dict[str, Policy]:
    def read(dtype: str) -> Policy:
        part = data.get("differing", {}).get(dtype, data)
        ops = {name: _op_from_json(op) for name, op in part["ops"].items()}
        return Policy(device, version, (dtype,), ops, {k: _text(v) for k, v in part["unprobed"].items()})

    if not isinstance(data["dtypes"], list) or not data["dtypes"]:
        raise ValueError(f"{device} names no dtype")
    return {_text(dtype): read(dtype) for dtype in data["dtypes"]}


def _op_from_json(data: Mapping[str, Any]) -> OpPolicy:
    facts = {_text(given): _text(handed) for given, handed in data.get("facts", {}).items()}
    rule = _text(data["rule"])
    if rule not in RULES and not (rule.startswith(FIXED) and rule != FIXED):
        raise ValueError(f"there is no rule {rule!r:.80}")
    restores = data.get("restores", False)
    if not isinstance(restores, bool):
        raise TypeError(f"restores cannot be {restores!r:.40}")
    texts = {name: _text(data.get(name, "")) for name in ("redispatch", "raises", "source")}
    return OpPolicy(rule, facts, restores=restores, **texts)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} stands where text belongs")
    return value


def _one_op_a_line(data: dict[str, Any]) -> str:
    """JSON that a line-wise diff of two releases can be read from."""
    places: list[str] = []

    def fold(value: Any) -> Any:
        if isinstance(value, dict) and "rule" in value:
            places.append(json.dumps(value))
            return f"\x00{len(places) - 1}\x00"
        return {key: fold(item) for key, item in value.items()} if isinstance(value, dict) else value

    text = json.dumps(fold(data), indent=1)
    for number, place in enumerate(places):
        text = text.replace(f'"\\u0000{number}\\u0000"', place, 1)
    return text + "\n"
