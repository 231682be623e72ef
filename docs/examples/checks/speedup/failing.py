"""The variant that should be twice as fast does the same work.

Run: pytest failing.py
"""

import torch

X = torch.randn(400, 400)


def reference():
    for _ in range(10):
        X @ X


def variant():
    for _ in range(10):
        X @ X


def test_variant_is_twice_as_fast(speed):
    speed({"reference": reference, "variant": variant}, at_least=2.0)
