"""Compiled code takes another formula, which is 10 % off where the activation is small.

Run: pytest failing.py
"""

import torch
from torch.nn.functional import gelu

from ampcheck import assert_property
from ampcheck.strategies import tensors


def activation(x):
    return gelu(x, approximate="tanh" if torch.compiler.is_compiling() else "none")


def test_activation():
    assert_property(activation, tensors("float16", shape=64, min_value=-4, max_value=-3), compile=True)
