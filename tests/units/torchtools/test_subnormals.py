"""The probe says whether subnormals survive, and finds out when they do not."""

from __future__ import annotations

import pytest
import torch

from ampcheck.health import measure_subnormal_support
from ampcheck.torchtools.subnormals import flushed_here


def test_this_cpu_keeps_subnormals():
    support = measure_subnormal_support("cpu")
    for name in ("float64", "float32", "bfloat16", "float16"):
        assert (support[name].multiply, support[name].add, support[name].cast) == (True, True, True), support[name]
    assert support["float8_e5m2"].multiply is None
    assert support["float8_e5m2"].cast is True
    assert "float8_e8m0fnu" not in support  # it has none
    assert not flushed_here()


def test_the_probe_sees_them_flushed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        support = measure_subnormal_support("cpu")
        assert flushed_here()
    finally:
        torch.set_flush_denormal(False)
    assert (support["float32"].multiply, support["float32"].add, support["float32"].cast) == (False, False, False)
    assert support["bfloat16"].multiply is False
    assert support["float16"].multiply is True  # computed in float32, where its subnormals are normal values
    assert not flushed_here()


@pytest.mark.cuda
def test_a_gpu_keeps_subnormals():
    support = measure_subnormal_support("cuda")
    for name in ("float64", "float32", "bfloat16", "float16"):
        assert support[name].cast is True
