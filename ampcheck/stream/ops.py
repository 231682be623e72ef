"""The ops of the run. One dispatch mode is in their path; who wants to see them subscribes to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from ampcheck.ops.traits import Traits, traits
from ampcheck.torchtools.modes import DispatchMode, in_this_thread
from ampcheck.torchtools.private import NO_DISPATCH, FakeTensor, OpOverload, current_mode, mode_stack
from ampcheck.torchtools.source import Line, users_line


class OpCall:
    """An op with its arguments, and its results once it ran.

    name: short for an ATen op (`topk`), else with its namespace.
    """

    __slots__ = ("args", "kwargs", "name", "op", "out", "traits")

    def __init__(self, op: OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.traits, self.args, self.kwargs = op, traits, args, kwargs
        self.name: str = traits.name
        self.out: Any = None

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        if name in self.kwargs:
            return self.kwargs[name]
        position, value = _place_of(self.op, name)
        if -1 < position < len(self.args):
            return self.args[position]
        return default if value is _NONE else value

    @property
    def weights(self) -> tuple[float, ...]:
        """The factors of the two terms of a sum or a difference; empty for other ops."""
        if len(self.traits.linear) < 2:
            return ()
        alpha = self.argument("alpha", 1)
        known = {"1": 1, "alpha": alpha, "-alpha": -alpha}
        factors = [known[factor] for factor in self.traits.linear if factor in known]
        return tuple(factors) if len(factors) == 2 else ()

    def written_values(self) -> list[Any]:
        """The arguments that the op writes: tensors, lists of them, or None."""
        args, kwargs = self.args, self.kwargs
        return [args[at] if at < len(args) else kwargs.get(name) for at, name in self.traits.writes]


class OpEvent(OpCall):
    """An op that runs, on its way through the subscribers. Of a higher-order op it has no name and no traits.

    tensors: those among the arguments, lists flattened. fake: whether any of them has no values. wrapped: whether any
    is of a subclass that takes ops apart, and runs others on what is inside.
    """

    __slots__ = ("_left", "_line", "_subscribers", "fake", "higher", "tensors", "wrapped")

    def __init__(
        self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], subscribers: tuple[OpSubscriber, ...]
    ) -> None:
        self.op, self.args, self.kwargs, self.out = op, args, kwargs, None
        self.higher = not isinstance(op, OpOverload)
        if not self.higher:
            self.traits = traits(op)
            self.name = self.traits.name
        self.tensors: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, (list, tuple)):
                self.tensors += leaves(value)
        self.fake = self.wrapped = False
        for kind in types:
            self.fake = self.fake or issubclass(kind, FakeTensor)
            self.wrapped = self.wrapped or kind.__torch_dispatch__ is not NO_DISPATCH
        self._subscribers, self._left = subscribers, len(subscribers) - 1
        self._line: Line | None = None

    def line(self) -> Line:
        """The user's line that runs the op."""
        if self._line is None:
            self._line = users_line(sys._getframe())
        return self._line

    def run(self) -> Any:
        """Hand the op on: to those that subscribed before, and at last to PyTorch."""
        self._left -= 1
        try:
            if self._left < 0:
                out = self.op(*self.args, **self.kwargs)
            else:
                out = self._subscribers[self._left].see(self)
                if out is NotImplemented:
                    with self.again():  # a subscriber further in wants the result of the subclass
                        out = self.op(*self.args, **self.kwargs)
        finally:
            self._left += 1
        self.out = out
        return out

    def again(self) -> AbstractContextManager[None]:
        """Let the subscriber that sees the op, and those that subscribed before it, see what runs inside as well."""
        return in_this_thread(_mode_of(*self._subscribers[: self._left + 1]))


class OpSubscriber:
    """Sees every op of the thread that enters it, below autograd and autocast, until it leaves.

    Who subscribed last sees an op first; each hands it on by `event.run()`, and may change, replace or take apart what
    that does. Ops that a subscriber runs itself are none of the run's, and nobody sees them. One that returns
    `NotImplemented` leaves the op to the subclass among its arguments, whose inner ops come one by one; who subscribed
    later and handed the op on gets the result of the whole, and sees none of the inner ops.

    compiles: Dynamo compiles as usual while only such subscribers are there; else compiled functions run in eager mode.
    """

    compiles = False
    _mode: _Ops | None = None
    _open: ExitStack

    def around(self) -> Iterator[AbstractContextManager[Any]]:
        """Contexts that are entered before it subscribes and left after it; not those of `subscribed_here`."""
        return iter(())

    def see(self, event: OpEvent) -> Any:
        """Return the result of an op, which may be of a higher order."""
        return event.run()

    def __enter__(self) -> Any:
        with ExitStack() as opening:
            for context in self.around():
                opening.enter_context(context)
            self._mode = _joined(self)
            if self._mode is None:
                self._mode = _mode_of(self)
                self._mode.__enter__()
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._open:
            if self._mode is not None and self._mode.drop(self):
                self._mode.__exit__(*exc)
            self._mode = None


class _Ops(DispatchMode):
    """The dispatch mode in the path of the ops of a run. subscribers: in the order in which they subscribed."""

    compiles = False

    def __init__(self, subscribers: tuple[OpSubscriber, ...]) -> None:
        super().__init__()
        self.subscribers = subscribers

    def drop(self, subscriber: OpSubscriber) -> bool:
        """Remove the last entry of a subscriber; whether nobody is left."""
        number = len(self.subscribers) - 1 - self.subscribers[::-1].index(subscriber)
        self.subscribers = self.subscribers[:number] + self.subscribers[number + 1 :]
        return not self.subscribers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.subscribers:  # another mode left in its place
            return func(*args, **(kwargs or {}))
        return self.subscribers[-1].see(OpEvent(func, types or (), args, kwargs or {}, self.subscribers))


class _CompilingOps(_Ops):
    """The same, under which Dynamo compiles as usual."""

    compiles = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """It does."""
        return True


def _mode_of(*subscribers: OpSubscriber) -> _Ops:
    return (_CompilingOps if all(s.compiles for s in subscribers) else _Ops)(subscribers)


def _joined(subscriber: OpSubscriber) -> _Ops | None:
    """The innermost mode, if it is ours and a subscriber could join it."""
    mode = current_mode()
    if not isinstance(mode, _Ops) or (mode.compiles and not subscriber.compiles):
        return None
    mode.subscribers = (*mode.subscribers, subscriber)
    return mode


@contextmanager
def subscribed_here(subscriber: OpSubscriber) -> Iterator[None]:
    """Subscribe in a thread that may outlive the block that started it, see `in_this_thread`."""
    if (mode := _joined(subscriber)) is None:
        with in_this_thread(_mode_of(subscriber)):
            yield
        return
    try:
        yield
    finally:
        mode.drop(subscriber)


def subscribers_here() -> list[OpSubscriber]:
    """Return who sees the ops of this thread."""
    return [each for mode in mode_stack() if isinstance(mode, _Ops) for each in mode.subscribers]


def leaves(value: object) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an op, which nest lists and tuples only."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: list[torch.Tensor] = []
    for item in value if isinstance(value, (list, tuple)) else ():
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, (list, tuple)):
            tensors += leaves(item)
    return tensors


_NONE = object()


@cache
def _place_of(op: OpOverload, name: str) -> tuple[int, Any]:
    """The position of an argument in the schema, -1 without it, and its default."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            return position, argument.default_value if argument.has_default_value() else _NONE
    return -1, _NONE
