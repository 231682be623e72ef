"""A later commit has moved the scale of attention to the width of the model: the scores change, and no shape does.

Run: pytest failing.py
"""

import torch

HEADS, WIDTH = 4, 64


def attention(q, k, v):
    scores = q @ k.mT * WIDTH**-0.5
    return scores.float().softmax(-1).bfloat16() @ v


def test_attention(golden):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, 16, WIDTH // HEADS, generator=generator).bfloat16() for _ in range(3))
    golden.check("attention", attention, q, k, v)
