"""The variance of a latent is the exponential of a wide log-variance.

Mechanism: exp(12.5) is 268,337, beyond float16.
Source: no single report; written from the mechanism.
Expected: overflow at `latent`, in exp.
"""

import torch
from torch import nn

ID = "latent_variance_overflows"
RUN = "autocast:float16"
EXPECTED = {"check": "overflow", "module": "latent", "op": "aten::exp"}


class Latent(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.moments = wide, nn.Conv2d(3, 8, 1)
        with torch.no_grad():
            self.moments.bias[4:] = 12.5

    def forward(self, x):
        mean, log_variance = self.moments(x).chunk(2, 1)
        log_variance = log_variance.float() if self.wide else log_variance
        return (mean.square() + log_variance.exp() - 1 - log_variance).mean().log()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.latent = nn.Conv2d(3, 3, 1), Latent(wide)

    def forward(self, x):
        return self.latent(self.stem(x).tanh())


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 4, 4),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.float16):
        assert not broken(*args).isfinite().all()
        assert whole(*args).isfinite().all()
