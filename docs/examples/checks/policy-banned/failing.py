"""CUDA's autocast bans binary cross entropy; the CPU computes it in float32.

Run: ampcheck audit failing.py:subject --device cuda --dtype float16 --fast
"""

import torch
from ampcheck import Subject
from torch import nn


def loss(output):
    return nn.functional.binary_cross_entropy(output.sigmoid(), torch.ones_like(output))


def subject():
    torch.manual_seed(0)
    return Subject((nn.Linear(8, 1), (torch.randn(4, 8),)), loss=loss)
