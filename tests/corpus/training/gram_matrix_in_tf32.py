"""A covariance is computed on TF32 operands: it loses the small differences of which a whitening is made.

Mechanism: operands of a float32 product hold no more than 10 bits.
Source: https://github.com/pytorch/pytorch/issues/161022
Expected: tf32.
"""

import torch

ID = "gram_matrix_in_tf32"
EXPECTED = {"check": "tf32"}
KIND = "call"


def truncated(x):
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _data():
    torch.manual_seed(0)
    return 100 + torch.randn(256, 8)


def _variance(product):
    x = _data()
    second = product(x.T.contiguous(), x) / len(x)
    return second.diagonal() - x.mean(0) ** 2


def buggy():
    return _variance(lambda a, b: truncated(a) @ truncated(b))


def fixed():
    return _variance(torch.matmul)


def manifests():
    assert (buggy() - 1).abs().max() > 1 > (fixed() - 1).abs().max()
