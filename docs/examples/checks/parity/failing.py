"""Two RMSNorms differ in where they add eps, by less than a rounding of bfloat16.

Run: pytest failing.py
"""

import torch
from ampcheck import assert_parity


def ours(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight).bfloat16()


def theirs(x, weight):
    x = x.float()
    return (x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * weight).bfloat16()


def test_the_port_computes_what_the_original_computes():
    torch.manual_seed(0)
    assert_parity(ours, theirs, (torch.randn(8, 256).bfloat16(), torch.randn(256)))
