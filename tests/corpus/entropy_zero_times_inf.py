"""-p log p is NaN where float16 rounds p to zero.

Mechanism: a softmax with a gap of 30 gives 1e-13, zero in float16; 0 * log(0) is 0 * -inf.
Source: no single report; written from the mechanism.
Expected: overflow at `entropy`, of what became zero.
"""

import torch
from torch import nn

ID = "entropy_zero_times_inf"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "entropy"}


class Entropy(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable = stable

    def forward(self, logits):
        if self.stable:
            log_p = logits.log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)
        p = logits.softmax(-1)
        return -(p * p.log()).sum(-1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.entropy = nn.Linear(4, 4, bias=False), Entropy(wide)
        with torch.no_grad():
            self.router.weight.copy_(10 * torch.eye(4))

    def forward(self, x):
        return self.entropy(self.router(x))


def inputs():
    return (torch.tensor([[1.5, -1.5, 0, 1], [0.1, 0, 0, 0.2]]).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
