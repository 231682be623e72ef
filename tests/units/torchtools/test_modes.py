"""Dispatch modes of ampcheck import no compiler, and no compiler compiles them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._higher_order_ops.cond import cond_op
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.torchtools.modes import DispatchMode


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Unprotected(TorchDispatchMode):
    """A mode without the wrapper of PyTorch, and without that of ampcheck or its note on the code."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    is_infra_mode = ignore_compile_internals  # its name before 2.9

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Protected(DispatchMode):
    """The same mode as ampcheck writes it."""

    ignore_compile_internals = Unprotected.ignore_compile_internals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compiled_functions(mode: TorchDispatchMode, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that Dynamo compiles of a compiled function that enters the mode."""
    from torch._dynamo import convert_frame

    names, convert = list[str](), convert_frame.ConvertFrameAssert.__call__

    def note(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(frame.f_code.co_name)
        return convert(self, frame, *args, **kwargs)

    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", note)

    def enters(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        with mode:
            torch._dynamo.graph_break()
            return double(x) + 0  # the sum runs in eager mode, while Dynamo waits for functions

    torch._dynamo.reset()
    try:
        result = torch.compile(enters, backend="eager")(torch.ones(2))
    finally:
        torch._dynamo.reset()
    assert result.tolist() == [2, 2]
    return names


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dynamo_compiles_what_runs_inside_a_mode_and_not_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    names = compiled_functions(Protected(), monkeypatch)
    assert "double" in names
    assert "__torch_dispatch__" not in names


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mode_without_protection_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    assert "__torch_dispatch__" in compiled_functions(Unprotected(), monkeypatch)


def test_a_mode_sees_higher_order_ops() -> None:
    class Names(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names, dispatch = list[str](), HigherOrderOperator.dispatch
    predicate, x = torch.tensor(True), torch.zeros(2)
    with Names():
        sine = cond_op(predicate, torch.sin, torch.cos, (x,))
    assert names == ["cond"]
    assert sine.tolist() == [0, 0]
    assert HigherOrderOperator.dispatch is dispatch


def test_modes_of_two_threads_that_end_in_the_order_in_which_they_began_leave_compilation_on() -> None:
    first_ended, second_began = threading.Event(), threading.Event()

    class Plain(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def second() -> None:
        with Plain():
            second_began.set()
            assert first_ended.wait(60)

    thread = threading.Thread(target=second)
    with Plain():
        thread.start()
        assert second_began.wait(60)
    first_ended.set()
    thread.join()
    graphs: list[Any] = []
    compiled = torch.compile(lambda x: x.sin() + 1, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    compiled(torch.ones(2))
    assert len(graphs) == 1
