"""The scales of quantised weights are subnormal once they are cast to float16.

Mechanism: 2e-7 is three and a bit times the smallest subnormal, so it becomes 1.8e-7: its weights are off by a tenth.
Source: https://github.com/NVIDIA/TensorRT/issues/3101
Expected: flush at `layer`.
"""

import torch
from torch import nn

ID = "subnormal_scale"
RUN = "native"
EXPECTED = {"check": "flush", "module": "layer"}


class Dequantised(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.codes = nn.Buffer(torch.randint(-127, 127, (4, 16), dtype=torch.int8))
        self.scale = torch.linspace(1e-7, 3e-7, 4)[:, None]

    def forward(self, x):
        scale = self.scale if self.wide else self.scale.to(x.dtype)
        weight = (self.codes * scale * 1e4).to(x.dtype)
        return x @ weight.T


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Linear(8, 16), Dequantised(wide)

    def forward(self, x):
        return self.layer(self.embed(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 8).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.03 * wanted.norm()
