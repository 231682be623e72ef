"""Log probabilities of a distribution that is given by probabilities in bfloat16.

Mechanism: the distribution clamps probabilities to finfo(dtype).eps; in bfloat16 that is 0.0078, and nothing is rarer.
Source: https://github.com/pytorch/pytorch/blob/main/torch/distributions/utils.py
Expected: precision-loss at `policy`, in the clamp.
"""

import torch
from torch import nn

ID = "probabilities_clamped_by_eps"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "policy", "op": "aten::clamp"}


class Policy(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.head = wide, nn.Linear(16, 200)
        nn.init.normal_(self.head.weight)

    def forward(self, hidden, action):
        scores = self.head(hidden)
        p = (scores.float() if self.wide else scores).softmax(-1)
        return torch.distributions.Categorical(probs=p, validate_args=False).log_prob(action)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.policy = nn.Linear(16, 16), Policy(wide)

    def forward(self, x, action):
        return self.policy(self.encode(x).tanh(), action)


def inputs():
    torch.manual_seed(1)
    return torch.randn(8, 16).bfloat16(), torch.arange(8)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert (broken(*args) > -5).all()
    assert (whole(*args) < -7).any()
