"""Promise: casts of the code's own that cost nothing are one line of the coverage; those that cost something fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampcheck
from ampcheck.core.run import Run, Verdict
from ampcheck.shadow import Shadow


class Casts(nn.Module):
    """Linear layers under autocast, and a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 8), nn.Linear(8, 4), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def twice(x: Tensor) -> Tensor:
    narrow = x.float().half().float()
    return (2 * narrow).to(torch.float16).float()


def squares(x: Tensor) -> Tensor:
    wide = x.float() + 300
    return (wide * wide).half().float()


def no_cast(x: Tensor) -> Tensor:
    return x.float() + 1


def audited(between: Callable[[Tensor], Tensor]) -> Run:
    torch.manual_seed(0)
    return ampcheck.audit((Casts(between), (torch.randn(4, 8),)), dtype="bfloat16", compile=False)


def coverage(run: Run) -> str:
    return next(f.message for f in run.findings if f.check == "coverage" and f.verdict is Verdict.PASS)


def test_casts_that_cost_nothing_are_listed_in_one_line() -> None:
    line = twice.__code__.co_firstlineno
    text = coverage(audited(twice))
    assert "no loss was found at 2 casts to float16 of your own: " in text
    assert [text.count(f"test_casts.py:{n}") for n in (line + 1, line + 2)] == [1, 1]


def test_casts_of_autocast_are_not_listed() -> None:
    assert "of your own" not in coverage(audited(no_cast))


def test_a_cast_that_costs_something_is_a_finding() -> None:
    run = audited(squares)
    line = squares.__code__.co_firstlineno + 2
    assert [f.where.line for f in run.of(Verdict.FAIL) if f.check == "overflow"] == [line]
    assert f"test_casts.py:{line}" not in coverage(run)


@pytest.mark.parametrize("autocast", [False, True])
def test_casts_of_a_callable_and_of_a_watched_block_are_listed(autocast: bool) -> None:
    def call() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            weight = torch.ones(4, 4)
            return (weight @ weight).float().half()

    assert "no loss was found at 1 cast to float16 of your own" in coverage(ampcheck.audit(call))
    with ampcheck.watch() as seen:
        call()
    assert "of your own" in coverage(seen.run)


_DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)


@pytest.mark.parametrize("source", _DTYPES, ids=str)
def test_a_cast_between_any_dtypes_is_judged(source: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1]).to(source)
    with Shadow() as shadow, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of an imaginary part that is dropped
        for dtype in _DTYPES:
            values.to(dtype)
    assert not shadow.unruled
