from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.training.tf32.settings import (
    ConfounderStats,
    ProductError,
    allowed_error,
    check_tf32,
    confounders_table,
    measure_confounders,
)

LIMITS = Limits()


def test_float32_on_the_cpu_is_float32_and_nothing_is_changed_by_measuring() -> None:
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    stats = measure_confounders("cpu")
    (finding,) = check_tf32(stats, LIMITS)
    assert finding.verdict is Verdict.PASS
    assert {one.name for one in stats.products} == {"matmul", "convolution", "gradient of a linear layer"}
    assert all(0.1 < one.error < allowed_error(one.terms, LIMITS) for one in stats.products)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled() is grad


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_measurement_does_not_depend_on_the_modes_around_it(outer: Callable[[], Any]) -> None:
    with outer():
        inside = measure_confounders("cpu").products
    assert inside == measure_confounders("cpu").products


@pytest.mark.parametrize("bits", [13, 16])
def test_products_whose_operands_are_rounded_are_beyond_what_float32_explains(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.Tensor.__matmul__

    def cut(x: torch.Tensor, bits: int) -> torch.Tensor:
        integers = x.contiguous().view(torch.int32)
        return ((integers + (1 << (bits - 1))) & ~((1 << bits) - 1)).view(torch.float32)

    def low(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return real(cut(a, bits), cut(b, bits)) if a.dtype is torch.float32 else real(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", low)
    (finding,) = check_tf32(measure_confounders("cpu"), LIMITS)
    assert finding.verdict is Verdict.WARN
    assert ("TF32" if bits == 13 else "bfloat16") in finding.message
    assert finding.hint


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("matmul_precision")
def test_flags_that_wait_for_a_gpu_are_told_on_a_machine_without_one() -> None:
    torch.set_float32_matmul_precision("high")
    stats = measure_confounders("cpu")
    assert stats.flags["float32_matmul_precision"] == "high"
    if all(one.error < allowed_error(one.terms, LIMITS) for one in stats.products):
        assert "a matmul and a convolution in float32 would run in TF32" in check_tf32(stats, LIMITS)[0].message


@pytest.mark.slow
def test_both_interfaces_of_the_flags_are_read_whichever_the_program_uses(
    pytester_free_python: Callable[[str], str],
) -> None:
    told = pytester_free_python(
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'; torch.backends.cuda.matmul.fp32_precision = 'tf32'"
    )
    assert "'set through fp32_precision'" in told
    assert "'backends.cudnn.conv.fp32_precision': 'ieee'" in told


@pytest.fixture
def pytester_free_python() -> Callable[[str], str]:
    """Flags of the new interface cannot be unset: another process sets them."""
    import subprocess
    import sys

    if not hasattr(torch.backends.cudnn, "fp32_precision"):
        pytest.skip("this PyTorch has the old interface only")

    def run(statement: str) -> str:
        code = (
            f"import torch; {statement}\n"
            "from ampcheck.training.tf32.settings import measure_confounders\nprint(measure_confounders().flags)"
        )
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
        return done.stdout

    return run


def test_a_thread_that_flushes_subnormals_says_so() -> None:
    assert measure_confounders().flushes is False
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert measure_confounders().flushes is True
    finally:
        torch.set_flush_denormal(False)


def test_a_device_that_cannot_be_measured_is_skipped_with_the_reason() -> None:
    stats = ConfounderStats("s", "cpu", {}, (), unmeasured="no such kernel")
    (finding,) = check_tf32(stats, LIMITS)
    assert finding.verdict is Verdict.SKIP
    assert "no such kernel" in finding.message


@given(st.floats(1e-3, 1e7), st.integers(1, 10_000))
def test_a_product_passes_up_to_what_its_roundings_explain_and_not_beyond(error: float, terms: int) -> None:
    stats = ConfounderStats("s", "cuda:0", {}, (ProductError("matmul", terms, error),))
    (finding,) = check_tf32(stats, LIMITS)
    assert finding.verdict is (Verdict.PASS if error <= 2 * LIMITS.precision * terms**0.5 else Verdict.WARN)


def test_the_table_holds_every_flag_and_every_error() -> None:
    stats = measure_confounders()
    rows = dict(confounders_table(stats).rows)  # type: ignore[arg-type]
    assert set(stats.flags) < set(rows)
