"""Samples of images: which pixels they lie between is a decision of the run, and its derivative jumps at each pixel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck import Verdict, audit


class Sampler(nn.Module):
    """Samples an image, or a volume, at coordinates that a layer makes. offset: digits of them that are lost."""

    def __init__(self, axes: int, offset: float = 0.0, **how: Any) -> None:
        super().__init__()
        self.axes, self.offset, self.how = axes, offset, how
        self.place = nn.Linear(8, axes)

    def forward(self, image: Tensor, x: Tensor) -> Tensor:
        places = torch.tanh(self.place(x))
        if self.offset:
            places = (places + self.offset) - self.offset
        grid = places.view(1, -1, *[1] * (self.axes - 1), self.axes)
        return F.grid_sample(image, grid, **self.how)


def failures(seed: int, dtype: torch.dtype, sizes: tuple[int, ...], offset: float = 0.0, **how: Any) -> list[str]:
    torch.manual_seed(seed)
    model = Sampler(len(sizes), offset, **how).to(dtype)
    image, x = torch.randn(1, 4, *sizes).to(dtype), torch.randn(1, 16, 8).to(dtype)
    return [f"{f.check} {f.where.op}" for f in audit((model, (image, x)), compile=False).of(Verdict.FAIL)]


@pytest.mark.parametrize(
    ("seed", "dtype", "how"),
    [
        (0, torch.bfloat16, {"align_corners": True}),
        (2, torch.float16, {"align_corners": True}),
        (2, torch.bfloat16, {"align_corners": True}),
        (1, torch.float16, {"align_corners": False, "padding_mode": "border"}),
        (1, torch.bfloat16, {"align_corners": False, "padding_mode": "reflection"}),
    ],
)
def test_a_sample_that_rounding_moves_across_a_pixel_is_no_error(seed, dtype, how):
    assert failures(seed, dtype, (8, 8, 8), **how) == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_nearest_pixel_near_a_tie_is_that_of_the_run(seed, dtype):
    assert failures(seed, dtype, (32, 32), mode="nearest", align_corners=True) == []


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_coordinates_that_lost_their_digits_are_found(mode):
    assert "precision-loss aten::sub.Tensor" in failures(
        0, torch.float16, (16, 16), 3000.0, mode=mode, align_corners=True
    )
