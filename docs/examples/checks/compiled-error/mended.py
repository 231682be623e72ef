"""Without the round trip both compute the same."""

import torch


def gate(x, weight):
    y = x @ weight
    return (y * torch.sigmoid(y)).sum(1)


def subject():
    torch.manual_seed(0)
    return gate, [(torch.randn(64, 64), torch.randn(64, 64))]
