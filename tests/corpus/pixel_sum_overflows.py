"""A Dice loss over 300,000 pixels sums them in float16.

Mechanism: autocast leaves the sum in half; 300,000 pixels of about 0.5 pass 65504 and inf/inf is NaN.
Source: https://github.com/qubvel-org/segmentation_models.pytorch/issues/463
Expected: overflow at `loss`, in the sum.
"""

import torch
from torch import nn

ID = "pixel_sum_overflows"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "loss", "op": "aten::sum"}


class DiceLoss(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, p, target):
        if self.wide:
            p, target = p.float(), target.float()
        return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.loss = nn.Conv2d(1, 1, 1), DiceLoss(wide)

    def forward(self, image, target):
        return self.loss(self.conv(image).sigmoid(), target)


def inputs():
    image = torch.linspace(-1, 1, 512 * 600).view(1, 1, 512, 600)
    return image.half(), (image > -0.9).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
