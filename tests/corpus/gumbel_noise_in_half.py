"""Gumbel noise drawn in float16 contains infinities.

Mechanism: one uniform float16 number in 2048 is exactly zero; the guard 1e-20 is zero too, -log(0) is infinite and the
class is ruled out.
Source: https://github.com/EderSantana/gumbel/issues/4
Expected: silent-zero at `sample`, where the guard is added.
"""

import torch
from torch import nn

ID = "gumbel_noise_in_half"
RUN = "native"
EXPECTED = {"check": "silent-zero", "module": "sample"}


class Sample(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, logits):
        logits = logits.float() if self.wide else logits
        uniform = torch.rand_like(logits)
        noise = -torch.log(-torch.log(uniform + 1e-20) + 1e-20)
        return logits + noise


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.logits, self.sample = nn.Linear(4, 64), Sample(wide)

    def forward(self, x):
        return self.sample(self.logits(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(256, 4).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    draws = [broken(*args) for _ in range(5)]
    assert not all(draw.isfinite().all() for draw in draws)
    assert whole(*args).isfinite().all()
