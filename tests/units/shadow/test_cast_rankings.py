"""The cast of a bias and the sum with it may hide a ranking together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ampcheck.records.faults import DECISION
from ampcheck.shadow import Fault
from ampcheck.shadow.mode import Shadow

FORMATS = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def _faults(scores: Tensor, bias: Tensor, low: torch.dtype, *, wide: bool = False) -> tuple[Fault, ...]:
    """The faults of the selection of the largest scores, corrected by a bias that is kept in float32."""
    with Shadow() as shadow:
        choice = scores + bias if wide else scores.to(low) + bias.to(low)
        choice.topk(8, -1, sorted=False)
    return shadow.faults


def _router(offset: float, spread: float) -> tuple[Tensor, Tensor]:
    """Scores of 128 tokens for 256 experts, and a bias that balances their load. spread: of the scores of an expert."""
    torch.manual_seed(0)
    load = 0.25 * torch.rand(256)
    return 0.3 + load + spread * torch.randn(128, 256), offset - load


@FORMATS
def test_the_cast_of_a_bias_and_its_sum_hide_a_ranking_together(low: torch.dtype) -> None:
    scores, bias = _router(7.06 if low is torch.bfloat16 else 56.0, 0.03)
    decisions = [fault for fault in _faults(scores, bias, low) if fault.kind == DECISION]
    assert decisions
    assert decisions[0].where.op == "aten::_to_copy"  # the first of them
    assert not _faults(scores, bias, low, wide=True)


@FORMATS
@pytest.mark.parametrize(("offset", "spread"), [(0.25, 0.03), (1.0, 0.2), (7.06, 1.0)], ids=str)
def test_a_bias_whose_cast_leaves_the_ranking_is_silent(low: torch.dtype, offset: float, spread: float) -> None:
    assert not _faults(*_router(offset, spread), low)
