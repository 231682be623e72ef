"""A training loop inside code that runs: its parts are found by what they do, its steps by those of its optimizers.

Nothing is taken apart and nothing runs twice. Model, optimizer, scaler and whatever else lives across steps are the
local variables of the user's functions that are running when a module or an optimizer is called. A step ends with the
step of the last optimizer; the next one begins with the next forward or backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampcheck.core.errors import EnoughSteps, as_result
from ampcheck.facts.memory import has_companions
from ampcheck.records.protocol import OF_STEPS
from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.closures import globals_of
from ampcheck.torchtools.private import backward_task, without_modes
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.reachable import Reached, reach
from ampcheck.torchtools.source import drives, hooked, is_users
from ampcheck.torchtools.storage import is_transformed
from ampcheck.training.following import Following
from ampcheck.training.loop import LoopShadow, TrainingLoop, ended_by
from ampcheck.training.observed import Observation, Observed
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.stopping import Stopper

_SEARCHES = 8
"""Forwards whose variables are searched for an optimizer; after them only the step of an optimizer begins a search."""

_RUNNERS = ("_pytest.", "pluggy.", "unittest.")
"""Modules that call tests: what they and their callers hold is no part of a loop."""

_DRIVER = "the trainer's "
"""Begins the names of a library's variables: its paths to a user's parts say less than their classes."""


class RunningLoop(TrainingLoop):
    """The parts of a loop that runs. It has no `step` that could be called, so nothing of it can be repeated."""

    def __init__(self, name: str) -> None:
        self.name, self.shape, self.horizon = name, {}, None
        self.step = self.save = self.load = None
        self.settled = lambda taken: taken
        self._roots: dict[str, Any] = {}
        self._called: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.reached = Reached()

    def look(self, frame: FrameType | None, end: int) -> None:
        """Find the parts among the variables of the user's functions, from `frame` on outwards to that of id `end`.

        Another part under the name of a variable further in, as a `model` of a function that it calls, counts too.
        Parts that only a library holds that runs the training, such as Lightning, are named by their classes.
        """
        roots: dict[str, Any] = {}
        drivers: dict[str, Any] = {}
        while frame is not None and id(frame) != end and not frame.f_globals.get("__name__", "").startswith(_RUNNERS):
            if is_users(frame.f_code.co_filename):
                variables = {**frame.f_locals, **globals_of(frame.f_code, frame.f_globals)}
                for name, value in variables.items():
                    if not name.startswith("__") and _lives_on(value):
                        leads_on = not isinstance(value, torch.optim.Optimizer) and drives(_file_of(type(value)))
                        driven = leads_on or drives(frame.f_code.co_filename)
                        _add(drivers if driven else roots, f"{_DRIVER if driven else ''}{name}", value)
            frame = frame.f_back
        roots |= drivers
        reached = reach(roots, within=False)
        inside = {id(part) for module in reached.modules.values() for part in module.modules()}
        inside |= set(map(id, reached.optimizers.values()))
        missing = {name: part for name, part in self._called.items() if id(part) not in inside}
        self._roots = {**missing, **roots}
        self.reached = reach(self._roots, within=False) if missing else reached
        for parts in (self.reached.modules, self.reached.optimizers, self.reached.scalers, self.reached.schedulers):
            for path in [path for path in parts if path.startswith(_DRIVER)]:
                part = parts.pop(path)
                _add(parts, type(part).__name__, part)

    def note(self, name: str, part: object) -> None:
        """Remember a part that was called, for where no variable leads to it."""
        _add(self._called, name, part)


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _add(parts: MutableMapping[str, Any], name: str, part: object) -> None:
    """Add a part that is not there yet, under a name that no other has."""
    of_name = [known for known in parts if known.partition("#")[0] == name]
    if not any(parts.get(known) is part for known in of_name):
        parts[f"{name}#{len(of_name) + 1}" if of_name else name] = part


class TrainingWatch:
    """Observes the training that runs inside a block.

    name: what findings call it. steps: how many are observed. ends: end the code after them: the next pass raises
    `EnoughSteps`. shadow: follows every op of the block. known: the steps whose loss is known, as a backward pass began
    at one number. ended: whether all steps were observed and others came. horizon: how many steps are planned. stopper:
    ends the code. stats: what the loop did in its steps; None inside the block, and where no optimizer was stepped,
    unless training had begun when the code raised.
    """

    def __init__(
        self, name: str, steps: int, shadow: LoopShadow, *, ends: bool = True, horizon: int | None = None
    ) -> None:
        self.loop = RunningLoop(name)
        self.loop.horizon = horizon
        self.recorder = Recorder(self.loop)
        self.shadow = shadow
        self.following = Following(self.loop, self.recorder, shadow)
        self.known: list[int] = []
        self.stopper = Stopper()
        self._steps, self._ends, self._searches = steps, ends, _SEARCHES
        self._seen: Observation | None = None
        self._step, self._hooks = ExitStack(), ExitStack()
        self._is_open = self.ended = False
        self._inside = self._since = self._end = 0
        self._turns: list[str] = []
        self._last = ""
        self._loss: float | None = None
        self.stats: Observed | None = None

    def call(self, function: Callable[[], object]) -> object:
        """Call a function inside `watching`. Raises `EnoughSteps` where it was ended after its last observed step, also
        if it returned or raised something else then."""
        self._end = id(sys._getframe())
        try:
            result = function()
        except BaseException as error:
            self._raised(as_result(error))
            if not self.stopper.raised:
                raise
        if self.stopper.raised:
            raise EnoughSteps
        return result

    @property
    def begun(self) -> bool:
        """True if code with an optimizer ran a backward pass, entered 16-bit autocast or used a scaler."""
        recorder = self.recorder
        return bool(self.loop.optimizers and (recorder.events or recorder.low or recorder.scaled))

    def _raised(self, error: BaseException) -> None:
        """End the open step by an exception; where none is open, the variables around it may hold an optimizer."""
        innermost = error.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        if self._seen is None and innermost is not None:
            with without_modes():
                self._begin(innermost.tb_frame, 0)
        self._finish(error)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe what runs inside."""
        self.recorder.on_backward = self._before_backward
        self.following.lineage.active = self._ends  # sums are reported of callables alone
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        self._end = id(frame.f_back) if frame is not None else 0  # the variables around the block count
        try:
            with self._hooks as hooks, self.shadow, self.following.lineage:
                hooks.enter_context(self.recorder.listening())
                hooks.enter_context(self.following.degrees.following())
                hooks.enter_context(subscribed(optimizer_step=self._before_step))
                entering = register_module_forward_pre_hook(self._enter)
                hooks.enter_context(hooked([entering, register_module_forward_hook(self._leave, always_call=True)]))
                try:
                    yield
                finally:
                    self._finish()
        finally:  # what was observed until code raised counts
            if self._seen is not None and (self._seen.losses or (self._seen.stopped is not None and self.begun)):
                self.stats = self._seen.result()

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        self._inside += 1
        begins = self._inside == 1 and torch.is_grad_enabled() and backward_task() == -1
        if begins and not is_transformed():
            with without_modes():
                self.loop.note("model", module)
                self._advance(sys._getframe(1), searches=True)

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        self._inside = max(0, self._inside - 1)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
        with without_modes():
            self.loop.note("optimizer", optimizer)
            self._begin(sys._getframe(1), len(self.recorder.events) - 1)  # the event of this step is there already

    def _before_backward(self, roots: object, scale: float | None) -> None:
        with without_modes(), torch.no_grad():
            self._advance(sys._getframe(1))
            loss = next((t.detach() for _, t in tensors(roots) if t.numel() == 1 and t.is_floating_point()), None)
            if loss is not None:
                self._loss = float(loss) / (scale or 1.0)
                if has_companions(loss):
                    exact = float(self.shadow.exact(loss))
                    self.following.exact[self.recorder.step] = exact / (scale or 1.0)
                    largest = torch.finfo(loss.dtype).max
                    if scale and abs(exact) > largest >= abs(exact / scale):  # it is the scaler's to find another scale
                        self._loss = None

    def _advance(self, frame: FrameType, *, searches: bool = False) -> None:
        """End the open step where its optimizers were stepped, and begin the next. searches: also without a step."""
        if looked := self._is_over():
            self.loop.look(frame, self._end)  # a variable may hold another tensor now: total = total + loss
            self._finish()
            self.ended = self._count() >= self._steps
        if self.ended:
            if self._ends:
                self._inside = 0
                self.stopper.stop()
            self._hooks.close()  # later steps cost no more than the shadow
            self.following.lineage.active = False
            return
        if self._seen is not None or (searches and self._searches):
            self._searches -= self._seen is None
            self._begin(frame, len(self.recorder.events), looked=looked)

    def _is_over(self) -> bool:
        """Return whether all optimizers that take turns have been stepped, up to the last of them."""
        events = (event for event in self.recorder.events[self._since :] if event.act in OF_STEPS)
        names = list(dict.fromkeys(event.optimizers[0] if event.optimizers else event.who for event in events))
        if not self._is_open or not names:
            return False
        for name in names if not self._last else ():
            if name in self._turns and self._turns[-1] != name:
                self._last = self._turns[-1]  # the turn of the first one again
                break
            self._turns.append(name)
        return not self._last or self._last in names

    def _begin(self, frame: FrameType, since: int, *, looked: bool = False) -> None:
        """Begin a step, unless one is open or no optimizer is known yet. looked: whether `look` was called just now."""
        if self._is_open or self.ended:
            return
        if not looked:
            self.loop.look(frame, self._end)
        if not self.loop.optimizers:
            return
        self.recorder.name_parts()
        if self._seen is None:
            self._seen = Observation(self.loop, self.recorder, self.following)
            since = 0
        self.recorder.step, self._since = self._count(), since
        self._step.enter_context(self.following.begun(self.recorder.step))
        self._is_open = True

    def _finish(self, error: BaseException | None = None) -> None:
        """End the open step. One in which no optimizer was stepped does not count."""
        if self._seen is None or not self._is_open:
            return
        self._is_open = False
        with without_modes(), torch.no_grad():
            self._step.close()
            if error is not None:
                self._seen.ended(ended_by(error, self.recorder.step))
            elif any(event.act in OF_STEPS for event in self.recorder.events[self._since :]):
                if self._loss is not None:
                    self.known.append(self.recorder.step)
                self._seen.ended(0.0 if self._loss is None else self._loss)
            self._loss = None
        self.recorder.forget_graphs()

    def _count(self) -> int:
        return len(self._seen.losses) if self._seen is not None else 0


def _lives_on(value: object) -> bool:
    """Return whether a variable may be a part of a loop; results of a graph are not kept alive."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None
    return not isinstance(value, (ModuleType, str, bytes, bool, int, float, complex, type(None)))
