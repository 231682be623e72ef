"""A Charbonnier loss with eps=1e-6 has an infinite gradient where prediction and target agree.

Mechanism: eps^2 = 1e-12 is zero in float16; sqrt(0) is fine forward and 1/0 backward.
Source: https://github.com/JingyunLiang/SwinIR/issues/22
Expected: silent-zero at `loss`, where eps^2 is added.
"""

import torch
from torch import nn

ID = "charbonnier_root_of_zero"
RUN = "native"
EXPECTED = {"check": "silent-zero", "module": "loss", "op": "aten::add.Tensor"}


class Charbonnier(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x, target):
        difference = (x - target).float() if self.wide else x - target
        return (difference.square() + 1e-6**2).sqrt().mean()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.loss = nn.Linear(4, 4), Charbonnier(wide)
        with torch.no_grad():
            self.scale.weight.copy_(torch.eye(4))
            self.scale.bias.zero_()

    def forward(self, x, target):
        return self.loss(self.scale(x), target)


def inputs():
    torch.manual_seed(1)
    x = torch.randn(6, 4).half()
    target = x.clone()
    target[3:] += 0.5
    return x, target


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    broken, args = buggy()
    loss = broken(*args)
    loss.backward()
    assert loss.isfinite()
    assert not broken.scale.weight.grad.isfinite().all()
    whole = fixed()[0]
    whole(*args).backward()
    assert whole.scale.weight.grad.isfinite().all()
