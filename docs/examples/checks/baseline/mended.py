"""The overflow that the baseline accepts is there: it fails nothing, and nothing is gone."""

import torch


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 300000.0


def subject():
    torch.manual_seed(0)
    return Scaled(4, 4), (torch.ones(2, 4),)
