"""It does a tenth of the work."""

import torch

X = torch.randn(64, 64)


def reference():
    for _ in range(10):
        X @ X


def variant():
    for _ in range(1):
        X @ X


def test_variant_is_twice_as_fast(speed):
    speed({"reference": reference, "variant": variant}, at_least=2.0)
