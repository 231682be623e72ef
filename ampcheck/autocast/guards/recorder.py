"""Records each op together with the autocast state of its caller."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from ampcheck.autocast import emulate
from ampcheck.autocast.guards.call_sites import CallSite, call_site, engine_path, function_context, in_optimizer
from ampcheck.autocast.guards.casts import CachedCasts
from ampcheck.autocast.policy import nearest
from ampcheck.autocast.state import devices, short
from ampcheck.core.errors import brief
from ampcheck.core.run import Where
from ampcheck.records.autocast import Call, Crossing, Recompute, State
from ampcheck.records.policy import BANNED, Policy
from ampcheck.stream.ops import OpEvent, OpSubscriber
from ampcheck.torchtools.private import CAST, OpOverload, backward_node, backward_task, renamed_backend, state_of_caller
from ampcheck.torchtools.pytree import map_tensors
from ampcheck.torchtools.source import op_name

Op = OpOverload
Dtypes = tuple[torch.dtype, ...]

_STATES, _CASTS = "_ampcheck_states", "_ampcheck_casts"
"""Attributes of a Function's context: autocast's states in its forward, and whether its backward casts by itself."""


class _Thread(threading.local):
    """parent: the autocast states of the thread that started it. regions: those it is in."""

    def __init__(self) -> None:
        self.followed = False
        self.parent: dict[str, State] = {}
        self.regions: list[torch.autocast] = []


@dataclass(slots=True)
class _ForwardOp:
    """An op, or a call site, of the forward, and each state with the dtypes."""

    site: CallSite
    ran: dict[State, set[Dtypes]] = field(default_factory=dict)


class _Running(NamedTuple):
    event: OpEvent
    state: State
    site: CallSite
    dtypes: Dtypes

    @property
    def castable(self) -> tuple[str, ...]:
        """The dtypes of the inputs that autocast may cast; no rule is made for 8-bit floats."""
        dtypes = [short(t.dtype) for t in self.event.tensors if t.device.type == self.state.device]
        return tuple(dtype for dtype in dtypes if dtype in ("float16", "bfloat16", "float32"))


class Recorder:
    """Records while `active`. Shared by the subscribers of all threads."""

    def __init__(self) -> None:
        self.active = True
        self.thread = _Thread()
        self.regions = 0
        self.counts: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()
        self.calls: Counter[Call] = Counter()
        self.idle: dict[Where, str] = {}
        self.crossings: Counter[Crossing] = Counter()
        self.recomputed: Counter[Recompute] = Counter()
        self.raising: list[tuple[Call, BaseException]] = []
        self.casts = CachedCasts()
        self.policies: dict[str, Policy] = {}
        self.autocast_devices: set[str] = set()
        self.changed_sites: dict[Hashable, Recompute] = {}
        self._forward: dict[tuple[str, Hashable], _ForwardOp] = {}
        self._function_states: dict[CodeType | None, set[State]] = {}

    def before(self, event: OpEvent) -> _Running | None:
        """Record an op that is about to run; None where it does not count."""
        floating = list(filter(torch.is_floating_point, event.tensors))
        first = next(iter(floating or event.tensors), None)
        device = "" if first is None else first.device.type
        if device not in autocast_devices():
            return None
        backward = backward_task() != -1
        site = call_site(sys._getframe(2), backward)
        if site is None or (backward and not site.file and site.key is None):
            return None  # our own probe; or the engine's own op, whose dtypes the forward decided
        if site.compiled:
            self.unseen["ops of code that torch.compile wrote"] += 1
            return None
        # Below autocast its key is excluded. The caller's state is the one with which the dispatcher was first entered.
        with state_of_caller():
            state = current_state(device)
        running = _Running(event, state, site, tuple(map(_dtype_of, floating)))
        self.counts["ops"] += 1
        if state.dtype is not None:
            self.counts["autocast ops"] += 1
            self.autocast_devices.add(device)
        if self.casts.known:
            self.casts.before(event, state, site)
        (self._in_backward if backward else self._in_forward)(running)
        parent = self.thread.parent.get(state.device)
        if parent is not None:
            self.counts["thread ops"] += 1
            own = (region for region in self.thread.regions if region.device == state.device)
            explicit = any(getattr(region, "_ampcheck_explicit", True) for region in own)
            if state != parent and not explicit:
                self.calls[self._call("thread", running, state=parent, now=state)] += 1
        return running

    def after(self, running: _Running, out: object) -> None:
        """Record the result of an op."""
        if running.event.op is CAST.default or self.casts.cuts or self.casts.off:
            self.casts.after(running.event, out, running.state)
        if running.state.dtype is None or not plain_overload(running.event.op):
            return
        self.counts["in-place ops"] += 1
        if running.site.direct:
            first = out[0] if isinstance(out, (list, tuple)) and out else out
            call = self._call("bypass", running, result=short(first.dtype) if isinstance(first, torch.Tensor) else None)
            if call in self.calls or not in_optimizer(sys._getframe()):
                self.calls[call] += 1

    def failed(self, running: _Running, error: BaseException) -> None:
        """Record an op that raised under autocast where the reason is that its inputs have several dtypes."""
        low = running.state.dtype
        if low is None or len(set(running.castable)) < 2:
            return
        dtype = next((dtype for dtype in (low, "float32") if _runs(running, getattr(torch, dtype))), None)
        if dtype is None or in_optimizer(sys._getframe()):
            return
        text = brief(error).removeprefix(f"{type(error).__name__}: ")
        how = "bypass" if plain_overload(running.event.op) else "mixed"
        self.raising.append((self._call(how, running, raised=text, runs_in=dtype), error))

    def _call(self, how: str, running: _Running, **values: Any) -> Call:
        device, policy = running.state.device, running.state.device
        if (emulation := emulate.active()) is not None and device == "cpu":
            policy = f"{emulation.policy.device} {emulation.policy.torch}, emulated on the CPU"
            self.policies[policy] = emulation.policy
        name = running.event.traits.title
        plain, has_dtype = plain_overload(running.event.op) or name, running.event.kwargs.get("dtype") is not None
        where = running.site.where("backward" if how == "function" else "forward", name)
        call = Call(how, name, plain, policy, running.state, running.castable, has_dtype, where)
        return replace(call, **values)

    def banned_on_cuda(self) -> tuple[Where, ...]:
        """Ops that ran under the CPU's own autocast and that CUDA's bans, by the snapshot of this release."""
        if "cpu" not in self.autocast_devices or emulate.active() is not None:
            return ()
        policy = nearest(torch.__version__).policy("cuda", "float16")
        cast = ((name, op) for (name, _), op in self._forward.items() if policy.rule(name) == BANNED)
        return tuple(op.site.where("forward", name) for name, op in cast if any(state.dtype for state in op.ran))

    def _in_forward(self, running: _Running) -> None:
        site, state = running.site, running.state
        for name in ("", running.event.traits.title):
            ran = self._forward.setdefault((name, site.key), _ForwardOp(site)).ran
            ran.setdefault(state, set()).add(running.dtypes)
        if not torch.is_grad_enabled():
            context = function_context(sys._getframe(3))
            if isinstance(context, list):
                for code in context:
                    self._function_states.setdefault(code, set()).add(state)
            else:
                vars(context).setdefault(_STATES, set()).add(state)

    def _in_backward(self, running: _Running) -> None:
        """Python code that the engine runs: a forward that is computed again, or the backward of a Function."""
        name, site, state = running.event.traits.title, running.site, running.state
        known_site = self._forward.get(("", site.key))
        if known_site is not None and state not in known_site.ran:
            where = known_site.site.where("backward")
            recompute = Recompute("", next(iter(known_site.ran)), state, (), (), where)
            self.changed_sites.setdefault(site.key, recompute)
        known = self._forward.get((name, site.key))
        if known is not None and torch.is_grad_enabled():
            path = engine_path(sys._getframe(2))
            if again := path.checkpoint or (path.function and (path.module or not path.differentiable)):
                self._recompute(name, known, running)
            if again or not path.function:
                return
        self._in_function(running)

    def _recompute(self, name: str, known: _ForwardOp, running: _Running) -> None:
        """Count an op of a forward that is computed again, and record other dtypes than it had."""
        self.counts["recomputed ops"] += 1
        state = running.state
        if state not in known.ran and not any(running.dtypes in dtypes for dtypes in known.ran.values()):
            before, dtypes = next((state, next(iter(dtypes))) for state, dtypes in known.ran.items())
            where = known.site.where("backward", name)
            first, again = (tuple(map(short, each)) for each in (dtypes, running.dtypes))
            self.recomputed[Recompute(name, before, state, first, again, where)] += 1

    def _in_function(self, running: _Running) -> None:
        """An op in the backward of an autograd Function: whether autocast is as it was in its forward."""
        state = running.state
        node: Any = backward_node()
        if not isinstance(node, BackwardCFunction):
            return
        states: set[State] = vars(node).get(_STATES) or self._function_states.get(_forward_code(node), set())
        if len(states) != 1:
            return  # no op was seen there, or it used another state for a part: then backward may do so too
        (forward,) = states
        if forward.device != state.device or forward.dtype is None:
            return
        self.counts["Function ops"] += 1
        if running.event.op is CAST.default and running.event.kwargs.get("dtype") is not None:
            vars(node)[_CASTS] = True
        if state.dtype is None:
            casts = vars(node).get(_CASTS, False)
            self.calls[self._call("function", running, state=forward, now=state, casts=casts)] += 1


class OpsRecorder(OpSubscriber):
    """Records ops of the thread that enters it. Compiled code runs compiled under it, and is seen only in part."""

    compiles = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def see(self, event: OpEvent) -> Any:
        """Record an op with the state of autocast in which it was called."""
        recorder, running = self._recorder, None
        if recorder.active and event.higher:
            recorder.unseen["higher-order ops"] += 1
        elif recorder.active:
            running = recorder.before(event)
        if running is None:
            return event.run()
        try:
            out = event.run()
        except Exception as error:
            recorder.failed(running, error)
            raise
        recorder.after(running, out)
        return out


def current_state(device: str) -> State:
    """Autocast's state of this thread for a device."""
    if not torch.is_autocast_enabled(device):
        return _state(device, None, "")
    emulation = emulate.active() if device == "cpu" else None
    return _state(device, torch.get_autocast_dtype(device), emulation.policy.device if emulation is not None else "")


_dtype_of = attrgetter("dtype")


@cache
def _state(device: str, dtype: torch.dtype | None, emulated: str) -> State:  # made once, for it is a key of every op
    return State(device, None if dtype is None else short(dtype), emulated)


@cache
def autocast_devices() -> tuple[str, ...]:
    """The device types that autocast knows, as tensors name them."""
    renamed = renamed_backend()
    return tuple(renamed if device == "privateuseone" else device for device in devices())


def _forward_code(node: object) -> CodeType | None:
    forward = getattr(getattr(node, "_forward_cls", None), "forward", None)
    return getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None


def _runs(running: _Running, dtype: torch.dtype) -> bool:
    """Return whether the op runs on copies of its inputs that all have one dtype."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.detach().to(dtype if floating else tensor.dtype, copy=True)

    try:
        with torch.no_grad():
            args, kwargs = map_tensors(copied, (running.event.args, running.event.kwargs))
            running.event.op(*args, **kwargs)
    except Exception:  # noqa: BLE001  # whatever it raises, the dtypes were not all that was wrong
        return False
    return True


@cache
def plain_overload(op: Op) -> str:
    """The overload without side effect that an in-place or out= overload replaces; empty where there is none."""
    schema = op._schema
    if not schema.is_mutable:
        return ""
    namespace, _, base = schema.name.partition("::")
    if base.endswith("_") and not base.endswith("__"):
        base = base[:-1]
    packet = getattr(getattr(torch.ops, namespace), base, None)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    for name in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, name)._schema
        if not candidate.is_mutable and [(a.name, str(a.type)) for a in candidate.arguments] == wanted:
            return op_name(getattr(packet, name))
    return ""
