from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.checks.training.tf32 import check as check_operands
from ampcheck.checks.training.tf32 import check as check_tf32
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.tf32 import ConfounderStats, ProductError, allowed_error
from ampcheck.training.tf32.operands import measure_operands
from ampcheck.training.tf32.settings import confounders_table, measure_confounders

LIMITS = Limits()


def cut(x: torch.Tensor, bits: int) -> torch.Tensor:
    integers = x.contiguous().view(torch.int32)
    return ((integers + (1 << (bits - 1))) & ~((1 << bits) - 1)).view(torch.float32)


def verdict_of(function: Callable[[], Any]) -> Verdict:
    return check_operands(measure_operands(function), LIMITS)[0].verdict


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(*shape), torch.randn(*shape)


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


@pytest.mark.parametrize("bits", [13, 14, 16])
def test_a_matmul_of_operands_that_lost_bits_is_found_with_its_place(bits: int) -> None:
    a, b = pair(16, 16)
    stats = measure_operands(lambda: cut(a, bits) @ cut(b, bits))
    (finding,) = check_operands(stats, LIMITS)
    assert finding.verdict is Verdict.FAIL
    assert finding.where.op == "aten::mm"
    assert finding.where.file.endswith("test_tf32_settings.py")
    exact = a.double() @ b.double()
    error = float(((cut(a, bits) @ cut(b, bits)).double() - exact).norm() / exact.norm()) * 2**24
    assert finding.observed == pytest.approx(error)


def test_one_rounded_operand_is_enough() -> None:
    a, b = pair(16, 16)
    assert verdict_of(lambda: a @ cut(b, 13)) is Verdict.FAIL


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(cut(x, 13), cut(w, 13), torch.ones(8))


def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(cut(x, 13).reshape(2, 2, 4, 4), cut(w, 13).reshape(2, 2, 4, 4)[..., :3, :3])


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return cut(x, 13).reshape(2, 4, 8) @ cut(w, 13).reshape(2, 8, 4).contiguous()


def einsum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,kj->ik", cut(x, 13), cut(w, 13))


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.clone(), w.clone()
    x.view(torch.int32).bitwise_and_(-(1 << 13))
    w.view(torch.int32).bitwise_and_(-(1 << 13))
    return x @ w.T


def by_shifts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (((x.view(torch.int32) >> 13) << 13).view(torch.float32)) @ w.T


def by_wider_integers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.view(torch.int32).long() & ~((1 << 16) - 1)
    return wide.int().view(torch.float32) @ w.T


def by_half_words(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(torch.int16)[..., ::2] = 0
    return x @ w.T


def with_infinities_kept(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), cut(x, 13), x) @ cut(w, 13).T


WAYS = [linear, convolution, batched, einsum, in_place, by_shifts, by_wider_integers, by_half_words]


@pytest.mark.parametrize("way", [*WAYS, with_infinities_kept])
def test_bits_are_followed_into_every_product(way: Callable[..., torch.Tensor]) -> None:
    x, w = pair(8, 8)
    assert verdict_of(lambda: way(x, w)) is Verdict.FAIL


def test_a_backward_product_of_rounded_operands_is_found() -> None:
    x, w = pair(8, 8)
    rounded = cut(x, 13)

    def step() -> None:
        again = cut(x, 13)
        held = w.clone().requires_grad_()
        (again @ held).sum().backward()

    assert measure_operands(step).reduced[0].calls == 2
    assert rounded.shape == x.shape


def upcast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float() @ w.half().float().T


def upcast_through_bits(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.bfloat16().float(), w.bfloat16().float()
    return cut(x, 13) @ cut(w, 13)


def bits_looked_at(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    assert int(x.view(torch.int32).sum()) != 0
    return x @ w.T


def bits_put_back(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & -1).view(torch.float32) @ w.T


def split_in_three(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    top, upper = cut(x, 13), cut(w, 13)
    rest, lower = x - top, w - upper
    return top @ upper + top @ lower + rest @ upper


def exponents(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & (0xFF << 23)).view(torch.float32) @ w.T


def random_bits(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hashed = ((x.view(torch.int32) * 747796405) & 0x7FE000) | 0x3F800000
    return hashed.view(torch.float32) @ w.T


def rounded_for_bfloat16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return cut(x, 16).bfloat16().float() @ w.T


def whole_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return cut((x * 4).round(), 13) @ w.T


HEALTHY = [upcast, upcast_through_bits, bits_looked_at, bits_put_back, split_in_three, random_bits, whole_numbers]


@pytest.mark.parametrize("way", [*HEALTHY, rounded_for_bfloat16])
def test_values_that_lost_nothing_on_the_way_pass(way: Callable[..., torch.Tensor]) -> None:
    x, w = pair(8, 8)
    assert verdict_of(lambda: way(x, w)) is Verdict.PASS


def test_what_keeps_only_exponents_does_not_fail() -> None:
    x, w = pair(8, 8)
    assert verdict_of(lambda: exponents(x, w)) is not Verdict.FAIL


def test_nothing_multiplied_and_a_function_that_raises_are_skipped() -> None:
    assert verdict_of(lambda: torch.ones(3) + 1) is Verdict.SKIP
    assert verdict_of(lambda: 1 / 0) is Verdict.SKIP


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_fewer_lost_bits_than_those_of_tf32_are_left_alone(bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(8, 8, generator=generator)
    assert verdict_of(lambda: cut(a, bits) @ a) is Verdict.PASS


def test_watching_changes_no_result() -> None:
    x, w = pair(8, 8)
    alone = [way(x, w) for way in WAYS]
    seen: list[torch.Tensor] = []
    measure_operands(lambda: seen.extend(way(x, w) for way in WAYS))
    assert all(torch.equal(a, b) for a, b in zip(alone, seen, strict=True))
