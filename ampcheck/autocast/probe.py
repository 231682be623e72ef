"""Read autocast's policy from the installed PyTorch, for any device, without the device.

PyTorch does not say which rule an overload follows, so the overload is called with two-by-two arguments made from its
schema, and a recorder on the next dispatch key below autocast (`Autograd<DEVICE>`) sees the dtypes that autocast passes
on. No kernel runs. The recorders are in the Python dispatcher, which only this thread enters and only while it probes;
no kernel of the real dispatcher is touched. Other devices than the CPU are imitated by tensors without data.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from typing import Any

import torch

from ampcheck.autocast.policy import Snapshot
from ampcheck.autocast.state import KEYS, autocast_key, device_type, devices, raw_autocast, registered, short
from ampcheck.core.arguments import parse_dtypes
from ampcheck.records.policy import (
    APPEND_DTYPE,
    BANNED,
    FIXED,
    FP32,
    LOWER,
    OTHER,
    PROMOTE,
    SET_DTYPE,
    OpPolicy,
    Policy,
)
from ampcheck.torchtools.private import (
    CAST,
    DispatchKey,
    OpOverload,
    describe_kernels,
    make_subclass,
    python_dispatcher,
    resolve_key,
    tree_leaves,
    without_modes,
    xpu_is_compiled,
)
from ampcheck.torchtools.source import op_name, overload

DTYPES = (torch.float16, torch.bfloat16)
_TENSORS = {"Tensor": 1, "Optional[Tensor]": 1, "List[Tensor]": 2}
"""Argument types that autocast may cast, and how many tensors the probe passes for each."""
_lock = threading.Lock()


def measure_policy(device: str = "cuda", dtype: torch.dtype | str = torch.float16) -> Policy:
    """Return what autocast to `dtype` does to each op on `device`, under the installed PyTorch.

    device: a device type (`cpu`, `cuda`, `xpu`, `mps`, `mtia`, `privateuseone`); the device itself may be absent. Every
    overload with an autocast kernel is in `ops` or, with the reason, in `unprobed`. Raises `UsageError` for an unknown
    device or a dtype that autocast does not cast to.
    """
    kind, low = device_type(device), low_dtype(dtype)
    # Fake tensors of the caller would take ours for theirs; inference tensors pass the recorders by.
    with (
        _lock,
        without_modes(),
        torch.inference_mode(False),
        python_dispatcher(),
        raw_autocast(kind, low),
    ):
        probe = _Probe(kind)
        results = {op: _probe(probe, op, low) for op in registered(kind)}
    ops = {op: result for op, result in results.items() if isinstance(result, OpPolicy)}
    unprobed = {op: result for op, result in results.items() if isinstance(result, str)}
    return Policy(kind, torch.__version__, (short(low),), ops, unprobed)


def take_snapshot() -> Snapshot:
    """The policies of every device type that has autocast kernels in the installed PyTorch, for `ampcheck policy`."""
    import platform

    policies = {}
    for device in devices():
        if registered(device):
            measured = [measure_policy(device, dtype).of("aten") for dtype in DTYPES]
            policies[device] = {policy.dtypes[0]: policy for policy in measured}
    machine = f"{platform.system()} {platform.machine()}"
    return Snapshot(torch.__version__, build(), machine, date.today().isoformat(), policies)


def build() -> str:
    """Return what the installed PyTorch was built for: `cpu`, `cuda 12.4`, `rocm 6.2`, `xpu`."""
    if torch.version.cuda:
        return f"cuda {torch.version.cuda}"
    if torch.version.hip:
        return f"rocm {torch.version.hip}"
    return "xpu" if xpu_is_compiled() else "cpu"


def low_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """One of the two dtypes that autocast casts to. Raises `UsageError` for another."""
    low: torch.dtype = getattr(torch, parse_dtypes((dtype,))[0])
    return low


@dataclass
class _Passed:
    """Call that autocast passed on: the overload, the dtypes of its tensors, and its dtype arguments.

    returned: the dtype of the result where it is another one than the op's: the kernel casts its result.
    """

    op: str
    tensors: tuple[torch.dtype, ...]
    dtypes: tuple[torch.dtype, ...]
    returned: torch.dtype | None = None


class _DeviceTensor(torch.Tensor):
    """A two-by-two tensor without data that claims to be on a device: it has the dispatch keys, autocast's among them.

    PyTorch's own fake tensors would do as well; making the first one imports Dynamo, which takes a second.
    """

    claimed: torch.device

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: str) -> _DeviceTensor:
        meta = torch.empty(2, 2, dtype=dtype, device="meta")
        claimed = torch.device(device, 0)
        tensor: _DeviceTensor = make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys=claimed)
        tensor.claimed = claimed
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].claimed
        if func is CAST.default:
            return cls((kwargs or {}).get("dtype") or args[0].dtype, args[0].claimed.type)
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"its autocast kernel computes with {op_name(func)}")


class _Tensors(dict[torch.dtype, torch.Tensor]):
    """A two-by-two tensor of a device for each dtype, the same for each call: no kernel runs that could write to it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, dtype: torch.dtype) -> torch.Tensor:
        on_cpu = self._device == "cpu"
        self[dtype] = torch.zeros(2, 2, dtype=dtype, device="cpu") if on_cpu else _DeviceTensor(dtype, self._device)
        return self[dtype]


class _Probe:
    """Puts recorders below autocast on a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.passed: _Passed | None = None
        self.tensors = _Tensors(device)
        self._key: DispatchKey = DispatchKey.__members__[f"Autograd{KEYS[device]}"]
        self._thread = threading.get_ident()

    @contextmanager
    def recording(self, op: OpOverload) -> Iterator[None]:
        """Recorders on every overload of the op's packet, any of which autocast may call instead."""
        packet = op._overloadpacket
        overloads = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
        before = [(sibling, sibling.py_kernels.get(self._key)) for sibling in overloads]
        try:
            for sibling in overloads:
                sibling.py_kernels[self._key] = self._recorder(sibling)
                sibling._dispatch_cache.clear()
            yield
        finally:
            for sibling, kernel in before:
                if kernel is None:
                    sibling.py_kernels.pop(self._key, None)
                else:
                    sibling.py_kernels[self._key] = kernel
                sibling._dispatch_cache.clear()

    def _kernel(self, op: OpOverload) -> Callable[..., Any]:
        """Return what the Python dispatcher calls without a recorder, which need not be a kernel of this very key."""
        try:
            key = resolve_key(op, self._key)
        except RuntimeError:  # no kernel, or an overload of TorchScript, which the dispatcher does not know
            key = self._key
        kernel = op.py_kernels.get(key)
        return kernel if kernel is not None else partial(op._op_dk, key)

    def _recorder(self, op: OpOverload) -> Callable[..., Any]:
        own, name = self._kernel(op), op_name(op)
        kinds = [str(value.type) for value in op._schema.returns]

        def record(*args: object, **kwargs: object) -> Any:
            if threading.get_ident() != self._thread:  # another thread that is inside the Python dispatcher, as Dynamo
                return own(*args, **kwargs)
            tensors, dtypes = list[torch.dtype](), list[torch.dtype]()
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    tensors.append(leaf.dtype)
                elif isinstance(leaf, torch.dtype):
                    dtypes.append(leaf)
            self.passed = _Passed(name, tuple(tensors), tuple(dtypes))
            result = self.tensors[tensors[0]]
            if kinds == ["Tensor"]:
                return result
            results = [[result] if kind.startswith("List") else result if "Tensor" in kind else 1 for kind in kinds]
            return results[0] if len(results) == 1 else tuple(results) or None

        return record


def _probe(probe: _Probe, name: str, low: torch.dtype) -> OpPolicy | str:
    """Return what autocast does to one overload, or the reason why it cannot be probed."""
    op = overload(name)
    count = sum([_TENSORS.get(str(argument.type), 0) for argument in op._schema.arguments])
    if not count:
        return "it takes no tensor"
    wide, other = torch.float32, DTYPES[1 - DTYPES.index(low)]
    patterns = {"float32": [wide] * count, "low": [low] * count}
    if count > 1:
        patterns["float32+low"] = [wide] + [low] * (count - 1)
        patterns["low+float32"] = [low] + [wide] * (count - 1)
    patterns |= {"other": [other] * count, "float64": [torch.float64] * count}
    with probe.recording(op):
        passed = {pattern: _ask(probe, op, dtypes) for pattern, dtypes in patterns.items()}
    first = passed["float32"]
    if isinstance(first, str) and "unsafe to autocast" not in first:
        return first.splitlines()[0]
    return OpPolicy(
        rule=_rule(name, passed, low),
        facts={pattern: _fact(result, low) for pattern, result in passed.items()},
        redispatch=first.op if isinstance(first, _Passed) and first.op != name else "",
        restores=bool([p for p in passed.values() if isinstance(p, _Passed) and p.returned is not None]),
        raises=first if isinstance(first, str) else "",
        source=_source(name, probe.device),
    )


def _ask(probe: _Probe, op: OpOverload, dtypes: Sequence[torch.dtype]) -> _Passed | str:
    """Return what autocast passes on, or the message of what it raises."""
    args, kwargs = _arguments(op, map(probe.tensors.__getitem__, dtypes), probe.tensors[torch.int64])
    probe.passed = None
    out, message = None, "its kernel calls no overload of the op"
    try:
        out = op(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever an autocast kernel raises is its policy, or our bad argument
        message = str(error).strip() or type(error).__name__
    passed: _Passed | None = probe.passed
    if passed is None:
        return message  # else an error is a wrapper's that the dummy result broke: what it passed on is known
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            passed.returned = leaf.dtype if leaf.dtype is not passed.tensors[0] else None
            break
    return passed


def _arguments(
    op: OpOverload, tensors: Iterator[torch.Tensor], index: torch.Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the schema: the tensors in order, defaults left out, the plainest value for the rest."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for number, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            value: Any = next(tensors)
        elif kind == "List[Tensor]":
            value = [next(tensors), next(tensors)]
        elif kind == "List[Optional[Tensor]]":  # lists of indices, in every schema of PyTorch
            value = [index]
        elif argument.has_default_value():
            continue
        elif argument.name == "weight_stride0":  # aten::_cudnn_rnn of CUDA builds accepts the count of weights
            value = 3
        else:
            value = _plainest(kind, bool(re.search("[dD]imname|names", op._schema.overload_name)))
        if argument.kwarg_only or len(args) < number:  # after a default that was left out
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


@cache
def _plainest(kind: str, named: bool) -> Any:
    """named: a text is the name of a dimension."""
    name = "dimname::a" if named else "a"
    plain = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1.0, "bool": False, "str": name, "List[str]": [name]}
    if kind in plain:
        return plain[kind]
    inside = re.fullmatch(r"List\[(.*)\]", kind)
    return [_plainest(inside[1], named)] if inside else None


def _rule(name: str, passed: dict[str, _Passed | str], low: torch.dtype) -> str:
    """The rule that these facts show. Mixed patterns are absent for ops of one tensor, whose rule shows without."""
    wide, narrow = passed["float32"], passed["low"]
    if isinstance(wide, str):
        return BANNED
    if isinstance(narrow, str):
        return OTHER
    wides, narrows = _floats(wide), _floats(narrow)
    if torch.float32 in narrow.dtypes and narrows == {low}:
        return SET_DTYPE if narrow.op == name else APPEND_DTYPE
    mixed = _floats(*[result for key, result in passed.items() if "+" in key and isinstance(result, _Passed)])
    results = wides, narrows, mixed or wides
    if results == ({torch.float32}, {low}, {torch.float32}):
        return PROMOTE if mixed else OTHER
    if len(set(map(frozenset, results))) > 1 or len(wides) != 1:
        return OTHER
    (target,) = wides
    if target == torch.float32:
        return FP32
    # A custom op may be registered with one dtype for good; then the other 16-bit dtype of autocast shows it.
    return LOWER if target == low else FIXED + short(target)


def _floats(*passed: _Passed) -> set[torch.dtype]:
    return {dtype for one in passed for dtype in one.tensors if dtype.is_floating_point}


def _fact(passed: _Passed | str, low: torch.dtype) -> str:
    if isinstance(passed, str):
        return "raises"
    names_of = _names(low)
    names = list(map(names_of.__getitem__, passed.tensors))
    names = names[:1] if len(set(names)) == 1 else names
    if passed.dtypes:
        names += [f"dtype={names_of[dtype]}" for dtype in passed.dtypes]
    return " ".join(names) + (f" -> {names_of[passed.returned]}" if passed.returned else "")


@cache
def _names(low: torch.dtype) -> dict[torch.dtype, str]:
    """Return how facts call each dtype where autocast casts to `low`."""
    names = {dtype: short(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    return {**names, low: "low", DTYPES[1 - DTYPES.index(low)]: "other"}


def _source(name: str, device: str) -> str:
    """The file that registers the autocast kernel, as PyTorch's source tree or a package names it."""
    line = rf"^{autocast_key(device)}: registered at (\S+?):\d+ "
    match = re.search(line, describe_kernels(name), re.MULTILINE)
    path = match[1] if match is not None else ""
    root = next((root for root in ("aten/src/", "site-packages/", "/") if root in path), "/")
    return path.rpartition(root)[2]
