"""The fast path against the oracle, and both against arithmetic done one value at a time in Python."""

from __future__ import annotations

import math
import threading
from collections import Counter

import pytest
import torch
from bits import NARROW, WIDE, codes_of, every_pattern, from_codes, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.health import TensorHealth, Unmeasured, health_of, measure_health, oracle
from ampcheck.health.plan import plan_for

SUMSQ = 1e-12  # both sides add up float64, in another order


def by_hand(tensor: torch.Tensor) -> TensorHealth:
    """Every statistic from its definition, on Python floats."""
    own = format_of(tensor.dtype)
    values = [abs(float(value)) for value in tensor.flatten().to(torch.float64).tolist()]
    nonzero = [value for value in values if value and math.isfinite(value)]
    exponents = Counter(math.frexp(value)[1] - 1 for value in nonzero)
    return TensorHealth(
        own.name,
        len(values),
        zeros=values.count(0.0),
        subnormals=sum(value < own.smallest_normal for value in nonzero),
        infs=values.count(math.inf),
        nans=sum(map(math.isnan, values)),
        amax=max(nonzero, default=0.0),
        amin=min(nonzero, default=math.inf),
        sumsq=sum(value * value for value in nonzero),
        histogram=tuple(sorted(exponents.items())),
    )


def measured(tensor: torch.Tensor) -> TensorHealth:
    health = health_of(tensor, histogram=True)
    assert isinstance(health, TensorHealth), health
    return health


def judged(tensor: torch.Tensor) -> TensorHealth:
    plan = plan_for(tensor.dtype, True)
    name = str(tensor.dtype).removeprefix("torch.")
    return plan.unpack(oracle.pack(tensor, plan).tolist(), name, tensor.numel())


def assert_same(got: TensorHealth, expected: TensorHealth) -> None:
    __tracebackhide__ = True
    assert got.sumsq == pytest.approx(expected.sumsq, rel=SUMSQ, abs=0.0)
    for name in TensorHealth.__dataclass_fields__:
        if name != "sumsq":
            assert getattr(got, name) == getattr(expected, name), name


@pytest.mark.parametrize("dtype", [*NARROW, torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_is_measured_as_its_definition_says(dtype):
    tensor = every_pattern(dtype)
    expected = by_hand(tensor)
    assert_same(measured(tensor), expected)
    assert_same(judged(tensor), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_pattern_alone_gets_the_right_answer(dtype):
    """One pattern per tensor, so that no other element hides a mistake: one in 61, and all near the edges."""
    tensor = every_pattern(dtype)
    for index in [*range(0, 1 << 16, 61), *range(0x3F0, 0x410), *range(0x7F70, 0x7F90), *range(0x7BF0, 0x7C10)]:
        assert_same(measured(tensor[index]), by_hand(tensor[index]))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_bits_give_what_the_definitions_give(dtype, data):
    tensor = from_codes(data.draw(codes_of(dtype)), dtype)
    expected = by_hand(tensor)
    assert_same(measured(tensor), expected)
    assert_same(judged(tensor), expected)


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 4095, 4096, 4097, (1 << 17) + 1, 300_003])
def test_the_fast_path_agrees_with_the_oracle_at_any_length(dtype, numel):
    tensor = random_bits(dtype, numel)
    expected = judged(tensor.to(dtype))
    assert_same(measured(tensor), expected)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_one_odd_element_among_ordinary_ones_is_found_wherever_it_is(dtype):
    """What the extremes of a chunk exclude is not looked for."""
    form = format_of(dtype)
    odd = (0.0, form.smallest_subnormal, form.smallest_normal, form.max, math.inf, math.nan)
    ordinary = torch.randn(270_011).abs().clamp(0.01, 100.0).to(dtype)
    for place in (0, 10_000, (1 << 17) - 1, 1 << 17, 270_010):
        for value in odd:
            tensor = ordinary.clone()
            tensor[place] = value
            assert_same(measured(tensor), judged(tensor))
            assert_same(measured(-tensor[place : place + 1]), judged(tensor[place : place + 1]))
    for value in odd:
        tensor = torch.full((5000,), value, dtype=dtype)
        assert_same(measured(tensor), judged(tensor))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("start", [1, 3, 7])
def test_a_view_that_is_not_aligned_is_measured_from_its_own_first_element(dtype, start):
    tensor = random_bits(dtype, 5000)[start:]
    assert_same(measured(tensor), judged(tensor))


LAYOUTS = {
    "transposed": lambda x: x.view(50, 100).t(),
    "permuted": lambda x: x.view(10, 20, 25).permute(2, 0, 1),
    "channels last": lambda x: x.view(2, 10, 10, 25).to(memory_format=torch.channels_last),
    "every third": lambda x: x[::3],
    "columns": lambda x: x.view(50, 100)[:, 3:40],
    "expanded": lambda x: x[:100].view(100, 1).expand(100, 7),
    "0-d": lambda x: x[4321],
    "empty": lambda x: x[:0].view(0, 3),
    "empty slice": lambda x: x.view(50, 100)[:, 5:5],
    "size 1": lambda x: x.view(50, 1, 100)[:, :, :1],
    "window": lambda x: x.as_strided((40, 9), (5, 1)),
    "flipped": lambda x: x.flip(0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_layout_is_measured_element_by_element(layout, dtype):
    tensor = LAYOUTS[layout](random_bits(dtype, 5000))
    assert_same(measured(tensor), by_hand(tensor))


def test_squares_beyond_float32_are_added_up():
    for value in (1e30, 1e-30, 2.0**-149, torch.finfo(torch.float32).max):
        tensor = torch.full((10_000,), value)
        assert measured(tensor).sumsq == pytest.approx(10_000 * float(tensor[0]) ** 2, rel=SUMSQ)


def test_flushing_the_thread_s_subnormals_changes_nothing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    plan_for.cache_clear()  # plans are computed with float64 subnormals: that too must not be flushed
    try:
        flushed = [measured(random_bits(dtype, 5000)) for dtype in (*WIDE, *NARROW)]
        assert float(torch.tensor([1], dtype=torch.int32).view(torch.float32).double()) == 0.0  # still flushed
    finally:
        torch.set_flush_denormal(False)
    for dtype, health in zip((*WIDE, *NARROW), flushed, strict=True):
        assert_same(health, judged(random_bits(dtype, 5000)))


def test_threads_measure_at_once():
    tensors = [random_bits(torch.float32, 200_000, seed) for seed in range(4)]
    expected = [judged(tensor) for tensor in tensors]
    results: dict[tuple[int, int], TensorHealth | Unmeasured] = {}

    def work(index: int) -> None:
        for turn in range(5):
            results[index, turn] = health_of(tensors[index], histogram=True)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for (index, _), health in results.items():
        assert isinstance(health, TensorHealth)
        assert_same(health, expected[index])


def test_what_is_no_tensor_is_refused():
    with pytest.raises(UsageError, match="tensor"):
        measure_health([1.0])  # type: ignore[arg-type]
