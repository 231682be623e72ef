"""One formula for both."""

from torch.nn.functional import gelu

from ampcheck import assert_property
from ampcheck.strategies import tensors


def activation(x):
    return gelu(x)


def test_activation():
    assert_property(activation, tensors("float16", shape=64, min_value=-4, max_value=-3), compile=True)
