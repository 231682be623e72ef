"""The Triton kernels against the oracle: in Triton's interpreter on any machine, compiled where there is a GPU.

The interpreter has to be chosen before Triton is imported, so that one test runs this file again in a process of its
own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from bits import NARROW, WIDE, every_pattern, random_bits
from test_health import LAYOUTS, assert_same

from ampcheck.health import health_of, measure_health, oracle
from ampcheck.health.plan import plan_for

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of its own, with TRITON_INTERPRET=1")
# The interpreter computes with numpy, which warns of the infinities and NaNs that are meant here.
numpy_warns = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_the_kernels_agree_with_the_oracle_in_the_interpreter():
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreter"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout


def test_without_triton_the_oracle_answers(monkeypatch):
    from ampcheck.health import measure

    monkeypatch.delitem(sys.modules, "ampcheck.health.triton_kernel", raising=False)
    monkeypatch.delattr("ampcheck.health.triton_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert measure._triton.__wrapped__() is None


def assert_kernel_agrees(tensor: torch.Tensor, histogram: bool) -> None:
    __tracebackhide__ = True
    from ampcheck.health import triton_kernel

    plan = plan_for(tensor.dtype, histogram)
    packed = triton_kernel.pack(tensor, plan)
    assert packed.device == tensor.device
    got, expected = (
        plan.unpack(vector.tolist(), "any", tensor.numel()) for vector in (packed, oracle.pack(tensor, plan))
    )
    assert_same(got, expected)


NUMELS = [0, 1, 2047, 2048, 2049, 10_001]


@interpreted
@numpy_warns
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_interpreter_at_any_length(dtype, numel):
    assert_kernel_agrees(random_bits(dtype, numel), histogram=True)
    assert_kernel_agrees(random_bits(dtype, numel)[1:], histogram=False)


@interpreted
@numpy_warns
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_interpreter_on_every_pattern(dtype):
    tensor = every_pattern(dtype)
    for chosen in (tensor, tensor[tensor.isfinite()], tensor[~tensor.isnan()], tensor[~tensor.isinf()]):
        assert_kernel_agrees(chosen, histogram=True)


@interpreted
@numpy_warns
@pytest.mark.parametrize("value", [0.0, 1e-40, 1.0, 3e38, math.inf, math.nan])
def test_interpreter_on_one_value(value):
    assert_kernel_agrees(torch.full((3000,), value), histogram=True)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_kernels_compile_for_a_gpu_that_is_not_here(dtype):
    """The interpreter takes more than the compiler does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from ampcheck.health import triton_kernel

    constants = triton_kernel.constants_of(plan_for(dtype, True))
    word, limit = (f"*i{8 * dtype.itemsize}", f"*i{max(32, 8 * dtype.itemsize)}")
    fields = (constants["INF"] >> constants["MANTISSA"]) + 1
    kernels = [
        (triton_kernel._partial, {"words": word, "limits": limit, "out": "*fp64", "numel": "i32"}, constants),
        (
            triton_kernel._histogram,
            {"words": word, "bins": "*i64", "numel": "i32"},
            {"FIELDS": fields, **{name: constants[name] for name in ("MANTISSA", "BLOCK")}},
        ),
        (
            triton_kernel._total,
            {"partial": "*fp64", "packed": "*fp64", **dict.fromkeys(("programs", "numel", "padding"), "i32")},
            {"COUNTS": constants["COUNTS"], "BLOCK": 1024},
        ),
    ]
    for kernel, signature, fixed in kernels:
        names = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
        compiled = compile(
            ASTSource(kernel, names, fixed),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 8, "enable_fp_fusion": True},
        )
        assert compiled.asm["cubin"]


@pytest.mark.cuda
@pytest.mark.parametrize("numel", [*NUMELS, 10_000_001])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_cuda_at_any_length(dtype, numel):
    assert_kernel_agrees(random_bits(dtype, numel).cuda(), histogram=True)
    assert_kernel_agrees(random_bits(dtype, numel)[1:].cuda(), histogram=False)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [*NARROW, torch.bfloat16, torch.float16], ids=str)
def test_cuda_agrees_with_the_cpu_on_every_pattern(dtype):
    tensor = every_pattern(dtype)
    assert_same(health_of(tensor.cuda(), histogram=True), health_of(tensor, histogram=True))


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_agrees_with_the_cpu_on_any_layout(layout):
    tensor = random_bits(torch.float32, 5000)
    assert_same(health_of(LAYOUTS[layout](tensor.cuda())), health_of(LAYOUTS[layout](tensor)))


@pytest.mark.cuda
def test_cuda_does_not_synchronise_before_the_reading():
    tensors = [random_bits(dtype, 5000).cuda() for dtype in WIDE]
    for tensor in tensors:  # compiles, and copies the limits of the plan
        measure_health(tensor, histogram=True).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [measure_health(tensor, histogram=True) for tensor in tensors]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for health, tensor in zip(pending, tensors, strict=True):
        assert_same(health.read(), health_of(tensor.cpu(), histogram=True))
