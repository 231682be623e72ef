"""What a rule says will become of a call, and what does: the oracle for the probe and for the emulation.

The prediction casts by the rule itself and then runs the op without autocast; it shares no code with
`ampcheck.autocast.kernels`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from op_samples import Call, Calls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ampcheck.autocast.emulate import Emulation
from ampcheck.autocast.state import raw_autocast, registered
from ampcheck.records.policy import APPEND_DTYPE, BANNED, FP32, LOWER, PROMOTE, SET_DTYPE, OpPolicy, Policy
from ampcheck.torchtools.source import op_name, overload

Place = Callable[[torch.Tensor], torch.Tensor]


def patterns(low: torch.dtype, count: int) -> dict[str, list[torch.dtype]]:
    """The dtypes of the floating tensors of a call: the same ones that a probe asks about, and more mixtures."""
    wide, other = torch.float32, torch.bfloat16 if low is torch.float16 else torch.float16
    given = {"float32": [wide] * count, "low": [low] * count, "other": [other] * count}
    given["float64"] = [torch.float64] * count
    if count > 1:
        given["float32+low"] = [wide] + [low] * (count - 1)
        given["low+float32"] = [low] + [wide] * (count - 1)
        given["low+float64"] = [low] + [torch.float64] * (count - 1)
    return given


@dataclass(frozen=True)
class Outcome:
    """What became of a call. raised: the first line of the exception. ops: what ran below autocast, casts left out."""

    raised: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    ops: tuple[tuple[str, tuple[torch.dtype, ...]], ...] = ()
    values: tuple[torch.Tensor, ...] = ()

    def difference(self, other: Outcome, *, values: bool) -> str:
        """How the other is not the same, in a word; empty where it is."""
        if bool(self.raised) != bool(other.raised):
            return "only one raises"
        if self.dtypes != other.dtypes:
            return "output dtype"
        if self.ops != other.ops:
            return "dtypes below"
        if values and not all(_same_bits(*pair) for pair in zip(self.values, other.values, strict=True)):
            return "values"
        return ""


class _Below(TorchDispatchMode):
    """The ops that run, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op_name(func).startswith(("aten::_to_copy", "prim::")):  # casts, and fake tensors asked for their device
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.ops.append((op_name(func), tuple(t.dtype for t in tensors)))
        return func(*args, **(kwargs or {}))


def observed(run: Callable[[], Any]) -> Outcome:
    """What happens below autocast while `run` runs."""
    below = _Below()
    torch.default_generator.manual_seed(0)  # torch.manual_seed would queue a call for each device that is not there
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # an exception here is an outcome
    try:
        with below, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = run()
    except Exception as error:  # noqa: BLE001  # that it raises is an outcome
        return Outcome((str(error).strip() or type(error).__name__).splitlines()[0], ops=tuple(below.ops))
    tensors = tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
    return Outcome("", tuple(t.dtype for t in tensors), tuple(below.ops), tensors)


def stage(device: str) -> Place:
    """How a tensor gets to the device: as it is to the CPU, as a fake tensor elsewhere."""
    if device == "cpu":
        return lambda tensor: tensor
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, torch.device(device, 0))

    return fake


def as_given(call: Call, dtypes: list[torch.dtype], place: Place) -> tuple[Any, Any]:
    """The arguments of a call, its floating tensors in these dtypes."""
    return call.with_tensors(lambda n, tensor: place(tensor.to(dtypes[n]) if n >= 0 else tensor))


def predicted(policy: OpPolicy | None, low: torch.dtype, name: str, args: Any, kwargs: Any) -> Any:
    """What autocast should give: cast as the rule says, then run the op without autocast. Raises where it should."""
    rule = policy.rule if policy is not None else ""
    op, arguments = overload(name), overload(name)._schema.arguments
    floats = [x for x in tree_leaves((args, kwargs)) if _eligible(x)]
    if rule == BANNED:
        raise RuntimeError("unsafe to autocast")
    target = {LOWER: low, FP32: torch.float32}.get(rule)
    if rule == PROMOTE:
        wide = next((n for n, x in enumerate(floats) if x.dtype is torch.float32), len(floats))
        if any(x.dtype is not low for x in floats[:wide]):
            raise RuntimeError("Unexpected floating ScalarType")
        target = torch.float32 if wide < len(floats) else low
    elif rule in (SET_DTYPE, APPEND_DTYPE):
        named = {a.name: a.default_value for a in arguments if a.has_default_value()}
        named |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        wanted = torch.float32 if _eligible(args[0]) else args[0].dtype if rule == APPEND_DTYPE else None
        if named.get("dtype") is None and wanted is not None:
            named["dtype"] = wanted
        return overload(policy.redispatch or name)(**named)
    if target is not None:
        args, kwargs = tree_map(lambda x: x.to(target) if _eligible(x) else x, (args, kwargs))
    out = op(*args, **kwargs)
    if policy is not None and policy.restores:
        out = tree_map(lambda x: x.to(floats[0].dtype) if _eligible(x) else x, out)
    return out


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is torch.uint8:  # the workspace of mkldnn_rnn_layer holds whatever stood in memory
        return True
    if one.is_complex():
        one, other = (torch.view_as_real(tensor.resolve_conj()) for tensor in (one, other))
    return (
        one.shape == other.shape
        and torch.equal(one.isnan(), other.isnan())
        and bool(((one == other) | one.isnan()).all())
    )


# ---------------------------------------------------------------------------------------------------------------------
# the comparisons


@dataclass(frozen=True)
class Row:
    """One call with tensors of these dtypes. difference: how the two outcomes part; empty where they agree.

    kernel: what the kernel says or does, where the two part in the same way without any autocast.
    """

    op: str
    rule: str
    given: str
    difference: str
    one: Outcome
    other: Outcome
    kernel: str = ""

    @property
    def looked_at(self) -> bool:
        """Whether it says anything: the op ran, or its first kernel was reached, or it was to raise."""
        return bool(not self.one.raised or self.one.ops or self.rule == BANNED)


def compare_rule(policy: Policy, low: torch.dtype, calls: Calls, place: Place | None = None) -> list[Row]:
    """The op under autocast, and the same op without autocast on tensors cast by the rule, on real or fake tensors."""
    place = place or stage(policy.device)
    rows = []
    for op, given, args, kwargs in _all(policy.ops, low, calls, place):
        with raw_autocast(policy.device, low):
            one = observed(lambda: overload(op)(*args, **kwargs))  # noqa: B023
        other = observed(lambda: predicted(policy.ops[op], low, op, args, kwargs))  # noqa: B023
        difference = one.difference(other, values=not isinstance(place(torch.empty(0)), FakeTensor))
        rows.append(Row(op, policy.rule(op), given, difference, one, other))
    return rows


def compare_emulation(policy: Policy, low: torch.dtype, calls: Calls) -> list[Row]:
    """CPU tensors under emulation, and CPU tensors cast by the rule and run without autocast: every bit counts."""
    with Emulation(policy):
        rows = []
        for op, given, args, kwargs in _all(policy.ops, low, calls, stage("cpu")):
            with raw_autocast("cpu", low):
                one = observed(lambda: overload(op)(*args, **kwargs))  # noqa: B023
            other = observed(lambda: predicted(policy.ops[op], low, op, args, kwargs))  # noqa: B023
            rows.append(Row(op, policy.rule(op), given, one.difference(other, values=True), one, other))
    return rows


def compare_devices(policy: Policy, low: torch.dtype, calls: Calls) -> list[Row]:
    """CPU tensors under emulation, and fake tensors of the device under its own autocast: the output dtypes count.

    Ops are those with a rule on either device: what has none on the emulated device must lose the CPU's.
    """
    place = stage(policy.device)
    with Emulation(policy):
        rows = []
        for op, given, args, kwargs in _all({*policy.ops, *registered("cpu")}, low, calls, stage("cpu")):
            with raw_autocast("cpu", low):
                one = observed(lambda: overload(op)(*args, **kwargs))  # noqa: B023
            faked = tree_map(lambda x: place(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            with raw_autocast(policy.device, low):
                other = observed(lambda: overload(op)(*faked[0], **faked[1]))  # noqa: B023
            difference = _outside(one, other)
            row = Row(op, policy.rule(op), given, difference, one, other)
            if difference:  # do the two kernels part without autocast, too?
                plain = observed(lambda: predicted(policy.ops.get(op), low, op, args, kwargs))  # noqa: B023
                faked_plain = observed(lambda: predicted(policy.ops.get(op), low, op, *faked))  # noqa: B023
                if _outside(plain, faked_plain) == difference:
                    row = replace(row, kernel=one.raised or other.raised or "the CPU's kernel gives another dtype")
            rows.append(row)
    return rows


def _outside(one: Outcome, other: Outcome) -> str:
    """How two outcomes part for who calls the op."""
    if bool(one.raised) != bool(other.raised):
        return "only one raises"
    return "output dtype" if one.dtypes != other.dtypes else ""


def _all(ops: Iterable[str], low: torch.dtype, calls: Calls, place: Place) -> Iterator[tuple[str, str, Any, Any]]:
    for op in sorted(ops):
        for call in calls.get(op, ()):
            for given, dtypes in patterns(low, call.floats).items():
                yield op, given, *as_given(call, dtypes, place)
