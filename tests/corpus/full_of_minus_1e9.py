"""torch.full makes a mask of -1e9 in the dtype of the scores.

Mechanism: the constant has no float16 form and the constructor raises; bfloat16 and float32 hide it.
Source: https://github.com/SegmentationBLWX/sssegmentation/pull/83
Expected: low-precision-error at `mask`.
"""

import pytest
import torch
from torch import nn

ID = "full_of_minus_1e9"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "mask"}


class Mask(nn.Module):
    def __init__(self, from_finfo):
        super().__init__()
        self.from_finfo = from_finfo

    def forward(self, scores):
        lowest = torch.finfo(scores.dtype).min if self.from_finfo else -1e9
        return scores + torch.full(scores.shape[-2:], lowest, dtype=scores.dtype).triu(1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.mask = nn.Linear(8, 8), Mask(wide)

    def forward(self, x):
        return self.mask(self.query(x) @ x.mT).softmax(-1) @ x


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 5, 8).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert whole(*args).isfinite().all()
    with pytest.raises(RuntimeError, match="without overflow"):
        broken(*args)
