"""Logits go into the loss, which autocast runs in float32 on every device."""

import torch
from ampcheck import Subject
from torch import nn


def loss(output):
    return nn.functional.binary_cross_entropy_with_logits(output, torch.ones_like(output))


def subject():
    torch.manual_seed(0)
    return Subject((nn.Linear(8, 1), (torch.randn(4, 8),)), loss=loss)
