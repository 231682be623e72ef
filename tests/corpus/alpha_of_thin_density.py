"""1 - exp(-density * step) is zero for a thin medium in float16.

Mechanism: exp(-2e-4) rounds to 1; the medium is transparent. expm1 keeps it.
Source: no single report; written from the mechanism.
Expected: precision-loss at `render`.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "alpha_of_thin_density"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "render"}


class Render(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable = stable

    def forward(self, density, colour):
        depth = -density * 1e-3
        alpha = -depth.expm1() if self.stable else 1 - depth.exp()
        return (alpha * colour).sum(-2) / alpha.sum(-2).clamp(min=1e-3)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.density, self.colour, self.render = nn.Linear(4, 1), nn.Linear(4, 3), Render(wide)

    def forward(self, x):
        return self.render(F.softplus(self.density(x)), self.colour(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 32, 4).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.05 * wanted.norm()
