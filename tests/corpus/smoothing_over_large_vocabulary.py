"""Label smoothing spread over a vocabulary of 200,000 is subnormal in float16.

Mechanism: 0.1 / 200,000 = 5e-7 lies between the multiples 8 and 9 of 6e-8; over 200,000 classes the smoothing
changes by several per cent.
Source: no single report; written from the mechanism.
Expected: precision-loss at `loss`.
"""

import torch
from torch import nn

ID = "smoothing_over_large_vocabulary"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "loss"}


class SmoothedLoss(nn.Module):
    def __init__(self, smoothing, wide):
        super().__init__()
        self.smoothing, self.wide = smoothing, wide

    def forward(self, logits, target):
        log_p = logits.float().log_softmax(-1)
        dtype = torch.float32 if self.wide else logits.dtype
        truth = torch.full(logits.shape, self.smoothing / logits.shape[-1], dtype=dtype)
        truth.scatter_(1, target[:, None], 1 - self.smoothing)
        return -(truth.float() * log_p).sum(-1).mean()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.loss = nn.Linear(4, 200_000, bias=False), SmoothedLoss(0.1, wide)
        nn.init.zeros_(self.head.weight)

    def forward(self, x, target):
        return self.loss(self.head(x), target)


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 4).half(), torch.tensor([3, 70000])


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    with torch.no_grad():
        assert abs(buggy()[0](*args) / fixed()[0](*args) - 1) > 0.003
