"""An additive mask of -1e9 is -inf in float16: a failure where a row has no other key, else harmless."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck import Run, Verdict, audit


def cast(scores: Tensor, keep: Tensor) -> Tensor:
    return scores + ((1.0 - keep.float()) * -1e9).to(scores.dtype)


def multiplied(scores: Tensor, keep: Tensor) -> Tensor:
    return scores + (1 - keep.to(scores.dtype)) * -1e9


def writes_infinity() -> bool:
    """Whether PyTorch writes a number beyond float16 as infinity; 2.6 raises an error."""
    try:
        return bool(torch.full((), -1e9, dtype=torch.float16).isinf())
    except RuntimeError:
        return False


def filled(scores: Tensor, keep: Tensor) -> Tensor:
    return scores + torch.where(keep, 0.0, torch.full((), -1e9, dtype=scores.dtype)).to(scores.dtype)


class Attention(nn.Module):
    def __init__(self, masked: Any) -> None:
        super().__init__()
        self.qkv, self.masked = nn.Linear(16, 48), masked

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.masked is None:  # heads, as the fused kernel wants them
            bias = (1 - keep[:, None, None, :].to(q.dtype)) * -1e9
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=bias)
        return self.masked(q @ k.mT * 0.25, keep[:, None, :]).softmax(-1) @ v


def judged(masked: Any, visible: list[int], *, native: bool) -> Run:
    torch.manual_seed(0)
    model, x = Attention(masked), torch.randn(3, 6, 16)
    keep = torch.arange(6) < torch.tensor(visible)[:, None]
    if native:
        return audit((model.half(), (x.half(), keep)), compile=False)
    return audit((model, (x, keep)), compile=False, dtype="float16")


@pytest.mark.parametrize("native", [True, False], ids=["native", "autocast"])
@pytest.mark.parametrize("masked", [cast, multiplied, filled, None], ids=["cast", "multiplied", "filled", "sdpa"])
def test_a_row_without_a_visible_key_fails_where_the_mask_overflows(masked: Any, native: bool) -> None:
    written = masked is not filled or writes_infinity()
    failed = judged(masked, [6, 3, 0], native=native).of(Verdict.FAIL)
    check = "overflow" if written else "low-precision-error"
    assert any(f.check == check and f.where.file.endswith("test_masks.py") for f in failed)
    if not written:
        return
    absorbed = judged(masked, [6, 3, 1], native=native)
    assert not absorbed.failed
    assert not absorbed.of(Verdict.WARN)
