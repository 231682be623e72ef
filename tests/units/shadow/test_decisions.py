"""Promise: a decision is a finding where the format could tell the values apart, and data where it could not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.records.faults import DECISION, Fault
from ampcheck.shadow import Shadow

LOW = (torch.float16, torch.bfloat16)
FORMATS = pytest.mark.parametrize("low", LOW, ids=["float16", "bfloat16"])

DECISIONS: dict[str, Callable[[Tensor], object]] = {
    "argmax": lambda scores: scores.argmax(-1),
    "argmin": lambda scores: scores.argmin(-1, keepdim=True),
    "max": lambda scores: scores.max(-1),
    "topk": lambda scores: scores.topk(2, dim=-1),
    "sort": lambda scores: scores.sort(dim=-1, descending=True),
    "kthvalue": lambda scores: scores.kthvalue(2, dim=-1),
    "of columns": lambda scores: scores.argmax(0),
}


def faults_of(function: Callable[[], object]) -> list[Fault]:
    with Shadow() as shadow:
        function()
    return [fault for fault in shadow.faults if fault.reaches]


def scores_of(low: torch.dtype, seed: int = 0, experts: int = 12) -> Tensor:
    """Honest scores: a product in 16 bits of features with weights."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(64, 32, generator=generator)
    weights = torch.randn(experts, 32, generator=generator) / 6
    with torch.autocast("cpu", low):
        return F.linear(features, weights)


def offset_of(low: torch.dtype) -> float:
    """An offset beside which scores of about one lose every digit."""
    return 2.3 / torch.finfo(low).eps


@FORMATS
@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("seed", range(3))
def test_near_ties_of_honest_scores_are_silent(name: str, low: torch.dtype, seed: int) -> None:
    assert not faults_of(lambda: DECISIONS[name](scores_of(low, seed)))
    assert not faults_of(lambda: DECISIONS[name](scores_of(low, seed).softmax(-1)))


@FORMATS
@pytest.mark.parametrize("name", DECISIONS)
def test_an_offset_that_hides_the_scores_is_found(name: str, low: torch.dtype) -> None:
    (fault,) = faults_of(lambda: DECISIONS[name](scores_of(low) + offset_of(low)))
    assert fault.kind == DECISION
    assert fault.where.op == "aten::add.Tensor"
    assert fault.note  # the op that decides


def test_decisions_that_differ_are_counted_among_those_of_all_calls() -> None:
    """One line decides about 64 rows, and then about 8."""
    scores = scores_of(torch.bfloat16)
    offset = torch.tensor([offset_of(torch.bfloat16)]).bfloat16()

    def decide() -> list[Tensor]:
        return [(rows + offset * factor).argmax(-1) for rows, factor in ((scores, 1), (scores[:8], 2))]

    (failure,) = audit(decide).of(Verdict.FAIL)
    wrong, judged = map(int, re.findall(r"(\d+) of (\d+) of argmax", failure.message)[0])
    assert "it happens 2 times" in failure.message
    assert 8 < wrong <= judged == 64 + 8


@FORMATS
@pytest.mark.parametrize("name", DECISIONS)
def test_the_same_offset_in_float32_is_silent(name: str, low: torch.dtype) -> None:
    assert not faults_of(lambda: DECISIONS[name](scores_of(low).float() + offset_of(low)))


@FORMATS
def test_a_product_with_a_bias_that_hides_the_scores_is_found(low: torch.dtype) -> None:
    torch.manual_seed(0)
    router = nn.Linear(16, 8)
    nn.init.constant_(router.bias, offset_of(low))
    with torch.no_grad(), torch.autocast("cpu", low):
        (fault,) = faults_of(lambda: router(torch.randn(64, 16)).topk(2))
    assert fault.kind == DECISION


@FORMATS
@pytest.mark.parametrize("seed", range(3))
def test_descriptors_that_are_all_alike_are_data(low: torch.dtype, seed: int) -> None:
    """An untrained matcher: the errors of its layers exceed what tells the descriptors apart."""
    torch.manual_seed(seed)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)))
    common = torch.randn(64)

    def match() -> None:
        with torch.no_grad(), torch.autocast("cpu", low):
            left, right = (blocks(common + 0.003 * torch.randn(48, 64)) for _ in range(2))
            similarity = left @ right.mT / 8
            scores = similarity.log_softmax(-1) + similarity.log_softmax(-2)
            scores.max(-1), scores.max(-2), similarity.argmax(-1)

    assert not faults_of(match)


@FORMATS
def test_queries_are_selected_among_thousands_with_near_ties(low: torch.dtype) -> None:
    torch.manual_seed(0)
    head, tokens = nn.Linear(64, 20), torch.randn(2, 2000, 64)
    with torch.no_grad(), torch.autocast("cpu", low):
        assert not faults_of(lambda: head(tokens).amax(-1).topk(300, dim=1))


@FORMATS
def test_a_sort_key_that_rounds_its_second_part_away_is_found(low: torch.dtype) -> None:
    def order(wide: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        key = (torch.arange(96) % 6 * 900).to(wide) + torch.rand(96).to(low)
        return key.argsort(stable=True)

    # The sum lacks the noise that is to break ties, and the sort decides by what is left.
    assert [fault.kind for fault in faults_of(lambda: order(low))] == [DECISION]
    assert not faults_of(lambda: order(torch.float32))


@FORMATS
def test_sums_in_16_bits_over_many_steps_are_found_at_the_order_that_they_give(low: torch.dtype) -> None:
    def beams(kept: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        score, steps = torch.zeros(16, dtype=kept), -4 - torch.rand(400, 1) - torch.rand(16) / 100
        for step in steps:
            score = score + step.to(kept)
        return score.argsort(descending=True)

    assert faults_of(lambda: beams(low))
    assert not faults_of(lambda: beams(torch.float32))


@FORMATS
def test_a_table_finer_than_its_format_is_found_and_a_coarse_one_silent(low: torch.dtype) -> None:
    def draw(steps: int) -> Tensor:
        torch.manual_seed(0)
        table = torch.rand(steps).to(low).cumsum(0)
        return torch.searchsorted(table.float(), torch.rand(400) * float(table[-1]))

    assert [fault.kind for fault in faults_of(lambda: draw(20_000))] == [DECISION]
    assert not faults_of(lambda: draw(6))


@FORMATS
def test_a_mask_is_a_finding_where_values_are_far_from_the_threshold(low: torch.dtype) -> None:
    def kept(scores: Tensor) -> Tensor:
        return scores > 0.5

    assert not faults_of(lambda: kept(scores_of(low)))

    def variances() -> Tensor:
        torch.manual_seed(0)
        x = (30 + 0.1 * torch.randn(64, 32)).to(low)
        return (x.square().mean(-1) - x.mean(-1).square()) > 0.001

    assert any(fault.where.line for fault in faults_of(variances))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_few_near_ties_among_exceptions_are_none(share: float) -> None:
    def above() -> torch.Tensor:
        x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
        return (x.sigmoid() > share).float().mean()

    assert not audit(above).failed


def test_sums_that_are_one_but_for_rounding_are_no_exceptions() -> None:
    def above() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        shares = torch.randn(256, 32, generator=generator).bfloat16().softmax(-1)
        directions = F.normalize(torch.randn(256, 64, generator=generator).half(), dim=-1)
        return (shares.sum(-1) > 1).float().mean() + ((directions * directions).sum(-1) > 1).float().mean()

    assert not audit(above).failed


@FORMATS
@pytest.mark.parametrize("kept", [2, 8, 64])
def test_an_unsorted_selection_is_a_set(low: torch.dtype, kept: int) -> None:
    torch.manual_seed(0)
    scores = (3 + 0.5 * torch.randn(64, 256)).to(low)
    assert not faults_of(lambda: scores.float().to(low).topk(kept, -1, sorted=False))
    assert not faults_of(lambda: (3 + 0.5 * torch.randn(64, 256)).to(low).topk(kept, -1, sorted=False))


def _guard_of_flushed_values(low: torch.dtype) -> Tensor:
    causal = torch.full((128, 128), -torch.inf).triu(1)
    shares = (8 * scores_of(low, experts=128)[:1].float() * torch.randn(128, 1) + causal).softmax(-1).to(low)
    return torch.where(shares > 0, shares * shares.clamp(min=1e-6).log(), 0.0)


def _at_the_largest(low: torch.dtype) -> Tensor:
    shares = (40 * torch.randn(256, 8)).to(low).softmax(-1)
    return shares >= shares.amax(-1, keepdim=True)


def _activation_by_hand(low: torch.dtype) -> Tensor:
    x = scores_of(low)
    return x * (x > 0)


def _median_of_columns(low: torch.dtype) -> Tensor:
    x = 4 + torch.randn(2000, 4).to(low).float() @ torch.randn(4, 4)
    return x.to(low) > x.median(0).values.to(low)


def _outliers(low: torch.dtype) -> Tensor:
    x = torch.randn(20_000).to(low) * 2
    return x.abs() > 6


def _equal_by_construction(low: torch.dtype) -> Tensor:
    x = torch.rand(64, 64).to(low) + 1
    return torch.cat([x / x >= 1, x - x.amax(-1, keepdim=True) >= 0, x * (1 / x) >= 1, x.sqrt().square() >= x])


@FORMATS
@pytest.mark.parametrize(
    "decide",
    [
        _guard_of_flushed_values,
        _at_the_largest,
        _activation_by_hand,
        _median_of_columns,
        _outliers,
        _equal_by_construction,
    ],
)
def test_comparisons_that_turn_by_chance_or_guard_are_silent(
    decide: Callable[[torch.dtype], Tensor], low: torch.dtype
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        assert DECISION not in [fault.kind for fault in faults_of(lambda: decide(low))], seed


@FORMATS
def test_zeros_that_float64_has_as_well_and_a_few_that_vanish_are_silent(low: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64).relu()
    x[:2, :20] = 1e-9
    assert not faults_of(lambda: (x.to(low).nonzero(), x.to(low).relu().nonzero()))


RANKS: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda scores: scores.argmax(-1),
    "topk": lambda scores: scores.topk(4).indices,
    "argsort": lambda scores: scores.argsort(-1),
    "comparison": lambda scores: (scores > scores[:, :1]).sum(-1),
}


class Ranks(nn.Module):
    """A model that returns no floating tensor: ids, ranks or counts."""

    def __init__(self, ranks: Callable[[Tensor], Tensor], offset: float) -> None:
        super().__init__()
        self.ranks, self.offset = ranks, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks((x + self.offset) - self.offset)


@FORMATS
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_a_model_that_returns_integers_alone_fails_where_rounding_decides_them(
    ranks: Callable[[Tensor], Tensor], low: torch.dtype
) -> None:
    x = torch.randn(32, 200, generator=torch.Generator().manual_seed(0)).to(low)
    run = audit((Ranks(ranks, 1000.0), (x,)), compile=False)
    (found,) = [finding for finding in run.findings if finding.verdict is Verdict.FAIL]
    assert found.check == "precision-loss"
    assert found.where.line == Ranks.forward.__code__.co_firstlineno + 1
    assert not audit((Ranks(ranks, 0.0), (x,)), compile=False).failed


@FORMATS
def test_codes_of_a_quantiser_that_are_one_off_at_a_tie_are_no_lost_integers(low: torch.dtype) -> None:
    def quantise(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clamp(-127, 127).to(torch.int8)

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(low)
    assert not audit((quantise, (x,)), compile=False).failed


def test_positions_beyond_the_integers_of_the_format_are_found_where_they_are_rounded() -> None:
    def positions(x: Tensor) -> Tensor:
        return (x * 3).round().long()

    x = torch.arange(200).to(torch.bfloat16)
    assert [f.check for f in audit((positions, (x,)), compile=False).findings if f.verdict is Verdict.FAIL] == [
        "integer-cast"
    ]
