"""Which decisions an honest run may take otherwise: those upon rounded values near a tie, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampcheck.records.results import BEYOND, TIE, ResultError
from ampcheck.shadow import Shadow
from ampcheck.shadow.compare import compare_results, result_of
from ampcheck.shadow.freedom import Freedom

MASK = torch.ones(16)
MASK[8:] = 0
DUPLICATES = torch.tensor([3.0, 5, 3, 5, 3, 2, 2, 2, 7, 7, 7, 1, 1, 1, 1, 1])


def freedom_of(function: Callable[[Tensor], object], x: Tensor) -> Freedom:
    with Shadow(freedom=True) as shadow:
        function(x)
    assert shadow.freedom is not None
    return shadow.freedom


EXACT: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
    "a mask": (lambda m: m > 0, MASK),
    "a mask that equals its threshold": (lambda m: m >= 1, MASK),
    "a mask in 16 bits": (lambda m: m.bfloat16() > 0, MASK),
    "a gathered mask": (lambda m: m[torch.arange(0, 16, 2)] > 0, MASK),
    "positions as floats": (lambda p: p.long(), torch.arange(16.0)),
    "positions in 16 bits": (lambda p: p.half().long(), torch.arange(16.0)),
    "a stable order with duplicates": (lambda n: n.sort(stable=True), DUPLICATES),
    "the largest of duplicates": (lambda n: n.view(4, 4).max(-1), DUPLICATES),
    "buckets whose edges are met": (lambda n: torch.bucketize(n, torch.tensor([1.0, 3.0, 5.0])), DUPLICATES),
    "quotients of whole numbers": (lambda n: n // 1.0, DUPLICATES),
    "what relu cut off": (lambda x: x.relu().view(8, 2).max(-1), torch.randn(16).mul(3).round() + 0.5),
    "a constant": (lambda x: torch.full_like(x, 0.5) >= 0.5, MASK),
    "integers and floats": (lambda x: torch.arange(16) < x, torch.linspace(20, 30, 16)),
}


@pytest.mark.parametrize("name", EXACT)
def test_ties_of_values_that_were_never_rounded_do_not_turn(name: str) -> None:
    freedom = freedom_of(*EXACT[name])
    assert (freedom.near_ties, freedom.ties) == (0, 0)


NEAR: dict[str, Callable[[Tensor], object]] = {
    "a comparison": lambda x: x.sin().bfloat16() > math.sin(1.0),
    "an index": lambda x: torch.stack([x.sin(), x.sin() * 1.0001]).bfloat16().argmax(0),
    "an order": lambda x: (x.sin() * 1.01).bfloat16().argsort(),
    "an integer": lambda x: (x.sin() / math.sin(1.0)).bfloat16().long(),
    "a bucket": lambda x: torch.bucketize(x.sin().bfloat16(), torch.tensor([math.sin(1.0)]).bfloat16()),
    "a quotient": lambda x: x.sin().bfloat16() // math.sin(1.0),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_ties_of_rounded_values_turn(name: str) -> None:
    x = torch.tensor([0.3, 1.0001, 0.5, 0.999, 0.7, 0.2])
    freedom = freedom_of(NEAR[name], x)
    assert 1 <= freedom.near_ties <= freedom.decided
    assert freedom.ties >= freedom.near_ties


def test_near_ties_of_all_ops_are_counted_together() -> None:
    def function(x: Tensor) -> None:
        wide, narrow = x.sin().bfloat16(), x[:2].sin().bfloat16()
        for scores in (wide, narrow):
            _ = scores > math.sin(1.0)

    freedom = freedom_of(function, torch.tensor([1.0001, 0.3, 1.0, 0.9999, 0.1, 0.2]))
    assert (freedom.near_ties, freedom.decided, freedom.ties) == (3, 6, 4)


def test_equal_values_have_their_indices_in_any_order_and_move_nothing_else() -> None:
    freedom = freedom_of(lambda n: n.argsort(), DUPLICATES)
    assert (freedom.near_ties, freedom.ties) == (0, 11)


def chosen(x: Tensor) -> Tensor:
    """Values that are cut off where they are small: a share of them lies near the threshold."""
    y = x.bfloat16().float()
    return torch.where(y.bfloat16() > 0.5, y, -y)


def compared(change: Callable[[Tensor], Tensor]) -> ResultError:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    with Shadow(freedom=True) as shadow:
        y = chosen(x)
        result = result_of(shadow, y)
    assert shadow.freedom is not None
    assert 0.001 < shadow.freedom.share < 0.05
    key = ("output", "", 0)
    (error,) = compare_results({key: result}, {key: change(y)}, shadow.freedom)
    return error


def test_decisions_that_turn_replace_values_and_do_not_scale_them_all() -> None:
    def turned(y: Tensor) -> Tensor:
        return torch.where((y.abs() - 0.5).abs() < 0.008, -y, y)

    assert compared(turned).verdict == TIE
    for factor in (1.2, 0.8):
        scaled = compared(lambda y, factor=factor: y * factor)  # type: ignore[misc]
        assert scaled.verdict == BEYOND
        assert scaled.whole < 2 * math.sqrt(0.05)


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * (mask > 0)


def test_a_mask_excuses_no_scale() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    with Shadow(freedom=True) as shadow:
        y = Masked()(x, MASK)
        result = result_of(shadow, y)
    key = ("output", "", 0)
    for factor, at_fault in ((1.0, False), (1.3, True)):
        (error,) = compare_results({key: result}, {key: y * factor}, shadow.freedom)
        assert error.at_fault is at_fault
