"""The model is as it was locked; a change that is meant is written by pytest --ampcheck-update."""

import ampcheck
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def test_autocast_does_what_it_did():
    ampcheck.assert_policy((Model(), (torch.ones(4, 8),)), name="Model")
