"""The op that lost the values is blamed, not those that carry it on; planted defects are found where they were put."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ampcheck.core.formats import format_of
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.ops import OpWatch
from ampcheck.torchtools.trace import Trace

LOW = (torch.float16, torch.bfloat16)


def _facts(run: Callable[[], object], model: nn.Module | None = None) -> dict[str, OpFacts]:
    watch = OpWatch()
    with Trace(model, observers=(watch,)):
        run()
    return {fact.where.op.removeprefix("aten::"): fact for fact in watch.facts()}


def test_the_producer_of_an_infinity_is_told_from_its_propagators() -> None:
    x = torch.full((4,), 300.0, dtype=torch.float16)
    facts = _facts(lambda: ((x * x) + 1).exp())
    assert (facts["mul.Tensor"].produced, facts["mul.Tensor"].limited) == (4, True)
    assert (facts["add.Tensor"].produced, facts["add.Tensor"].carried) == (0, 4)
    assert facts["exp"].produced == 0


def test_arithmetic_without_a_result_is_told_from_the_limit_of_the_format() -> None:
    zero = torch.zeros(2, dtype=torch.float16)
    assert _facts(lambda: zero / zero)["div.Tensor"].limited is False
    assert _facts(lambda: zero.log())["log"].limited is False


def test_a_deliberate_mask_is_no_producer() -> None:
    scores = torch.randn(2, 4, dtype=torch.float16)
    mask = torch.tensor([True, False, False, True])
    facts = _facts(lambda: (scores.masked_fill(mask, float("-inf")) + torch.full((4,), 1.0)).softmax(-1))
    assert not any(fact.produced or fact.spoiled for fact in facts.values())


def test_two_masks_of_finfo_min_added_are_a_producer() -> None:
    low = torch.full((3,), torch.finfo(torch.float16).min, dtype=torch.float16)
    assert _facts(lambda: low + low)["add.Tensor"].produced == 3


@pytest.mark.parametrize("dtype", LOW)
@given(data=st.data())
def test_flushed_elements_are_counted_exactly(dtype: torch.dtype, data: st.DataObject) -> None:
    fmt = format_of(dtype)
    near = fmt.smallest_subnormal
    values = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.51, 1.0, 3.0]), min_size=1, max_size=20))
    wide = torch.tensor([v * near for v in values], dtype=torch.float64)
    fact = _facts(lambda: wide.to(dtype)).get("_to_copy")
    lost = int(((wide != 0) & (wide.to(dtype) == 0)).sum())
    assert fact is not None
    assert (fact.flushed, fact.nonzero) == (lost, int((wide != 0).sum()))
    assert fact.emptied == (1 if lost and not wide.to(dtype).any() else 0)


def test_cancellation_to_zero_is_no_flush() -> None:
    x = torch.full((4,), 1.0, dtype=torch.float16)
    assert _facts(lambda: x - x)["sub.Tensor"].flushed == 0


def test_a_guard_that_the_format_cannot_hold_is_named_with_its_value() -> None:
    x = torch.tensor([0.0, 1.0], dtype=torch.float16)
    fact = _facts(lambda: x + 1e-8)["add.Tensor"]
    assert (fact.constant, fact.flushed) == (1e-8, 1)
    assert _facts(lambda: x.bfloat16() + 1e-8)["add.Tensor"].constant is None


@pytest.mark.parametrize("dtype", LOW)
@given(start=st.integers(-5000, 5000))
def test_integers_that_a_cast_cannot_keep_are_counted_exactly(dtype: torch.dtype, start: int) -> None:
    whole = torch.arange(start, start + 64)
    fact = _facts(lambda: whole.to(dtype)).get("_to_copy")
    lost = int((whole.to(dtype).double() != whole.double()).sum())
    assert (fact.inexact if fact else 0) == lost


def test_arange_in_a_low_format_loses_positions() -> None:
    fact = _facts(lambda: torch.arange(300, dtype=torch.bfloat16))
    assert fact["arange.start_step" if "arange.start_step" in fact else next(iter(fact))].inexact > 0


def test_a_low_float_becomes_an_index_only_while_it_counts_exactly() -> None:
    big = torch.tensor([2050.0, 3.0], dtype=torch.float16)
    assert _facts(lambda: big.long())["_to_copy"].inexact == 1


def test_an_op_that_overwrites_its_input_is_judged_on_what_went_in() -> None:
    x = torch.full((4,), 300.0, dtype=torch.float16)
    fact = _facts(lambda: x.mul_(300.0))["mul_.Tensor"]
    assert (fact.produced, fact.limited) == (4, True)


def test_uninitialised_memory_is_not_looked_at() -> None:
    assert not any("empty" in name for name in _facts(lambda: torch.empty(8, dtype=torch.float16).fill_(1.0)))


def test_the_error_of_one_op_is_against_float64_on_the_same_inputs() -> None:
    x = torch.randn(64, 64).half()
    fact = _facts(lambda: x @ x)["mm"]
    expected = x.double() @ x.double()
    assert fact.error == pytest.approx(float(((x @ x).double() - expected).norm() / expected.norm()), rel=1e-6)
    assert fact.error < format_of("float16").unit_roundoff


def test_backward_is_watched_with_its_module() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(2)

    model = nn.Sequential(nn.Linear(2, 2), Square())
    watch = OpWatch()
    with Trace(model, observers=(watch,)):
        with torch.autocast("cpu", torch.float16):
            y = model(torch.ones(1, 2))
        y.half().backward(torch.full((1, 2), 60000.0, dtype=torch.float16))
    backward = [f for f in watch.facts() if f.where.phase == "backward"]
    assert {f.where.module for f in backward} >= {"0", "1"}
