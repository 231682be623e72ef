"""A forward recursion in probabilities underflows float16.

Mechanism: products of emission probabilities reach 1e-12 after a dozen steps, the state becomes zero and its logarithm
-inf.
Source: no single report; written from the mechanism.
Expected: flush at `chain`.
"""

import torch
from torch import nn

ID = "probability_product"
RUN = "native"
EXPECTED = {"check": "flush", "module": "chain"}


class Chain(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, emission, transition):
        if self.wide:
            emission, transition = emission.float(), transition.float()
        state = emission[:, 0]
        for step in range(1, emission.shape[1]):
            state = (state @ transition) * emission[:, step]
        return state.sum(-1).log()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.emission, self.chain = nn.Linear(4, 12), Chain(wide)
        self.transition = nn.Parameter(torch.zeros(12, 12))

    def forward(self, x):
        return self.chain(self.emission(x).softmax(-1), self.transition.softmax(-1))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 12, 4).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
