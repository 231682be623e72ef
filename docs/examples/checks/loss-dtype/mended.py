"""Logits are cast to float32 before the loss."""

import torch
from ampcheck import Subject
from torch import nn


def loss(logits):
    return (logits.float() - 1).square().sum() / logits.numel()


def subject():
    torch.manual_seed(0)
    return Subject((nn.Linear(8, 8), (torch.randn(64, 8),)), loss=loss)
