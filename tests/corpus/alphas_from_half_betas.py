"""1 - beta is computed from bfloat16 betas, and the first hundred alphas are 1.

Mechanism: beta = 1e-4 is far below the spacing at 1, so the cumulative product does not move.
Source: https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/14071
Expected: precision-loss at `schedule`.
"""

import torch
from torch import nn

ID = "alphas_from_half_betas"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "schedule"}


class Schedule(nn.Module):
    def __init__(self, steps, wide):
        super().__init__()
        self.wide = wide
        self.register_buffer("betas", torch.linspace(1e-4, 4e-3, steps))

    def forward(self):
        betas = self.betas.float() if self.wide else self.betas
        return (1 - betas).cumprod(0).sqrt()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.schedule, self.net = Schedule(600, wide), nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x)[:, None] * self.schedule()[:, None].to(x.dtype)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 4).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.05 * wanted.norm()
