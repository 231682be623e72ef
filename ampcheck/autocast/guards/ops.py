"""A dispatch mode that notes each op together with autocast's state, as the one who called the op has it."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.autocast import emulate
from ampcheck.autocast.guards.call_sites import Spot, function_context, in_optimizer, spot_of, way_to
from ampcheck.autocast.guards.casts import CastNotes
from ampcheck.autocast.guards.records import Call, Crossing, Recompute, State
from ampcheck.autocast.policy import Policy
from ampcheck.autocast.state import devices
from ampcheck.core.errors import brief
from ampcheck.torchtools.source import op_name

COMPILED = "ops of code that torch.compile wrote"
HIGHER = "higher-order ops"
_STATES, _CASTS = "_ampcheck_states", "_ampcheck_casts"
"""Attributes of a Function's context: autocast's states in its forward, and whether its backward casts by itself."""


class Here(threading.local):
    """What a thread was given: autocast's state of the thread that started it, and the regions it entered itself."""

    def __init__(self) -> None:
        self.watched = False
        self.parent: dict[str, State] = {}
        self.chosen: list[tuple[str, bool]] = []
        self.trail = Trail()


@dataclass(slots=True)
class Trail:
    """Ops of the forward that a hook runs again: known as a recomputation once a second site follows in its order."""

    call: Hashable = None
    order: int = -1
    known: bool = False
    held: list[Recompute | None] = field(default_factory=list)


@dataclass(slots=True)
class Forward:
    """An op at one site of the forward: where it stands, and under which states it ran on which dtypes.

    order: how many sites ran before this one did for the first time.
    """

    file: str
    line: int | None
    order: int
    ran: dict[State, set[tuple[torch.dtype, ...]]] = field(default_factory=dict)


class Notes:
    """Collects what is seen while `open`. Shared by the modes of all threads."""

    def __init__(self) -> None:
        self.open = True
        self.here = Here()
        self.region = 0
        self.counts: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()
        self.calls: Counter[Call] = Counter()
        self.crossings: Counter[Crossing] = Counter()
        self.recomputed: Counter[Recompute] = Counter()
        self.raising: list[tuple[Call, BaseException]] = []
        self.casts = CastNotes()
        self.policies: dict[str, Policy] = {}
        self.on: set[str] = set()
        self.forward: dict[tuple[str, Hashable], Forward] = {}
        self.sites: dict[Hashable, Forward] = {}
        self.forwards: dict[CodeType | None, set[State]] = {}
        self.shifted: dict[Hashable, Recompute] = {}

    def policy(self, device: str) -> str:
        """The name under which the rules for a device are kept; an emulation has its own."""
        emulation = emulate.active() if device == "cpu" else None
        if emulation is None:
            return device
        name = f"{emulation.policy.device} {emulation.policy.torch}, emulated on the CPU"
        self.policies[name] = emulation.policy
        return name


class _Seen(NamedTuple):
    op: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    flat: list[torch.Tensor]
    state: State
    spot: Spot
    twin: str


class OpsMode(TorchDispatchMode):
    """Notes ops of the thread that enters it. Compiled code runs compiled under it, and is seen only in part."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles as ever. An older one, which does not ask this, skips code that it meets under a mode."""
        return True

    def __init__(self, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._notes.open:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._notes.unseen[HIGHER] += 1
            return func(*args, **kwargs)
        seen = _before(self._notes, func, args, kwargs)
        if seen is None:
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except BaseException as error:
            _failed(self._notes, seen, error)
            raise
        _after(self._notes, seen, out)
        return out


_states: dict[tuple[str, torch.dtype | None, str], State] = {}


def current_state(device: str) -> State:
    """Autocast's state of this thread for a device."""
    return _state(device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)


def _state(device: str, dtype: torch.dtype | None) -> State:
    emulation = emulate.active() if device == "cpu" and dtype is not None else None
    emulated = emulation.policy.device if emulation is not None else ""
    known = _states.get((device, dtype, emulated))
    if known is None:
        known = _states[device, dtype, emulated] = State(device, dtype, emulated)
    return known


@cache
def autocast_devices() -> tuple[str, ...]:
    """The device types that autocast knows, as tensors name them."""
    renamed = torch._C._get_privateuse1_backend_name()
    return tuple(renamed if device == "privateuseone" else device for device in devices())


def _before(notes: Notes, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Seen | None:
    flat = _tensors(args, kwargs)
    device = next((t.device.type for t in flat if t.is_floating_point()), flat[0].device.type if flat else "")
    if device not in autocast_devices():
        return None
    running = torch._C._current_graph_task_id() != -1
    spot = spot_of(sys._getframe(2), running)
    if spot is None:
        return None
    if running and not spot.file and spot.site is None:
        return None  # the engine's own op: its dtypes were settled in forward
    if spot.compiled:
        notes.unseen[COMPILED] += 1
        return None
    # Below autocast its key is excluded. What the caller has is what the dispatcher was first entered with.
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        state = current_state(device)
    notes.counts["ops"] += 1
    if state.dtype is not None:
        notes.counts["autocast ops"] += 1
        notes.on.add(device)
    notes.casts.before(op, args, flat, state, spot)
    if running:
        _in_backward(notes, op, kwargs, flat, state, spot)
    else:
        name = op_name(op)
        here = notes.sites.setdefault(spot.site, Forward(spot.file, spot.line, len(notes.sites)))
        op_here = notes.forward.setdefault((name, spot.site), Forward(spot.file, spot.line, here.order))
        for ran in (op_here.ran, here.ran):
            ran.setdefault(state, set()).add(_floating(flat))
        if not torch.is_grad_enabled():
            context = function_context(sys._getframe(2))
            if isinstance(context, list):
                for code in context:
                    notes.forwards.setdefault(code, set()).add(state)
            else:
                vars(context).setdefault(_STATES, set()).add(state)
    if notes.here.parent:
        _in_thread(notes, op, kwargs, flat, state, spot)
    return _Seen(op, args, kwargs, flat, state, spot, functional(op) if op._schema.is_mutable else "")


def _in_backward(notes: Notes, op: Any, kwargs: Any, flat: list[torch.Tensor], state: State, spot: Spot) -> None:
    """Python code that the engine runs: a forward that is computed again, or the backward of a Function."""
    name, dtypes = op_name(op), _floating(flat)
    if (here := notes.sites.get(spot.site)) is not None and state not in here.ran:
        notes.shifted.setdefault(spot.site, Recompute("", next(iter(here.ran)), state, (), (), here.file, here.line))
    before = notes.forward.get((name, spot.site))
    if before is not None and torch.is_grad_enabled():
        again = None
        if state not in before.ran and not any(dtypes in seen for seen in before.ran.values()):
            was, theirs = next((state, next(iter(seen))) for state, seen in before.ran.items())
            again = Recompute(name, was, state, theirs, dtypes, before.file, before.line)
        way = way_to(sys._getframe(1))
        if way.checkpoint or (way.function and (way.module or not way.differentiable)):
            _recomputed(notes, [again])
            return
        if not way.function:
            _in_hook(notes, way.top, before.order, again)
            return
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction):
        return
    forward: set[State] = vars(node).get(_STATES) or notes.forwards.get(_forward_code(node), set())
    if len(forward) != 1:
        return  # no op was seen there, or it chose another state for a part: then backward may choose too
    (was,) = forward
    if was.device != state.device or was.dtype is None:
        return
    notes.counts["Function ops"] += 1
    if op is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
        vars(node)[_CASTS] = True
    if state.dtype is None:
        cast = vars(node).get(_CASTS, False)
        notes.calls[_call(notes, "function", op, kwargs, flat, was, spot, now=state, cast=cast)] += 1


def _recomputed(notes: Notes, ops: Sequence[Recompute | None]) -> None:
    """Ops of a forward that ran again; those that ran otherwise come with what was other."""
    notes.counts["recomputed ops"] += len(ops)
    notes.recomputed.update(op for op in ops if op is not None)


def _in_hook(notes: Notes, call: int, order: int, again: Recompute | None) -> None:
    """A hook runs a line of the forward: by chance, unless another line of the forward follows in its order."""
    task, trail = torch._C._current_graph_task_id(), notes.here.trail
    if trail.call != (task, call) or (order < trail.order and not trail.known):
        trail = notes.here.trail = Trail((task, call), order)
    trail.known = trail.known or order > trail.order
    trail.order = order
    trail.held.append(again)
    if trail.known:
        _recomputed(notes, trail.held)
        trail.held = []


def _forward_code(node: Any) -> CodeType | None:
    forward = getattr(getattr(node, "_forward_cls", None), "forward", None)
    return getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None


def _in_thread(notes: Notes, op: Any, kwargs: Any, flat: list[torch.Tensor], state: State, spot: Spot) -> None:
    parent = notes.here.parent.get(state.device)
    if parent is None:
        return
    notes.counts["thread ops"] += 1
    chosen = any(explicit for device, explicit in notes.here.chosen if device == state.device)
    if state != parent and not chosen:
        notes.calls[_call(notes, "thread", op, kwargs, flat, parent, spot, now=state)] += 1


def _after(notes: Notes, seen: _Seen, out: Any) -> None:
    notes.casts.after(seen.op, seen.flat, out, seen.state)
    if seen.state.dtype is None or not seen.twin:
        return
    notes.counts["in-place ops"] += 1
    if seen.spot.direct:
        first = out[0] if isinstance(out, (list, tuple)) and out else out
        result = first.dtype if isinstance(first, torch.Tensor) else None
        call = _call(notes, "bypass", seen.op, seen.kwargs, seen.flat, seen.state, seen.spot, result=result)
        if call in notes.calls or not in_optimizer(sys._getframe()):
            notes.calls[call] += 1


def _failed(notes: Notes, seen: _Seen, error: BaseException) -> None:
    """An op raised under autocast: is it because its inputs have several dtypes?"""
    low = seen.state.dtype
    if low is None or len(set(_eligible(seen.flat, seen.state.device))) < 2:
        return
    ran = next((dtype for dtype in (low, torch.float32) if _runs(seen, dtype)), None)
    if ran is None or in_optimizer(sys._getframe()):
        return
    how = "bypass" if seen.twin else "mixed"
    text = brief(error).removeprefix(f"{type(error).__name__}: ")
    call = _call(notes, how, seen.op, seen.kwargs, seen.flat, seen.state, seen.spot, raised=text, runs_in=ran)
    notes.raising.append((call, error))


def _runs(seen: _Seen, dtype: torch.dtype) -> bool:
    """Whether the op runs on copies of its inputs that all have one dtype."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            floating = value.is_floating_point() and value.dtype is not torch.float64
            return value.detach().to(dtype if floating else value.dtype, copy=True)
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value

    try:
        with torch.no_grad():
            seen.op(*map(copied, seen.args), **{name: copied(value) for name, value in seen.kwargs.items()})
    except Exception:  # noqa: BLE001  # whatever it raises now, the dtypes were not all that was wrong
        return False
    return True


def _call(
    notes: Notes, how: str, op: Any, kwargs: Any, flat: list[torch.Tensor], state: State, spot: Spot, **rest: Any
) -> Call:
    return Call(
        how=how,
        op=op_name(op),
        rule_of=functional(op) or op_name(op),
        policy=notes.policy(state.device),
        state=state,
        given=_eligible(flat, state.device),
        asked=kwargs.get("dtype") is not None,
        file=spot.file,
        line=spot.line,
        **rest,
    )


@cache
def functional(op: Any) -> str:
    """The overload without side effect that an in-place or out= overload stands for; empty where there is none."""
    schema = op._schema
    if not schema.is_mutable:
        return ""
    namespace, _, base = schema.name.partition("::")
    if base.endswith("_") and not base.endswith("__"):
        base = base[:-1]
    packet = getattr(getattr(torch.ops, namespace), base, None)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    for name in packet.overloads() if packet is not None else ():
        found = getattr(packet, name)
        if not found._schema.is_mutable and [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return op_name(found)
    return ""


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def _floating(flat: list[torch.Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in flat if t.is_floating_point())


def _eligible(flat: list[torch.Tensor], device: str) -> tuple[torch.dtype, ...]:
    """The dtypes of those that autocast may cast; 8-bit floats are left out, which no rule is made for."""
    wide = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(t.dtype for t in flat if t.device.type == device and t.dtype in wide)
