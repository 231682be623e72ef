"""The loss that takes logits accepts them."""

import torch


def loss(output, target):
    return torch.nn.functional.binary_cross_entropy_with_logits(output, target)


def subject():
    return loss, [(torch.full((4,), 3.0), torch.ones(4))]
