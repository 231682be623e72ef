"""Promise: ties of 16 bits are no finding by themselves; the order of what one op absorbed is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcheck.records.faults import DECISION
from ampcheck.shadow import Shadow

LOW = (torch.float16, torch.bfloat16)
FORMATS = pytest.mark.parametrize("low", LOW, ids=["float16", "bfloat16"])
SEEDS = range(3)


def decisions_of(function: Callable[[], object], seed: int = 0) -> list[str]:
    """The ops of which decisions are at fault."""
    torch.manual_seed(seed)
    with Shadow() as shadow:
        function()
    return [fault.where.op for fault in shadow.faults if fault.kind == DECISION and fault.reaches]


def logits_of(low: torch.dtype, rows: int, numbers: int, deviation: float, offset: float = 0.0) -> Tensor:
    """Scores of 16 bits whose inputs are exact."""
    inputs, weights = torch.randn(rows, 64).to(low), (deviation / 8 * torch.randn(numbers, 64)).to(low)
    return F.linear(inputs, weights, torch.full((numbers,), offset).to(low))


def _best_of_a_vocabulary(low: torch.dtype) -> object:
    logits = logits_of(low, 4, 32_000, 3.0)
    return logits < logits.topk(50).values[:, -1:], logits.topk(50), logits >= logits.amax(-1, keepdim=True)


def _nucleus(low: torch.dtype) -> object:
    logits = logits_of(low, 8, 8000, 2.5)
    return logits.sort(descending=True), logits.softmax(-1).sort(descending=True)


def _rank_of_a_token(low: torch.dtype) -> object:
    logits = logits_of(low, 64, 8000, 3.0)
    near_the_top = logits.float().topk(5).indices[:, -1:]
    return logits > logits[:, :1], logits > logits.gather(1, near_the_top)


def _sorting_of_random_numbers(low: torch.dtype) -> object:
    x = 1.0001 * torch.randn(20_000)
    return x.to(low).sort(), x.sigmoid().to(low).argsort(), torch.rand(20_000).mul(1.0001).to(low).argsort()


def _ties_of_the_data(low: torch.dtype) -> object:
    x = 2 * (torch.randn(64, 256) * 4).round().to(low)
    return x >= x.topk(20).values[:, -1:], x.sort(-1), x.topk(20), x > x.median(-1, keepdim=True).values


def _equal_but_for_roundings_of_float64(low: torch.dtype) -> object:
    scores = F.linear(torch.randn(100, 64).to(low), torch.randn(1, 64).to(low).expand(64, 64) * 1).softmax(-1)
    return scores.sort(-1), scores.topk(20), scores > scores[:, :1], scores >= scores.amax(-1, keepdim=True)


def _experts(low: torch.dtype) -> object:
    chosen = []
    for number, best, deviation in ((8, 2, 0.2), (8, 2, 1.0), (64, 6, 0.3), (256, 8, 1.0)):
        for gate in (logits_of(low, 512, number, deviation).softmax(-1), logits_of(low, 512, number, 1.0).sigmoid()):
            values, indices = gate.topk(best)
            chosen.append((indices, gate >= values[:, -1:], gate.argmax(-1)))
    return chosen


def _beams(low: torch.dtype) -> None:
    scores = torch.tensor([0.0, -1e9, -1e9, -1e9]).expand(4, 4)
    for _ in range(8):
        steps = logits_of(low, 16, 200, 2.0).log_softmax(-1).view(4, 4, 200)
        scores = (scores[..., None] + steps).view(4, -1).topk(8).values[:, :4].float()


def _masked_scores(low: torch.dtype) -> object:
    hidden = torch.rand(8, 128) < 0.8
    scores = logits_of(low, 8, 128, 2.0)
    filled = [scores.masked_fill(hidden, number) for number in (-torch.inf, torch.finfo(low).min, -1e4)]
    added = scores + hidden.to(low) * -100, (scores.float() - 1e4 * hidden).to(low)
    return [(x.sort(descending=True), x.topk(20), x > x.mean(-1, keepdim=True)) for x in (*filled, *added)]


def _boxes(low: torch.dtype) -> object:
    logits = torch.randn(4000) - 4.6
    logits[:60] += 7
    scores = (1.01 * logits.to(low)).sigmoid()
    corners = 100 * torch.rand(200, 2)
    inside = (30 - (corners[:, None] - corners).abs()).clamp(min=0).prod(-1).to(low)
    overlap = inside / (1800 - inside)
    return scores.sort(descending=True), scores.topk(100), scores > 0.05, overlap > 0.5, overlap > overlap.mean()


def _either_way(low: torch.dtype) -> object:
    x, y = logits_of(low, 256, 64, 1.0), logits_of(low, 256, 64, 1.0)
    return x * (x > 0), x * (x > y), (1 - x + y).clamp(min=0) * (1 - x + y > 0), torch.where(x > y, x, y)


def _about_the_middle(low: torch.dtype) -> object:
    x = logits_of(low, 64, 512, 1.0)
    gate = x.sigmoid()
    return [v > v.median(-1, keepdim=True).values for v in (x, gate)], x > x.mean(-1, keepdim=True)


def _neighbours(low: torch.dtype) -> object:
    points = torch.randn(4, 256, 3).to(low)
    far = (points[:, :, None] - points[:, None]).square().sum(-1)
    return far.topk(16, largest=False), far <= far.kthvalue(16, -1, keepdim=True).values


def _alike(low: torch.dtype) -> object:
    """Features whose own errors exceed what tells them apart."""
    layers = torch.nn.Sequential()
    for _ in range(4):
        layers.extend([torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU()])
    common = torch.randn(64)
    with torch.no_grad(), torch.autocast("cpu", low):
        left, right = (layers(common + 0.003 * torch.randn(48, 64)) for _ in range(2))
        return (left @ right.mT / 8).sort(-1), (left @ right.mT / 8).topk(16)


@FORMATS
@pytest.mark.parametrize(
    "decide",
    [
        _best_of_a_vocabulary,
        _nucleus,
        _rank_of_a_token,
        _sorting_of_random_numbers,
        _ties_of_the_data,
        _equal_but_for_roundings_of_float64,
        _experts,
        _beams,
        _masked_scores,
        _boxes,
        _either_way,
        _about_the_middle,
        _neighbours,
        _alike,
    ],
)
def test_near_ties_ties_of_the_data_and_ties_of_what_comes_last_are_silent(
    decide: Callable[[torch.dtype], object], low: torch.dtype
) -> None:
    for seed in SEEDS:
        assert not decisions_of(lambda: decide(low), seed), seed


@FORMATS
def test_ties_in_the_gradient_of_a_maximum_are_silent(low: torch.dtype) -> None:
    def backward() -> None:
        x = logits_of(low, 256, 64, 0.012 if low is torch.bfloat16 else 0.0015, 1.0).requires_grad_()
        y = logits_of(low, 256, 64, 0.012 if low is torch.bfloat16 else 0.0015, 1.0)
        torch.autograd.grad(torch.maximum(x, y).sum(), x)

    assert not decisions_of(backward)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda scores, hidden: scores + torch.where(hidden, -1e4, 0.0).to(scores),
    "subtracted": lambda scores, hidden: scores - 1e4 * hidden.to(scores),
    "by row": lambda scores, hidden: torch.where(hidden.expand(8, 64), -6e4, 0.0).to(scores) + scores,
}


def _rankings(ranked: Tensor) -> object:
    return ranked.sort(-1, descending=True), ranked.argsort(-1), ranked.topk(ranked.shape[-1])


@FORMATS
@pytest.mark.parametrize("name", MASKS)
def test_the_order_of_scores_that_a_mask_absorbs_means_nothing(name: str, low: torch.dtype) -> None:
    hidden = torch.arange(64) % 3 > 0
    assert not decisions_of(lambda: _rankings(MASKS[name](logits_of(low, 8, 64, 1.0), hidden)))


@FORMATS
def test_the_order_of_scores_that_groups_or_an_offset_absorb_is_a_finding(low: torch.dtype) -> None:
    def ranked(term: Tensor) -> object:
        return _rankings(logits_of(low, 8, 64, 1.0) + term)

    groups = torch.arange(64) % 3
    for absorbing in (-1e4 * groups, 1e4 * (groups > 0), torch.full((64,), -1e4)):
        assert decisions_of(partial(ranked, absorbing.to(low)))


@FORMATS
def test_gradients_of_a_maximum_of_values_that_differ_by_less_than_a_step_are_silent(low: torch.dtype) -> None:
    def backward(function: Callable[[Tensor, Tensor], Tensor]) -> None:
        x = logits_of(low, 64, 64, 1.0).requires_grad_()
        torch.autograd.grad(function(x, x * (1 + torch.finfo(low).eps / 8)).sum(), x)

    for function in (torch.minimum, torch.maximum):
        assert not decisions_of(partial(backward, function))
