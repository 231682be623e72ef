"""Triton kernels are certified and refused in Triton's interpreter, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch, triton, triton.language as tl
from ampcheck.parity import assert_kernel

@triton.jit
def softmax(x, out, n, row, BLOCK: tl.constexpr, LAST: tl.constexpr):
    place = tl.arange(0, BLOCK)
    kept = place < n - LAST
    values = tl.load(x + tl.program_id(0) * row + place, mask=kept, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    result = powers / tl.sum(powers, axis=0)
    tl.store(out + tl.program_id(0) * n + place, result.to(tl.bfloat16), mask=place < n)

def kernel(last):
    def launch(x):
        out = torch.empty(x.shape, dtype=x.dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        softmax[(x.shape[0],)](x, out, x.shape[1], x.stride(0), triton.next_power_of_2(x.shape[1]), last)
        return out
    return launch

def reference(x):
    return x.float().softmax(-1).bfloat16()

def inputs(n):
    return (torch.randn(3, n, generator=torch.Generator().manual_seed(n)).bfloat16(),)

print(assert_kernel(kernel(0), reference, inputs, sizes=(2, 16, 17)))
try:
    assert_kernel(kernel(1), reference, inputs, sizes=(2, 16, 17))
except AssertionError as error:
    print(error)
"""


def test_a_triton_kernel_is_certified_and_one_with_a_wrong_mask_is_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "[kernel] pass" in done.stdout, done.stdout + done.stderr
    assert "[kernel] fail" in done.stdout
