"""Promise: one dispatch mode is in the path of an op, and its subscribers see ops as nested modes would."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ampcheck.stream import ops
from ampcheck.stream.ops import OpEvent, OpSubscriber, subscribed_here, subscribers_here

SEEN = list[tuple[str, str]]


class Named(OpSubscriber):
    """Notes what it sees before an op and after it."""

    def __init__(self, name: str, seen: SEEN) -> None:
        self.name, self.seen = name, seen

    def see(self, event: OpEvent) -> Any:
        self.seen.append((self.name, str(event.op) if event.higher else event.name))
        try:
            out = event.run()
        except RuntimeError:
            self.seen.append((self.name, "raised"))
            raise
        self.seen.append((self.name, "returned"))
        return out


class Unwrapping(Named):
    """Leaves ops on subclasses to them."""

    def see(self, event: OpEvent) -> Any:
        return NotImplemented if event.wrapped else super().see(event)


class Doubled(OpSubscriber):
    """Changes results, by an op of its own."""

    def see(self, event: OpEvent) -> Any:
        return event.run() * 2


class Wrapped(torch.Tensor):
    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)  # type: ignore[attr-defined]
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*[arg.inside if isinstance(arg, Wrapped) else arg for arg in args]).neg())


def around(*names: str, op: str = "exp") -> SEEN:
    return [(name, op) for name in names] + [(name, "returned") for name in reversed(names)]


def test_who_subscribed_last_sees_an_op_first_and_there_is_one_mode() -> None:
    seen: SEEN = []
    x = torch.ones(2)
    with Named("outer", seen), Named("inner", seen):
        assert len(_get_current_dispatch_mode_stack()) == 1
        x.exp()
    x.exp()
    assert seen == around("inner", "outer")
    assert not _get_current_dispatch_mode_stack()


def test_subscribers_may_leave_in_any_order() -> None:
    seen: SEEN = []
    first, second, third = (Named(name, seen) for name in ("first", "second", "third"))
    x = torch.ones(2)
    for subscriber in (first, second, third):
        subscriber.__enter__()
    second.__exit__(None, None, None)
    x.exp()
    first.__exit__(None, None, None)
    x.exp()
    third.__exit__(None, None, None)
    assert seen == around("third", "first") + around("third")
    assert not _get_current_dispatch_mode_stack()


def test_a_mode_of_the_user_keeps_its_place_among_them() -> None:
    seen: SEEN = []

    class Users(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(("user", "exp"))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Named("outer", seen), Users(), Named("inner", seen):
        x.exp()
    assert seen[:3] == [("inner", "exp"), ("user", "exp"), ("outer", "exp")]


def test_results_may_be_changed_and_own_ops_are_seen_by_nobody() -> None:
    seen: SEEN = []
    x = torch.ones(2)
    with Named("outer", seen), Doubled(), Named("inner", seen):
        y = x.neg()
    assert y.tolist() == [-2.0, -2.0]
    assert seen == around("inner", "outer", op="neg")


def test_an_exception_passes_all_of_them() -> None:
    seen: SEEN = []
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    with Named("outer", seen), Named("inner", seen):
        with pytest.raises(RuntimeError):
            torch.mm(x, y)
        y.exp()
    raised = [("inner", "mm"), ("outer", "mm"), ("outer", "raised"), ("inner", "raised")]
    assert seen == raised + around("inner", "outer")


def test_a_subclass_takes_its_op_apart_for_those_who_leave_it_to_it() -> None:
    seen: SEEN = []
    x = Wrapped(torch.ones(2))
    with Unwrapping("parts", seen), Named("whole", seen):
        y = x.exp()
    inner = around("parts") + around("parts", op="neg")
    assert seen == [("whole", "exp"), *inner, ("whole", "returned")]
    assert y.inside.tolist() == pytest.approx([-torch.e] * 2)


def test_what_runs_again_inside_is_seen_by_those_who_subscribed_before() -> None:
    seen: SEEN = []

    class Composed(OpSubscriber):
        def see(self, event: OpEvent) -> Any:
            if event.name != "exp":
                return event.run()
            with event.again():
                return event.args[0].neg()

    x = torch.ones(2)
    with Named("outer", seen), Composed(), Named("inner", seen):
        x.exp()
    assert seen == [("inner", "exp"), *around("outer", op="neg"), ("inner", "returned")]


def test_each_thread_has_its_own_subscribers() -> None:
    seen: SEEN = []
    x = torch.ones(2)

    def work() -> None:
        x.exp()
        with subscribed_here(Named("first", seen)), subscribed_here(Named("second", seen)):
            x.exp()
            assert len(subscribers_here()) == 2
        x.exp()

    with Named("main", seen):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == around("second", "first")


def test_an_event_has_flat_tensors_and_the_line() -> None:
    events: list[OpEvent] = []

    class Keeping(OpSubscriber):
        def see(self, event: OpEvent) -> Any:
            event.line()
            events.append(event)
            return event.run()

    x, y = torch.ones(2), torch.zeros(2)
    with Keeping():
        torch.cat([x, y])
        x.add_(y, alpha=3)
    cat, add = events
    assert [t is s for t, s in zip(cat.tensors, (x, y), strict=True)] == [True, True]
    assert (add.name, add.argument("alpha"), add.weights) == ("add_", 3, (1, 3))
    assert add.written_values()[0] is x
    assert cat.line()[0].endswith("test_ops.py")


def test_only_one_class_of_the_package_is_a_dispatch_mode() -> None:
    package = Path(ops.__file__).parents[1]
    kind = re.compile(r"class (\w+)\((?:\w+\.)*(?:Torch)?DispatchMode\)")
    found = {m[1] for path in package.rglob("*.py") for m in kind.finditer(path.read_text("utf-8"))}
    assert found == {"DispatchMode", "_Ops"}
