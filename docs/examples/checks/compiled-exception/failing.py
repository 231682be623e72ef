"""Eager mode refuses a probability of 3, compiled code computes with it: the sigmoid is missing.

Run: ampcheck audit failing.py:subject
"""

import torch


def loss(output, target):
    return torch.nn.functional.binary_cross_entropy(output, target)


def subject():
    return loss, [(torch.full((4,), 3.0), torch.ones(4))]
