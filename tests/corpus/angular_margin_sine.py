"""An angular margin takes sqrt(1 - cos^2) of a cosine that float16 rounds to 1.

Mechanism: for a well trained class cos is 0.9998; the sine comes out 0 or far off, and its gradient is infinite.
Source: no single report; written from the mechanism.
Expected: precision-loss at `margin`.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "angular_margin_sine"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "margin"}


class Margin(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.centre = wide, nn.Parameter(torch.tensor([[0.6, 0.8], [0.8, 0.6], [-1, 0.1]]))

    def forward(self, x):
        centre = self.centre
        if self.wide:
            x, centre = x.float(), centre.float()
        cosine = F.normalize(x, eps=1e-4) @ F.normalize(centre, eps=1e-4).T
        sine = (1 - cosine.square()).clamp(min=0).sqrt()
        return sine / (1e-2 + sine.amax(0))


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.margin = Margin(wide)

    def forward(self, x):
        return self.margin(x)[:, :1]


def inputs():
    angle = torch.tensor([0.9273 + 0.012, 0.9273 - 0.02, 0.9273 + 0.006])
    return (torch.stack((angle.cos(), angle.sin()), -1).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.2 * wanted.norm()
