"""Calls of every op that autocast knows on some device, and what the probed rule says will become of them.

The calls come from PyTorch's own sample inputs (OpInfo), told apart by the overload that really reaches autocast, and
are written by hand where PyTorch has none. The prediction casts by the rule itself and then runs the op without
autocast; it shares no code with `ampcheck.autocast.kernels`.
"""

from __future__ import annotations

import inspect
import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ampcheck.autocast.emulate import Emulation
from ampcheck.autocast.policy import APPEND_DTYPE, BANNED, FP32, LOWER, PROMOTE, SET_DTYPE, OpPolicy, Policy
from ampcheck.autocast.state import raw_autocast, registered
from ampcheck.places import op_name, overload

Calls = Mapping[str, Sequence["Call"]]
Place = Callable[[torch.Tensor], torch.Tensor]

LARGEST = 20_000
"""Samples of more elements than that are left out: dtypes do not depend on the size."""


@dataclass(frozen=True)
class Call:
    """One call of an overload, with float32 for every floating tensor. source: `OpInfo` or `hand`."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str

    def with_tensors(self, replaced: Callable[[int, torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        count = iter(range(1000))

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return replaced(next(count) if leaf.is_floating_point() else -1, leaf)

        return tree_map(one, (self.args, self.kwargs))

    @property
    def floats(self) -> int:
        return sum(isinstance(x, torch.Tensor) and x.is_floating_point() for x in tree_leaves((self.args, self.kwargs)))


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


# ---------------------------------------------------------------------------------------------------------------------
# where the calls come from


def harvest(*, each: int = 2) -> dict[str, list[Call]]:
    """At most `each` distinct calls of every overload with an autocast kernel on any device."""
    wanted = {name for device in ("cpu", "cuda", "xpu", "mps", "mtia") for name in registered(device)}
    found: dict[str, list[Call]] = {}
    seen: set[tuple[Any, ...]] = set()

    def keep(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], source: str = "OpInfo") -> None:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shape = (name, *(tuple(t.shape) if isinstance(t, torch.Tensor) else str(t) for t in leaves))
        if shape in seen or len(found.setdefault(name, [])) >= each:
            return
        if (
            any(t.dtype is torch.float64 or t.is_complex() for t in tensors)
            or sum(t.numel() for t in tensors) > LARGEST
        ):
            return
        if any(t.numel() == 0 for t in tensors):
            return
        seen.add(shape)
        args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        found[name].append(Call(name, args, kwargs, source))

    for name, (args, kwargs) in by_hand().items():
        if name in wanted:
            keep(name, args, kwargs, "hand")
    with _recorded(wanted, keep):
        _run_samples(wanted, each)
    return {name: found[name] for name in sorted(found) if found[name]}


def _run_samples(wanted: set[str], each: int) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    packets = {name.partition("::")[2].partition(".")[0].strip("_") for name in wanted}
    for info in op_db:
        names = {info.name.rpartition(".")[2], info.name.replace(".", "_"), info.aten_name}
        if torch.float32 not in info.dtypes or not any(packet in name for name in names for packet in packets):
            continue
        random.seed(0)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for number, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=False)):
                    if number > 12 * each:
                        break
                    try:
                        info.op(sample.input, *sample.args, **sample.kwargs)
                    except Exception:  # noqa: BLE001  # a sample that this build cannot run; the call was recorded
                        continue
            except Exception:  # noqa: BLE001  # samples that need what is not installed
                continue


@contextmanager
def _recorded(names: set[str], keep: Callable[..., None]) -> Iterator[None]:
    """Tell `keep` of each call that reaches the CPU's autocast key, and let it through without a cast."""
    key = torch._C.DispatchKey.AutocastCPU
    below = torch._C._dispatch_keyset_full_after(key)
    library = torch.library.Library("aten", "IMPL")
    options = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}

    def recorder(name: str) -> Callable[..., Any]:
        op = overload(name)

        def record(keys: Any, *args: Any, **kwargs: Any) -> Any:
            keep(name, args, kwargs)
            return op.redispatch(keys & below, *args, **kwargs)

        return record

    try:
        with warnings.catch_warnings(), raw_autocast("cpu", torch.bfloat16):
            warnings.simplefilter("ignore")  # that a kernel is overridden is what we want
            for name in sorted(names):
                library.impl(name.removeprefix("aten::"), recorder(name), "AutocastCPU", with_keyset=True, **options)
            yield
    finally:
        library._destroy()


def by_hand() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that PyTorch's samples do not reach."""
    torch.manual_seed(0)
    a, b, eye = torch.rand(4, 4) + 0.1, torch.rand(4, 4) + 0.1, torch.eye(4)
    row, line, image, solid = torch.rand(4), torch.rand(1, 2, 6), torch.rand(1, 2, 6, 6), torch.rand(1, 2, 4, 4, 4)
    kernel, bias, grid = torch.rand(2, 2, 3, 3), torch.rand(2), torch.rand(1, 3, 3, 2) * 2 - 1
    w4, w12, w16, b4, b12, b16 = (torch.rand(n * 4, *rest) for rest in ((4,), ()) for n in (1, 3, 4))
    words, heads, half = torch.rand(1, 3, 4), torch.rand(1, 2, 16, 8), torch.tensor([0.5])
    plain = ([1, 1], [0, 0], [1, 1])
    calls: dict[str, Any] = {
        "_addmm_activation": (row, a, b),
        "_convolution.deprecated": (image, kernel, bias, *plain, False, [0, 0], 1, False, False, False),
        "_grid_sampler_2d_cpu_fallback": (image, grid, 0, 0, False),
        "_lu_with_info": (a + eye,),
        "_mps_convolution": (image, kernel, bias, [0, 0], [1, 1], [1, 1], 1),
        "_native_multi_head_attention": (words, words, words, 4, 2, w12, b12, w4, b4),
        "_scaled_dot_product_flash_attention": (heads, heads, heads),
        "_thnn_fused_gru_cell": (torch.rand(2, 12), torch.rand(2, 12), torch.rand(2, 4), b12, b12),
        "_thnn_fused_lstm_cell": (torch.rand(2, 16), torch.rand(2, 16), torch.rand(2, 4), b16, b16),
        "_upsample_bicubic2d_aa": (image, [4, 4], False),
        "_upsample_nearest_exact1d": (line, [4]),
        "_upsample_nearest_exact2d": (image, [4, 4]),
        "_upsample_nearest_exact3d": (solid, [3, 3, 3]),
        "chain_matmul": ([a, b, a],),
        "conv_tbc": (torch.rand(6, 1, 2), torch.rand(3, 2, 2), bias),
        "cudnn_convolution": (image, kernel, [0, 0], [1, 1], [1, 1], 1, False, False, False),
        "cudnn_convolution_transpose": (image, kernel, [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, False),
        "fake_quantize_per_tensor_affine": (a, 0.1, 0, 0, 255),
        "frobenius_norm.dim": (a, [0, 1]),
        "grid_sampler": (image, grid, 0, 0, False),
        "gru_cell": (a, b, w12, w12, b12, b12),
        "inverse": (a + eye,),
        "linalg_cond.p_str": (a + eye, "fro"),
        "linalg_matrix_rank": (a, 0.1),
        "linalg_matrix_rank.tol_tensor": (a, torch.tensor(0.1)),
        "lstm_cell": (a, [b, a], w16, w16, b16, b16),
        "mkldnn_rnn_layer": (
            *(torch.rand(3, 2, 4), w16, w16, b16, b16, torch.rand(2, 4), torch.rand(2, 4)),
            *(False, [], 2, 4, 1, True, False, False, False),
        ),
        "nanquantile": (a, half),
        "nuclear_norm": (a,),
        "nuclear_norm.dim": (a, [0, 1]),
        "orgqr": (a, row),
        "quantile": (a, half),
        "reflection_pad2d": (image, [1, 1, 1, 1]),
        "replication_pad1d": (line, [1, 1]),
        "replication_pad2d": (image, [1, 1, 1, 1]),
        "replication_pad3d": (solid, [1, 1, 1, 1, 1, 1]),
        "rnn_relu_cell": (a, b, w4, w4, b4, b4),
        "rnn_tanh_cell": (a, b, w4, w4, b4, b4),
        "upsample_bicubic2d": (image, [4, 4], False),
        "upsample_linear1d": (line, [4], False),
        "upsample_nearest1d": (line, [4]),
        "upsample_nearest2d": (image, [4, 4]),
        "upsample_nearest3d": (solid, [3, 3, 3]),
        "upsample_trilinear3d": (solid, [3, 3, 3], False),
    }
    return {f"aten::{name}": (args, {}) for name, args in calls.items()}


# ---------------------------------------------------------------------------------------------------------------------
# what the rule says, and what happens


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
