"""What findings quote of an exception, and which exceptions of the user's code are results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.core.errors import UsageError, as_result, brief, require_ran
from ampcheck.core.subject import Subject
from ampcheck.core.text import clean
from ampcheck.speed.paired import measure_speed


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


class NoTextError(Exception):
    def __init__(self, text: Any) -> None:
        self.text = text

    def __str__(self) -> Any:
        if isinstance(self.text, BaseException):
            raise self.text
        return self.text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("\n\n  \n---\nfirst"), "ValueError: first"),
        (ValueError("Error(s) in loading:\n\tMissing key(s)"), "ValueError: Error(s) in loading: Missing key(s)"),
        (ValueError("\x1b[31mred\x1b[0m\x07\r\nnext"), "ValueError: red\\x07"),
        (ValueError("a\ud800b"), "ValueError: a\\ud800b"),
        (ValueError("x" * 10_000_000), f"ValueError: {'x' * 500}..."),
        (ValueError(), "ValueError"),
        (SystemExit(0), "SystemExit: 0"),
        (NoTextError(3), "NoTextError: its message cannot be read: __str__ raises TypeError"),
        (NoTextError(SystemExit(0)), "NoTextError: its message cannot be read: __str__ raises SystemExit"),
    ],
)
def test_an_exception_is_quoted_in_one_line_that_says_something(error: BaseException, said: str) -> None:
    assert brief(error) == said


def test_of_an_error_in_torchscript_the_line_with_the_reason_is_quoted() -> None:
    with pytest.raises(RuntimeError) as caught:
        scripted(torch.ones(2, 3))
    assert "shapes cannot be multiplied" in brief(caught.value)


@given(st.text())
def test_no_message_breaks_the_line_or_the_terminal(text: str) -> None:
    said = brief(ValueError(text))
    assert clean(said) == said
    assert len(said.splitlines()) == 1
    assert len(said) < 600


def test_ctrl_c_while_a_message_is_read_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        brief(NoTextError(KeyboardInterrupt()))


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), BaseException(), ValueError(), MemoryError()])
def test_what_the_users_code_raises_is_a_result(error: BaseException) -> None:
    assert as_result(error) is error


@pytest.mark.parametrize("outcome", [pytest.skip, pytest.fail, pytest.xfail, pytest.exit])
def test_an_outcome_of_pytest_is_for_pytest(outcome: Any) -> None:
    try:
        outcome("said")
    except BaseException as error:  # noqa: BLE001  # an outcome is no Exception
        with pytest.raises(type(error)):
            as_result(error)


async def later() -> None: ...


def test_an_arm_that_never_ran_is_not_timed() -> None:
    with pytest.raises(UsageError, match="arm 'b' must run when it is called; it returned a coroutine"):
        measure_speed({"a": lambda: None, "b": later}, budget=0.01)


@pytest.mark.parametrize("made", [None, 0, (), [torch.ones(1)], iter([1]), range(3), functools.partial(later)])
def test_what_a_call_may_return_is_returned(made: Any) -> None:
    assert require_ran(made, "it") is made


def test_a_compiled_call_that_exits_is_a_finding() -> None:
    def exits() -> None:
        raise SystemExit(0)

    assert judge_graph(Subject(exits)).failed
