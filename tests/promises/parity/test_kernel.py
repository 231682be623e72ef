"""What is promised of `assert_kernel`: each planted fault is refused, honest kernels are certified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from parity_kernels import FAULTY, HONEST, INPUTS, draw, matmul, rms

from ampcheck import Run, UsageError, Verdict, assert_kernel
from ampcheck.strategies import tensors

SIZES = (0, 1, 17, 33, 257)
BF16 = torch.bfloat16


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_is_certified(name: str) -> None:
    kernel = HONEST[name]
    (finding,) = assert_kernel(kernel.compute, kernel.reference, INPUTS[kernel.reference], sizes=SIZES).findings
    assert finding.verdict is Verdict.PASS
    assert finding.seen is not None
    assert finding.seen > 20


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_refused(name: str) -> None:
    kernel = FAULTY[name]
    with pytest.raises(AssertionError, match="a kernel must compute what"):
        assert_kernel(kernel.compute, kernel.reference, INPUTS[kernel.reference], sizes=SIZES)


def test_zeros_alone_certify_nothing() -> None:
    run = assert_kernel(lambda x: x * 0, lambda x: x * 0, (draw(4, 8),))
    assert run.findings[0].verdict is Verdict.UNDECIDED


def test_equal_bits_each_time_say_nothing_of_the_reference() -> None:
    x = draw(4, 8).double()
    run = assert_kernel(lambda x: x * 3, lambda x: x * 2, (x,))
    assert run.findings[0].verdict is Verdict.UNDECIDED
    run = assert_kernel(lambda x: (x * 3, x.argmax()), lambda x: (x * 2, x.argmax()), (x,))
    assert run.findings[0].verdict is Verdict.UNDECIDED
    assert "no case says anything of output 0" in run.findings[0].message


class Calls:
    """How often a kernel was called, where no comparison restores it as it restores a closure."""

    count = 0
    most = 1000


def test_a_kernel_that_raises_later_is_refused() -> None:
    def fades(x: torch.Tensor) -> torch.Tensor:
        Calls.count += 1
        if Calls.count > Calls.most:
            raise RuntimeError("out of workspace")
        return x * 2

    Calls.count = 0
    assert_kernel(fades, lambda x: x * 2, (draw(4, 8),), runs=1)
    Calls.count, Calls.most = 0, Calls.count + 5  # every case, and some of the further runs
    with pytest.raises(AssertionError, match=r"a further run raised: .*out of workspace"):
        assert_kernel(fades, lambda x: x * 2, (draw(4, 8),))


def test_a_kernel_that_a_strategy_finds_flaky_is_refused() -> None:
    def flaky(x: torch.Tensor) -> torch.Tensor:
        Calls.count += 1
        return x * (3 if Calls.count == 1 else 2)

    Calls.count = 0
    with pytest.raises(AssertionError, match="a kernel must compute what"):
        assert_kernel(flaky, lambda x: x * 2, st.just((draw(4, 8),)))


def test_the_certificate_says_what_was_tried(tmp_path: Path) -> None:
    path = tmp_path / "mm.json"
    assert_kernel(torch.matmul, matmul, INPUTS[matmul](33), certificate=path, name="matmul")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["schema"], written["kernel"], written["reference"]) == (1, "matmul", "matmul")
    assert {"case", "outcome", "error", "limit"} <= written["tried"][0].keys()
    assert written["environment"]["torch"] == torch.__version__


def test_gradients_of_a_kernel_are_compared() -> None:
    class Doubled(torch.autograd.Function):
        factor = 2.0

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * Doubled.factor

    x = draw(4, 16).requires_grad_()
    assert_kernel(Doubled.apply, lambda x: x * 2, (x,))
    Doubled.factor = 2.25
    with pytest.raises(AssertionError, match="gradient argument 0"):
        assert_kernel(Doubled.apply, lambda x: x * 2, (x,))


def test_gradients_that_a_kernel_does_not_give_are_missed() -> None:
    x, w = draw(4, 16).requires_grad_(), draw(16, seed=1).requires_grad_()
    with pytest.raises(AssertionError, match="does not give gradient argument 0"):
        assert_kernel(lambda x, w: (x * w).detach(), lambda x, w: x * w, (x, w))


def test_float32_may_sum_in_any_order_and_devices_flush_subnormals() -> None:
    def in_order(x: Any) -> Any:
        total = torch.zeros(x.shape[0])
        for column in x.T:
            total = total + column
        return total

    assert_kernel(in_order, lambda x: x.sum(-1), lambda n: (draw(3, n).float(),), sizes=(17, 257))
    flushed = lambda x: torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)  # noqa: E731
    assert_kernel(flushed, lambda x: x * 1, (draw(4, 99).float(),))


def test_an_infinity_of_the_other_sign_is_refused() -> None:
    with pytest.raises(AssertionError, match="inf or NaN where the reference is not"):
        assert_kernel(
            lambda x: x.masked_fill(x > 0, -torch.inf), lambda x: x.masked_fill(x > 0, torch.inf), (draw(4, 8),)
        )


def test_indices_of_equal_values_that_are_selected_have_no_order() -> None:
    x = draw(8, 64).round()
    assert_kernel(
        lambda x: torch.sort(x, dim=-1, descending=True, stable=True)[1][..., :4], lambda x: x.topk(4)[1], (x,)
    )
    with pytest.raises(AssertionError, match="integers of output differ"):
        assert_kernel(lambda x: x.argmin(-1), lambda x: x.argmax(-1), (draw(8, 64),))


def test_an_index_that_is_assumed_contiguous_is_refused() -> None:
    def flat(w: Any, index: Any) -> Any:
        memory = index.as_strided((index.numel(),), (1,), index.storage_offset())
        return w[memory].view(*index.shape, -1)

    index = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError, match="a kernel must compute"):
        assert_kernel(flat, lambda w, i: w[i], (draw(9, 8), index))


def test_a_strategy_draws_the_arguments_and_the_smallest_is_shown() -> None:
    inputs = st.integers(1, 40).map(lambda n: (draw(2, n), draw(n, seed=1)))
    assert isinstance(assert_kernel(HONEST["rms_in_float64"].compute, rms, inputs, examples=8), Run)
    with pytest.raises(AssertionError, match=r"on \[2, 2\] torch.bfloat16"):
        assert_kernel(FAULTY["takes_the_next_weight"].compute, rms, inputs, examples=20)


def test_a_strategy_of_tensors_is_one_argument() -> None:
    assert_kernel(torch.neg, lambda x: -x, tensors("bfloat16", shape=(3,)), examples=5)


def test_a_kernel_for_16_bits_alone_and_one_that_raises() -> None:
    def picky(a: Any, b: Any) -> Any:
        assert a.dtype is BF16
        return a @ b

    assert_kernel(picky, matmul, INPUTS[matmul](17))

    def broken(a: Any, b: Any) -> Any:
        raise RuntimeError("out of shared memory")

    with pytest.raises(AssertionError, match="out of shared memory"):
        assert_kernel(broken, matmul, INPUTS[matmul](17))


def test_bad_arguments_get_one_sentence() -> None:
    with pytest.raises(UsageError, match="runs"):
        assert_kernel(torch.neg, torch.neg, (draw(3),), runs=0)
    with pytest.raises(UsageError, match="kernel must be a function"):
        assert_kernel(3, torch.neg, (draw(3),))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sizes must be whole numbers"):
        assert_kernel(torch.neg, torch.neg, lambda n: draw(n), sizes=())
    with pytest.raises(UsageError, match="inputs must be a tuple"):
        assert_kernel(torch.neg, torch.neg, {"x": draw(3)})
    with pytest.raises(UsageError, match=r"inputs\(1\) raised"):
        assert_kernel(torch.neg, torch.neg, lambda n: 1 / 0, sizes=(1,))
    with pytest.raises(UsageError, match="no case can be tried"):
        assert_kernel(torch.neg, lambda x: 1 / 0, (draw(3),))
