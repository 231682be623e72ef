"""Policies of autocast, and what a run sent through autocast: what locks and the checks of policies judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ampcheck.core.arm import POLICY, Arm, armed
from ampcheck.core.run import Where

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
    """Autocast rules of one device type under one PyTorch.

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
        """Number of overloads with an autocast kernel."""
        return len(self.ops) + len(self.unprobed)

    def rule(self, op: str) -> str:
        """The rule of an overload; empty for an op that autocast leaves alone."""
        return self.ops[op].rule if op in self.ops else ""

    def counts(self) -> dict[str, int]:
        """Return how many overloads follow each rule, in the order of `RULES`."""
        count = Counter("fixed:DTYPE" if op.rule.startswith(FIXED) else op.rule for op in self.ops.values())
        return {rule: count[rule] for rule in RULES if count[rule]}

    def of(self, namespace: str) -> Policy:
        """The overloads of one namespace, such as `aten`."""
        return replace(
            self,
            ops={name: op for name, op in self.ops.items() if name.startswith(f"{namespace}::")},
            unprobed={name: why for name, why in self.unprobed.items() if name.startswith(f"{namespace}::")},
        )


def release_of(version: str) -> str:
    """`2.13` of `2.13.0+cpu`, `2.14` of `2.14.0.dev20250101`."""
    return ".".join(version.split("+")[0].split(".")[:2])


PYTORCHS_OWN = frozenset(
    """_c10d_functional _c10d_functional_autograd _dtensor _inductor_test _native _quantized _test aten c10d
    c10d_functional debug_mode_ops debugprims export flex_lib fsdp inductor inductor_prims mkl mkldnn mkldnn_prepacked
    onednn onnx onnx_symbolic prim prims profiler quantization quantized rngprims sparse static_runtime streams
    symm_mem""".split()
)
"""Namespaces of ops that PyTorch registers itself; those of any other namespace are custom."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """One way in which an op is called.

    op: the overload. rule: its rule on the device, empty for none. inputs: the dtype of each tensor argument, lists in
    brackets. passed: the same after autocast, with `dtype=float32` where the op's dtype argument is set, and `raises`
    for a banned op. module: the dotted path of the innermost module. file, line: the user's. count: how often.
    """

    op: str
    rule: str
    inputs: str
    passed: str
    module: str
    file: str
    line: int | None
    count: int = 1

    @property
    def dtypes(self) -> str:
        """`float32 float32 -> float16 float16`."""
        return f"{self.inputs} -> {self.passed}"

    @property
    def where(self) -> Where:
        """The location of this call, as in findings."""
        return Where(phase="forward", module=self.module, op=self.op, file=self.file, line=self.line)


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the model: its message, the op that raised it (where one did) and its location."""

    message: str
    op: str
    where: Where


@dataclass(frozen=True, slots=True)
class PolicyCalls:
    """Every call of an op that reached autocast in one run.

    device, dtype: of autocast; the policy of another device than the CPU is emulated. calls: of ops that have an
    autocast kernel on any device, and of custom ops; sorted. composite: those of them that are made of other ops,
    which reach autocast by themselves. policy: the device's. raised: what ended forward early. no_backward: what
    backward raised; it runs without autocast but for checkpoints that recompute, so little is missing then.
    """

    subject: str
    device: str
    dtype: str
    policy: Policy
    calls: tuple[OpCall, ...]
    composite: frozenset[str] = frozenset()
    raised: Raised | None = None
    no_backward: str = ""

    @property
    def torch(self) -> str:
        """The PyTorch whose policy was followed."""
        return self.policy.torch

    @property
    def name(self) -> str:
        """The subject as findings name it: with the device, the dtype and whether the device was emulated."""
        return armed(self.subject, Arm(self.dtype, POLICY, self.device, release_of(self.torch)))

    @property
    def ended_early(self) -> bool:
        """True if the run ended early, unless at a banned op: it says nothing of the ops behind that place."""
        return self.raised is not None and self.policy.rule(self.raised.op) != BANNED

    def passed(self, op: str) -> set[str]:
        """The dtypes that autocast passed to an op."""
        return {call.passed for call in self.calls if call.op == op}

    @property
    def key(self) -> str:
        """`cuda/float16`."""
        return f"{self.device}/{self.dtype}"

    @property
    def ruled(self) -> tuple[OpCall, ...]:
        """The calls of ops that have a rule on the device."""
        return tuple(call for call in self.calls if call.rule)

    @property
    def unregistered(self) -> tuple[OpCall, ...]:
        """The calls of custom ops that autocast leaves alone, with floating tensors."""
        known = {*self.policy.ops, *self.policy.unprobed, *self.composite}
        return tuple(
            call
            for call in self.calls
            if is_custom(call.op) and call.op not in known and "float" in call.inputs.replace("float64", "")
        )


OWN = tuple([f"{namespace}::" for namespace in PYTORCHS_OWN])
"""Beginnings of the names of PyTorch's own overloads."""


def is_custom(op: str) -> bool:
    """Return whether an overload is none of PyTorch's own."""
    return not op.startswith(OWN)


UNKNOWN = "unknown"
"""The rule of an overload that has an autocast kernel but could not be probed."""


@dataclass(frozen=True, slots=True)
class Change:
    """An overload that two policies treat differently; None where autocast leaves it alone."""

    op: str
    before: OpPolicy | None
    after: OpPolicy | None

    def describe(self, op: OpPolicy | None) -> str:
        """Return how one of the two policies treats it, with the facts where the rule is the same."""
        same_rule = self.before is not None and self.after is not None and self.before.rule == self.after.rule
        return "left alone" if op is None else op.describe(facts=same_rule)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two policies, overload by overload.

    count: how many could be compared. changes: those that differ. of_build: those that only one of the two builds of
    PyTorch has. unclear: those that both register and at least one could not probe, with its reason.
    """

    count: int
    changes: tuple[Change, ...]
    of_build: tuple[Change, ...]
    unclear: Mapping[str, str]


CallSites = tuple[tuple[str, str], ...]
"""Module path and `file:line` of each call with the same dtypes."""


@dataclass(frozen=True, slots=True)
class LockedOp:
    """One op of a model. rule: on the device. calls: `input -> passed on` dtypes to the call sites with these."""

    rule: str
    calls: Mapping[str, CallSites]

    @property
    def used(self) -> frozenset[tuple[str, str]]:
        """The dtypes and the module of each call; lines, which move with every edit, are left out."""
        return frozenset((dtypes, module) for dtypes, sites in self.calls.items() for module, _ in sites)


@dataclass(frozen=True, slots=True)
class Locked:
    """Ops of one model under autocast on one device in one dtype. torch, build: of the PyTorch that it ran."""

    torch: str
    build: str
    ops: Mapping[str, LockedOp]

    def to_json(self) -> dict[str, object]:
        """As data for `json.dumps`, in a fixed order."""
        ops = {
            name: {"rule": op.rule, "calls": {key: sorted(map(list, at)) for key, at in sorted(op.calls.items())}}
            for name, op in sorted(self.ops.items())
        }
        return {"torch": self.torch, "build": self.build, "ops": ops}


@dataclass(frozen=True, slots=True)
class LockComparison:
    """Calls beside the lock of their model. locked: its entry. now: the entry that the calls would make.

    command: refreshes the lock. rules: of ops whose rule was another when the lock was made: that rule, and what
    changed it.
    """

    calls: PolicyCalls
    locked: Locked
    now: Locked
    command: str
    rules: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The subject as findings name it."""
        return self.calls.name

    @property
    def changed(self) -> tuple[str, ...]:
        """The ops whose rule, dtypes or modules differ."""

        def used(entry: Locked, op: str) -> object:
            return (entry.ops[op].rule, entry.ops[op].used) if op in entry.ops else None

        ops = sorted({*self.locked.ops, *self.now.ops})
        return tuple(op for op in ops if used(self.locked, op) != used(self.now, op))


@dataclass(frozen=True, slots=True)
class PolicyGap:
    """A model's calls under the policies of the CPU and of another device, in the same dtype.

    judged: its values are judged under the device's policy besides, so that nothing is left to warn of.
    """

    cpu: PolicyCalls
    device: PolicyCalls
    judged: bool = False

    @property
    def name(self) -> str:
        """The subject as findings name it."""
        return self.device.name

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops of both."""
        return tuple(sorted({call.op for call in (*self.cpu.calls, *self.device.calls)}))

    @property
    def differing(self) -> tuple[str, ...]:
        """The ops with another rule or other dtypes; an op made of ruled ops counts by those."""

        def differs(op: str) -> bool:
            on_cpu, on_device = self.cpu.passed(op), self.device.passed(op)
            other_rule = self.cpu.policy.rule(op) != self.device.policy.rule(op)
            return other_rule or bool(on_cpu != on_device and on_cpu and on_device)

        return tuple(filter(differs, self.ops))


@dataclass(frozen=True, slots=True)
class OtherPolicy:
    """A model's calls on the CPU, and the policy of another device under which nothing ran."""

    calls: PolicyCalls
    other: Policy

    @property
    def name(self) -> str:
        """The subject as findings name it."""
        return self.calls.name


@dataclass(frozen=True, slots=True)
class InstalledPolicy:
    """The policy of the installed PyTorch beside a shipped snapshot.

    measured: of any namespaces; custom ops are not compared. snapshot: its name in messages, "" where none was shipped.
    builds: of the snapshot and of the installed PyTorch. expected: the snapshot's policy of this device, if it has one.
    compared: that with PyTorch's own ops.
    """

    measured: Policy
    snapshot: str = ""
    builds: tuple[str, str] = ("", "")
    expected: Policy | None = None
    compared: Comparison | None = None

    @property
    def name(self) -> str:
        """The subject as findings name it."""
        return f"PyTorch {self.measured.torch}, autocast to {self.measured.dtypes[0]} on {self.measured.device}"
