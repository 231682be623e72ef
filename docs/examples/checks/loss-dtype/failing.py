"""The loss is computed and summed in bfloat16.

Run: ampcheck audit failing.py:subject --dtype bfloat16 --fast
"""

import torch
from ampcheck import Subject
from torch import nn


def loss(logits):
    return (logits - 1).square().sum() / logits.numel()


def subject():
    torch.manual_seed(0)
    return Subject((nn.Linear(8, 8), (torch.randn(64, 8),)), loss=loss)
