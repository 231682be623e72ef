"""The areas of a generalised IoU overflow float16.

Mechanism: a box of 400 by 300 pixels has 120,000 of them; inf / inf is NaN.
Source: https://github.com/facebookresearch/fvcore/pull/113
Expected: overflow at `iou`, in a product.
"""

import torch
from torch import nn

ID = "box_area_overflows"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "iou"}


class IoU(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, a, b):
        if self.wide:
            a, b = a.float(), b.float()
        size = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0)
        shared, first, second = (s[:, 0] * s[:, 1] for s in (size, a[:, 2:] - a[:, :2], b[:, 2:] - b[:, :2]))
        return 1 - shared / (first + second - shared)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.box, self.iou = nn.Linear(4, 4), IoU(wide)
        with torch.no_grad():
            self.box.weight.mul_(0.01)
            self.box.bias.copy_(torch.tensor([10.0, 10, 410, 310]))

    def forward(self, x, target):
        return self.iou(self.box(x), target)


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 4).half(), torch.tensor([[12.0, 8, 420, 320]] * 3).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
