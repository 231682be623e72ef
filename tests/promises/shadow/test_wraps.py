"""What is promised of integers that wrap around: they are reported where floating values are made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ampcheck
from ampcheck import Verdict

BYTES = torch.tensor([200, 100, 7], dtype=torch.uint8)
SIGNED = torch.tensor([[100, -100], [90, 80]], dtype=torch.int8)
WORDS = torch.tensor([32767, -5], dtype=torch.int16)
ONES = torch.ones(300, dtype=torch.uint8)


def overflows(function: Callable[[], object]) -> list[str]:
    """The messages of the failures of `overflow` while a function runs."""
    with ampcheck.watch(fail_on="never") as seen:
        kept = function()
    del kept
    return [finding.message for finding in seen.run.by("overflow") if finding.verdict is Verdict.FAIL]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: (BYTES + BYTES).float(), "1 of 3 elements of add"),
        (lambda: (BYTES - 150).float() / 255, "2 of 3 elements of sub"),
        (lambda: torch.rsub(BYTES, 150).clamp(0, 9) * 0.5, "uint8 holds 0 to 255, and int64 gives -50 to 143"),
        (lambda: (SIGNED @ SIGNED).float(), "int8 holds -128 to 127"),
        (lambda: ((WORDS + WORDS) // 2).float(), "int16 holds"),
        (lambda: ONES.sum(dtype=torch.uint8).item() / 300, "it reaches a number that leaves the run"),
        (lambda: torch.rand(300)[ONES.cumsum(0, dtype=torch.uint8).int()], "45 of 300 elements of cumsum"),
        (lambda: (BYTES * 3).long()[None].expand(2, 3) + 0.5, "1 of 3 elements of mul"),
    ],
)
def test_integers_that_wrap_fail_where_floating_values_are_made_of_them(
    function: Callable[[], object], text: str
) -> None:
    (message,) = overflows(function)
    assert text in message
    assert "wrap around" in message


@pytest.mark.parametrize(
    "function",
    [
        lambda: (BYTES.int() + BYTES).float(),
        lambda: ONES.sum().float(),
        lambda: BYTES + BYTES,  # nobody makes floating values of it
        lambda: (((BYTES & 15) ^ 8) - 8).to(torch.int8).float(),  # the sign of four bits
        lambda: (((BYTES << 4) | BYTES) >> 4).float(),  # packed
        lambda: ((BYTES * 31) ^ 5).float(),  # bits of a hash
        lambda: (BYTES + BYTES > 100).float(),
    ],
)
def test_what_holds_and_what_is_bits_passes(function: Callable[[], object]) -> None:
    assert not overflows(function)
