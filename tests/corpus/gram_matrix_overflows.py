"""A Gram matrix over all pixels overflows float16 before it is divided by their number.

Mechanism: features of about 8 over 4096 pixels sum to 262,144 products; the division comes after.
Source: https://github.com/NVIDIA/apex/issues/402
Expected: overflow at `style.gram`.
"""

import torch
from torch import nn

ID = "gram_matrix_overflows"
RUN = "autocast:float16"
EXPECTED = {"check": "overflow", "module": "style.gram", "op": "aten::bmm"}


class Gram(nn.Module):
    def __init__(self, divide_first):
        super().__init__()
        self.divide_first = divide_first

    def forward(self, x):
        x = x.flatten(2)
        if self.divide_first:
            x = x / x.shape[-1] ** 0.5
            return x @ x.mT
        return x @ x.mT / x.shape[-1]


class Style(nn.Module):
    def __init__(self, divide_first):
        super().__init__()
        self.features, self.gram = nn.Conv2d(3, 6, 3, padding=1), Gram(divide_first)

    def forward(self, image):
        return self.gram(self.features(image).relu())


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.style = Style(wide)
        nn.init.uniform_(self.style.features.weight, 0.3, 0.5)

    def forward(self, image):
        return self.style(image)


def inputs():
    torch.manual_seed(1)
    return (torch.rand(1, 3, 64, 64) * 2,)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.float16):
        assert not broken(*args).isfinite().all()
        assert whole(*args).isfinite().all()
