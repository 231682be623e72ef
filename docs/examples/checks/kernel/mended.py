"""The last tile is summed too; its slices end with the tensors."""

import torch
from ampcheck import assert_kernel

TILE = 32


def matmul(a, b):
    total = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], TILE):
        total += a[:, start : start + TILE].float() @ b[start : start + TILE].float()
    return total.bfloat16()


def reference(a, b):
    return (a.float() @ b.float()).bfloat16()


def test_matmul():
    generator = torch.Generator().manual_seed(0)

    def inputs(n):
        return torch.randn(8, n, generator=generator).bfloat16(), torch.randn(n, 4, generator=generator).bfloat16()

    assert_kernel(matmul, reference, inputs, sizes=(32, 33, 64))
