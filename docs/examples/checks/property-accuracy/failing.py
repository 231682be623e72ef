"""The mean of squares less the square of the mean has no digit left where the mean is large.

Run: pytest failing.py
"""

from ampcheck import assert_property
from ampcheck.strategies import tensors


def variance(x):
    return x.square().mean(-1) - x.mean(-1).square()


def test_variance():
    assert_property(variance, tensors("bfloat16", min_value=-100, max_value=100), compile=False)
