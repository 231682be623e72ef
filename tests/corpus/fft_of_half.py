"""A Fourier layer gets a 16-bit signal.

Mechanism: the projection before it gives bfloat16, and the transform knows no such dtype.
Source: https://github.com/pytorch/pytorch/issues/70664
Expected: low-precision-error at `mix`.
"""

import pytest
import torch
from torch import nn

ID = "fft_of_half"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "mix"}


class FourierMix(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        x = x.float() if self.wide else x
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.mix = nn.Linear(8, 8), FourierMix(wide)

    def forward(self, x):
        return self.mix(self.project(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 8).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert whole(*args).isfinite().all()
    with pytest.raises(RuntimeError, match="Unsupported dtype"):
        broken(*args)
