"""Gradients of many ranks are added in float16 before they are divided: the sum is infinite.

Mechanism: 512 addends of about 200 exceed 65504; the mean is 200.
Source: https://github.com/horovod/horovod/issues/1699
Expected: reduce-precision.
"""

import torch

ID = "sum_overflows_before_division"
EXPECTED = {"check": "reduce-precision"}
KIND = "call"


def _grads(world=512):
    torch.manual_seed(0)
    return (200 + 20 * torch.randn(world, 64)).half()


def buggy():
    total = torch.zeros(64, dtype=torch.float16)
    for grad in _grads():
        total += grad
    return (total / 512).float()


def fixed():
    total = torch.zeros(64)
    for grad in _grads():
        total += grad.float() / 512
    return total


def manifests():
    assert buggy().isinf().all()
    assert fixed().isfinite().all()
