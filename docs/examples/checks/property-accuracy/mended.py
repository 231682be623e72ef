"""Centre first, square afterwards, in float32."""

from ampcheck import assert_property
from ampcheck.strategies import tensors


def variance(x):
    wide = x.float()
    return (wide - wide.mean(-1, keepdim=True)).square().mean(-1)


def test_variance():
    assert_property(variance, tensors("bfloat16", min_value=-100, max_value=100), compile=False)
