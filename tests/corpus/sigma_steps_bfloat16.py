"""The step sizes of a flow matching sampler are differences of bfloat16 sigmas.

Mechanism: a schedule of 200 steps is built with linspace in the latent's dtype; near 1 the spacing is 0.004, and steps
of 0.005 become 0.004 or 0.008.
Source: https://github.com/Comfy-Org/ComfyUI/pull/16001
Expected: precision-loss at `schedule`.
"""

import torch
from torch import nn

ID = "sigma_steps_bfloat16"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "schedule"}


class Schedule(nn.Module):
    def __init__(self, steps, wide):
        super().__init__()
        self.steps, self.wide = steps, wide

    def forward(self, dtype):
        sigma = torch.linspace(1, 0, self.steps + 1, dtype=torch.float32 if self.wide else dtype)
        sigma = 3 * sigma / (1 + 2 * sigma)
        return (sigma[1:] - sigma[:-1]).to(dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.velocity, self.schedule = nn.Linear(4, 4), Schedule(200, wide)

    def forward(self, x):
        return self.velocity(x)[:, None] * self.schedule(x.dtype)[:, None]


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 4).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.1 * wanted.norm()
