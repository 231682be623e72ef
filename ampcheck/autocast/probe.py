"""Read autocast's policy from the installed PyTorch, for any device, without the device.

PyTorch does not tell which rule an overload follows, so it is asked: the overload is called with two-by-two arguments
made from its schema, and a recorder on the next dispatch key below autocast (`Autograd<DEVICE>`) sees the dtypes that
autocast hands down. No kernel runs. The recorders live in the Python dispatcher, which only this thread enters and only
while it asks; no kernel of the real dispatcher is touched. Other devices than the CPU are posed by data-less tensors.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import resolve_key
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ampcheck.autocast.policy import (
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
    Snapshot,
)
from ampcheck.autocast.state import KEYS, autocast_key, device_type, devices, raw_autocast, registered
from ampcheck.core.errors import UsageError
from ampcheck.torchtools.source import op_name, overload

DTYPES = (torch.float16, torch.bfloat16)
_TENSORS = {"Tensor": 1, "Optional[Tensor]": 1, "List[Tensor]": 2}
"""Argument types that autocast may cast, and how many tensors stand for each."""
_lock = threading.Lock()


def measure_policy(device: str = "cuda", dtype: torch.dtype | str = torch.float16) -> Policy:
    """What autocast to `dtype` does to each op on `device`, under the installed PyTorch.

    device: a device type (`cpu`, `cuda`, `xpu`, `mps`, `mtia`, `privateuseone`); it need not be there. Every
    overload with an autocast kernel is in `ops` or, with the reason, in `unprobed`. Raises `UsageError` for an unknown
    device or a dtype that autocast does not cast to.
    """
    kind, low = device_type(device), low_dtype(dtype)
    name = str(low).removeprefix("torch.")
    ops: dict[str, OpPolicy] = {}
    unprobed: dict[str, str] = {}
    with _lock, _Stage(kind) as stage:
        for op in registered(kind):
            found = _probe(stage, op, low)
            if isinstance(found, OpPolicy):
                ops[op] = found
            else:
                unprobed[op] = found
    return Policy(kind, torch.__version__, (name,), ops, unprobed)


def take_snapshot() -> Snapshot:
    """The policies of every device type that has autocast kernels in the installed PyTorch, for `ampcheck policy`."""
    import platform

    held = {}
    for device in devices():
        if registered(device):
            found = [measure_policy(device, dtype).of("aten") for dtype in DTYPES]
            held[device] = {policy.dtypes[0]: policy for policy in found}
    where = f"{platform.system()} {platform.machine()}"
    return Snapshot(torch.__version__, build(), where, date.today().isoformat(), held)


def build() -> str:
    """What the installed PyTorch was built for: `cpu`, `cuda 12.4`, `rocm 6.2`, `xpu`."""
    if torch.version.cuda:
        return f"cuda {torch.version.cuda}"
    if torch.version.hip:
        return f"rocm {torch.version.hip}"
    return "xpu" if torch.xpu._is_compiled() else "cpu"


def low_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """One of the two dtypes that autocast casts to. Raises `UsageError` for another."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        raise UsageError(f"autocast casts to float16 or bfloat16, not to {str(dtype).removeprefix('torch.')}")
    return found


@dataclass
class _Seen:
    """What the recorder saw: the overload, the dtypes of its tensors, and its dtype arguments.

    returned: what the caller gets back where the recorder returned another dtype: the kernel casts its result.
    """

    op: str
    tensors: tuple[torch.dtype, ...]
    dtypes: tuple[torch.dtype, ...]
    returned: torch.dtype | None = None


class _Posed(torch.Tensor):
    """A two-by-two tensor without data that says it is on a device: it has the dispatch keys, autocast's among them.

    PyTorch's own fake tensors would do as well; making the first one imports Dynamo, which takes a second.
    """

    posed: torch.device

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: str) -> _Posed:
        meta = torch.empty(2, 2, dtype=dtype, device="meta")
        place = torch.device(device, 0)
        made: _Posed = torch.Tensor._make_subclass(
            cls, meta, False, dispatch_device=True, device_for_backend_keys=place
        )
        made.posed = place
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].posed
        if func is torch.ops.aten._to_copy.default:
            return cls((kwargs or {}).get("dtype") or args[0].dtype, args[0].posed.type)
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"its autocast kernel computes with {op_name(func)}")


class _Stage:
    """Posed tensors of a device, and recorders below autocast, while it is entered."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seen: _Seen | None = None
        self._key: torch._C.DispatchKey = torch._C.DispatchKey.__members__[f"Autograd{KEYS[device]}"]
        self._thread = threading.get_ident()
        self._open = ExitStack()

    def __enter__(self) -> _Stage:
        self._open.enter_context(_disable_current_modes())  # fake tensors of the caller would take ours for theirs
        self._open.enter_context(torch.inference_mode(False))  # inference tensors pass the recorders by
        self._open.enter_context(enable_python_dispatcher())
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def take(self) -> _Seen | None:
        """What was seen since the last call."""
        seen, self.seen = self.seen, None
        return seen

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """A two-by-two tensor of the device."""
        if self.device == "cpu":
            return torch.zeros(2, 2, dtype=dtype, device="cpu")
        return _Posed(dtype, self.device)

    @contextmanager
    def recording(self, op: torch._ops.OpOverload) -> Iterator[None]:
        """Recorders on every overload of the op's packet, any of which autocast may call instead."""
        packet = op._overloadpacket
        overloads = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
        held = [(sibling, sibling.py_kernels.get(self._key)) for sibling in overloads]
        try:
            for sibling in overloads:
                sibling.py_kernels[self._key] = self._recorder(sibling)
                sibling._dispatch_cache.clear()
            yield
        finally:
            for sibling, kernel in held:
                if kernel is None:
                    sibling.py_kernels.pop(self._key, None)
                else:
                    sibling.py_kernels[self._key] = kernel
                sibling._dispatch_cache.clear()

    def _kernel(self, op: torch._ops.OpOverload) -> Callable[..., Any]:
        """What the Python dispatcher calls where no recorder stands, which need not be a kernel of this very key."""
        try:
            key = resolve_key(op, self._key)
        except RuntimeError:  # nothing to be found, or an overload of TorchScript, which the dispatcher does not know
            key = self._key
        kernel = op.py_kernels.get(key)
        return kernel if kernel is not None else partial(op._op_dk, key)

    def _recorder(self, op: torch._ops.OpOverload) -> Callable[..., Any]:
        own = self._kernel(op)

        def record(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:  # another thread that is inside the Python dispatcher, as Dynamo
                return own(*args, **kwargs)
            leaves = tree_leaves((args, kwargs))
            dtypes = tuple(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.seen = _Seen(op_name(op), dtypes, tuple(leaf for leaf in leaves if isinstance(leaf, torch.dtype)))
            return _results(op, self.tensor(dtypes[0]))

        return record


def _probe(stage: _Stage, name: str, low: torch.dtype) -> OpPolicy | str:
    """What autocast does to one overload, or the reason why it cannot be asked."""
    op = overload(name)
    count = sum(_TENSORS.get(str(argument.type), 0) for argument in op._schema.arguments)
    if not count:
        return "it takes no tensor"
    wide, other = torch.float32, DTYPES[1 - DTYPES.index(low)]
    given = {
        "float32": [wide] * count,
        "low": [low] * count,
        "float32+low": [wide] + [low] * (count - 1),
        "low+float32": [low] + [wide] * (count - 1),
        "other": [other] * count,
        "float64": [torch.float64] * count,
    }
    seen: dict[str, _Seen | str] = {}
    with stage.recording(op):
        for pattern, dtypes in given.items():
            if count == 1 and "+" in pattern:
                continue
            seen[pattern] = _ask(stage, op, dtypes, low)
    first = seen["float32"]
    if isinstance(first, str) and "unsafe to autocast" not in first:
        return first.splitlines()[0]
    facts = {pattern: _handed_down(found, low) for pattern, found in seen.items()}
    redispatch = "" if isinstance(first, str) else first.op
    return OpPolicy(
        rule=_rule(name, seen, low),
        facts=facts,
        redispatch=redispatch if redispatch != name else "",
        restores=any(isinstance(found, _Seen) and found.returned is not None for found in seen.values()),
        raises=first if isinstance(first, str) else "",
        source=_source(name, stage.device),
    )


def _ask(stage: _Stage, op: torch._ops.OpOverload, dtypes: Sequence[torch.dtype], low: torch.dtype) -> _Seen | str:
    """What autocast hands down, or the message of what it raises."""
    args, kwargs = _arguments(op, iter([stage.tensor(dtype) for dtype in dtypes]), stage.tensor(torch.int64))
    stage.take()
    try:
        with raw_autocast(stage.device, low):
            out = op(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever an autocast kernel raises is its policy, or our bad argument
        if not stage.seen:
            return str(error).strip() or type(error).__name__
        out = None  # a wrapper that stumbled over the dummy result: what it handed down is known
    seen = stage.take()
    if seen is None:
        return "its kernel calls no overload of the op"
    returned = next((leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), None)
    seen.returned = returned if returned not in (None, seen.tensors[0]) else None
    return seen


def _arguments(
    op: torch._ops.OpOverload, given: Iterator[torch.Tensor], index: torch.Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the schema: the given tensors in order, defaults left out, the plainest value for the rest."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for number, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            value: Any = next(given)
        elif kind == "List[Tensor]":
            value = [next(given), next(given)]
        elif kind == "List[Optional[Tensor]]":  # lists of indices, in every schema of PyTorch
            value = [index]
        elif argument.has_default_value():
            continue
        elif (
            argument.name == "weight_stride0"
        ):  # aten::_cudnn_rnn of CUDA builds accepts the count of an LSTM's weights
            value = 3
        else:
            value = _plainest(kind, op)
        if argument.kwarg_only or len(args) < number:  # behind a default that was left out
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _plainest(kind: str, op: torch._ops.OpOverload) -> Any:
    name = "dimname::a" if re.search("[dD]imname|names", op._schema.overload_name) else "a"
    plain = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1.0, "bool": False, "str": name, "List[str]": [name]}
    if kind in plain:
        return plain[kind]
    if kind.startswith("Optional"):
        return None
    if inside := re.fullmatch(r"List\[(.*)\]", kind):
        return [_plainest(inside[1], op)]
    return None


def _results(op: torch._ops.OpOverload, tensor: torch.Tensor) -> Any:
    """What an op of this schema returns, all tensors being `tensor`."""
    kinds = [str(result.type) for result in op._schema.returns]
    made = [[tensor] if kind.startswith("List") else tensor if "Tensor" in kind else 1 for kind in kinds]
    return made[0] if len(made) == 1 else tuple(made) or None


def _rule(name: str, seen: dict[str, _Seen | str], low: torch.dtype) -> str:
    """The rule that these facts show. Mixed patterns are absent for ops of one tensor, whose rule shows without."""
    wide, narrow = seen["float32"], seen["low"]
    if isinstance(wide, str):
        return BANNED
    if isinstance(narrow, str):
        return OTHER
    if torch.float32 in narrow.dtypes and _floats(narrow) == {low}:
        return SET_DTYPE if narrow.op == name else APPEND_DTYPE
    mixed = {d for pattern, found in seen.items() if "+" in pattern for d in _floats(found)}
    got = _floats(wide), _floats(narrow), mixed or _floats(wide)
    if got == ({torch.float32}, {low}, {torch.float32}):
        return PROMOTE if mixed else OTHER
    if len(set(map(frozenset, got))) > 1 or len(got[0]) != 1:
        return OTHER
    (target,) = got[0]
    if target == torch.float32:
        return FP32
    # A custom op may be registered with one dtype for good; then the other 16-bit dtype of autocast shows it.
    return LOWER if target == low else FIXED + str(target).removeprefix("torch.")


def _floats(found: _Seen | str) -> set[torch.dtype]:
    return set() if isinstance(found, str) else {d for d in found.tensors if d.is_floating_point}


def _handed_down(found: _Seen | str, low: torch.dtype) -> str:
    if isinstance(found, str):
        return "raises"
    names = [_dtype_name(dtype, low) for dtype in found.tensors]
    names = names[:1] if len(set(names)) == 1 else names
    names += [f"dtype={_dtype_name(dtype, low)}" for dtype in found.dtypes]
    return " ".join(names) + (f" -> {_dtype_name(found.returned, low)}" if found.returned else "")


def _dtype_name(dtype: torch.dtype, low: torch.dtype) -> str:
    other = DTYPES[1 - DTYPES.index(low)]
    return {low: "low", other: "other"}.get(dtype, str(dtype).removeprefix("torch."))


def _source(name: str, device: str) -> str:
    """The file that registers the autocast kernel, as PyTorch's source tree or a package names it."""
    key = autocast_key(device)
    found = re.search(rf"^{key}: registered at (\S+?):\d+ ", torch._C._dispatch_dump(name), re.MULTILINE)
    if found is None:
        return ""
    path = found[1]
    for root in ("aten/src/", "site-packages/"):
        if root in path:
            return path.rpartition(root)[2]
    return path.rpartition("/")[2]
