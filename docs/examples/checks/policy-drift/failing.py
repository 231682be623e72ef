"""Somebody casts before the head, so that the model sends another dtype through autocast than the lock says.

Run: pytest failing.py
"""

import ampcheck
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x).float().softmax(-1))


def test_autocast_does_what_it_did():
    ampcheck.assert_policy((Model(), (torch.ones(4, 8),)), name="Model")
