from __future__ import annotations

import math
from collections import Counter
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.records.scales import FEW, POOL, GradientHistogram, ScaleWindow, scale_window
from ampcheck.training.gradients.watch import histogram_of

_EXPONENTS = st.integers(-60, 40)
_NUMBERS = st.one_of(
    st.builds(math.ldexp, st.floats(1.0, 2.0, width=32), _EXPONENTS),
    st.builds(lambda e: math.ldexp(1.0, e), _EXPONENTS),
    st.builds(
        lambda e, up: float(np.nextafter(np.float32(2.0**e), np.float32(up))), _EXPONENTS, st.sampled_from([0, 9e9])
    ),
    st.sampled_from([0.0, -0.0, 65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 2.0**-14, 2.0**-149, 2.0**-126, 3e38]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
_TENSORS = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.tuples(_NUMBERS, st.booleans()), max_size=40), min_size=1
).map(lambda d: {name: [-x if minus else x for x, minus in xs] for name, xs in d.items()})
_SHARES = st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 0.9])


def _histograms(tensors: dict[str, list[float]]) -> dict[str, GradientHistogram]:
    return {name: histogram_of(torch.tensor(xs, dtype=torch.float32)) for name, xs in tensors.items()}


def _cast(xs: list[float], scale: float) -> np.ndarray:
    """numpy rounds float64 to float16 at once; the product with a power of two is exact here."""
    with np.errstate(all="ignore"):
        return (np.array(xs, dtype=np.float64) * scale).astype(np.float16)


def _really(tensors: dict[str, list[float]], scale: float) -> tuple[float, bool]:
    """The worst share that casting loses, and whether it overflows."""
    flushed, nonzero, worst, overflow = 0, 0, 0.0, False
    for xs in tensors.values():
        there = np.array(xs, dtype=np.float64) != 0
        cast = _cast(xs, scale)
        overflow |= bool(np.isinf(cast).any())
        gone, whole = int(((cast == 0) & there).sum()), int(there.sum())
        flushed, nonzero = flushed + gone, nonzero + whole
        if whole >= FEW:
            worst = max(worst, gone / whole)
    return max(worst, flushed / nonzero if nonzero else 0.0), overflow


@given(st.lists(st.one_of(_NUMBERS, st.sampled_from([math.inf, -math.inf, math.nan])), max_size=60))
def test_a_histogram_counts_every_element_in_its_binade(xs: list[float]) -> None:
    histogram = histogram_of(torch.tensor(xs, dtype=torch.float32))
    values = [abs(float(np.float32(x))) for x in xs]
    finite = [x for x in values if x and math.isfinite(x)]
    bins = Counter(next(b for b in range(-149, 129) if x <= math.ldexp(1.0, b)) for x in finite)
    assert histogram.counts == bins
    assert histogram.largest == max(finite, default=0.0)
    assert histogram.nonfinite == sum(not math.isfinite(x) for x in values)
    assert histogram.nonzero == len(finite)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30))
def test_a_float64_gradient_is_counted_to_its_last_subnormal(xs: list[float]) -> None:
    histogram = histogram_of(torch.tensor([*xs, 5e-324], dtype=torch.float64))
    assert histogram.counts[-1074] == 1 + sum(abs(x) == 5e-324 for x in xs)
    assert histogram.largest == max(map(abs, [*xs, 5e-324]))
    for e in (-1000, -25, 0, 900):  # what is at most 2**-25 rounds to zero
        assert histogram.lost(-25 - e) == sum(0 < abs(x) <= 2.0**e for x in [*xs, 5e-324]) / histogram.nonzero


@given(_TENSORS)
def test_histograms_of_parts_add_up_to_that_of_the_whole(tensors: dict[str, list[float]]) -> None:
    parts = list(_histograms(tensors).values())
    whole = histogram_of(torch.tensor([x for xs in tensors.values() for x in xs], dtype=torch.float32))
    assert sum(parts, GradientHistogram()) == whole
    assert sum(reversed(parts), GradientHistogram()) == whole


def test_any_stride_and_narrow_dtype_is_read() -> None:
    dense = torch.tensor([[0.0, 1.5], [-4.0, 0.0]])
    expected = GradientHistogram({1: 1, 2: 1}, 4.0)
    assert histogram_of(dense) == histogram_of(dense.t()) == expected
    assert histogram_of(dense.half()) == histogram_of(dense.bfloat16()) == histogram_of(dense.double()) == expected
    assert histogram_of(torch.tensor(3.0, requires_grad=True)) == GradientHistogram({2: 1}, 3.0)
    assert histogram_of(torch.empty(0)) == GradientHistogram()


def test_histograms_add_up() -> None:
    first, second = GradientHistogram({0: 1}, 1.0), GradientHistogram({0: 2, 3: 1}, 8.0, 5)
    assert first + second == GradientHistogram({0: 3, 3: 1}, 8.0, 5)


@given(_TENSORS, _SHARES)
def test_a_window_is_true_inside_and_just_outside(tensors: dict[str, list[float]], share: float) -> None:
    window = scale_window(_histograms(tensors), share=share)
    if not window.nonzero:
        return
    lowest, highest = window.needed, window.allowed
    for exponent in range(lowest, highest + 1):
        lost, overflow = _really(tensors, math.ldexp(1.0, exponent))
        assert lost <= share
        assert not overflow
    assert _really(tensors, math.ldexp(1.0, lowest))[0] <= share
    assert _really(tensors, math.ldexp(1.0, lowest - 1))[0] > share
    assert not _really(tensors, math.ldexp(1.0, highest))[1]
    assert _really(tensors, math.ldexp(1.0, highest + 1))[1]
    if window.empty:
        assert window.low is None
        assert window.high is None
        for exponent in range(highest - 2, lowest + 3):
            lost, overflow = _really(tensors, math.ldexp(1.0, exponent))
            assert lost > share or overflow


@given(_TENSORS, _SHARES, st.floats(0.0, 1.0))
def test_any_scale_between_the_ends_serves(tensors: dict[str, list[float]], share: float, where: float) -> None:
    window = scale_window(_histograms(tensors), share=share)
    if window.low is None or window.high is None or not window.nonzero:
        return
    scale = min(max(2.0 ** (window.needed + where * (window.allowed - window.needed)), window.low), window.high)
    lost, overflow = _really(tensors, scale)
    assert window.contains(scale)
    assert lost <= share
    assert not overflow


@given(_TENSORS, st.integers(-60, 60), st.floats(1.0, 2.0, width=16))
def test_what_is_lost_at_a_scale_is_exact_at_powers_of_two_and_bounded_between(
    tensors: dict[str, list[float]], exponent: int, factor: float
) -> None:
    window = scale_window(_histograms(tensors), share=0.1)
    scale = math.ldexp(1.0, exponent)
    told = window.at(scale)
    assert (told.lost, bool(told.overflows)) == _really(tensors, scale)
    assert window.at(scale, at_least=True) == told
    lost, overflow = _really(tensors, scale * factor)
    assert window.at(scale * factor, at_least=True).lost <= lost <= window.at(scale * factor).lost
    assert bool(window.at(scale * factor).overflows) == overflow


@given(_TENSORS, _SHARES)
def test_the_tensors_that_bind_the_ends_are_named(tensors: dict[str, list[float]], share: float) -> None:
    window = scale_window(_histograms(tensors), share=share)
    if not window.nonzero:
        return
    below = math.ldexp(1.0, window.needed - 1)
    if window.needed_by == POOL:
        xs = [x for one in tensors.values() for x in one]
    else:
        xs = tensors[window.needed_by]
        assert np.count_nonzero(np.array(xs, dtype=np.float32)) >= FEW
    there = np.array(xs, dtype=np.float32) != 0
    assert ((_cast(xs, below) == 0) & there).sum() / there.sum() > share
    assert np.isinf(_cast(tensors[window.allowed_by], math.ldexp(1.0, window.allowed + 1))).any()


@given(_TENSORS, st.integers(-60, 60))
def test_a_window_keeps_the_ends_of_float16(tensors: dict[str, list[float]], exponent: int) -> None:
    kind = format_of("float16")
    window = scale_window(_histograms(tensors), share=0.1)
    scale = math.ldexp(1.0, exponent)
    values = [abs(float(np.float32(x))) * scale for xs in tensors.values() for x in xs]
    gone = sum(x != 0 and kind.round(x, saturate=True) == 0 for x in values)
    nonzero = sum(x != 0 for x in values)
    assert window.at(scale).pooled == (gone / nonzero if nonzero else 0.0)
    assert bool(window.at(scale).overflows) == any(x >= kind.overflows_at for x in values)


def test_small_tensors_count_in_the_pool_only() -> None:
    large, small = GradientHistogram({0: 1000}, 1.0), GradientHistogram({-30: FEW - 1}, 2.0**-30)
    window = scale_window({"large": large, "small": small}, share=0.1)
    assert (window.needed, window.needed_by, window.allowed) == (-24, "large", 15)
    enough = scale_window({"large": large, "small": small + GradientHistogram({-30: 1}, 2.0**-30)}, share=0.1)
    assert (enough.needed, enough.needed_by, enough.allowed_by) == (6, "small", "large")
    alone = scale_window({"small": small}, share=0.1)
    assert (alone.needed, alone.needed_by, alone.allowed) == (6, POOL, 45)


def test_half_of_the_smallest_subnormal_rounds_to_zero_itself() -> None:
    exactly = histogram_of(torch.full((8,), 2.0**-25))
    above = histogram_of(torch.full((8,), math.nextafter(2.0**-25, 1.0), dtype=torch.float64))
    assert scale_window({"a": exactly}, share=0.0).low == 2.0
    assert scale_window({"a": above}, share=0.0).low == 1.0


def test_overflow_begins_at_the_tie_beyond_the_largest_value() -> None:
    below, at = histogram_of(torch.full((8,), 65519.996)), histogram_of(torch.full((8,), 65520.0))
    assert scale_window({"a": below}, share=0.1).high == 1.0
    assert scale_window({"a": at}, share=0.1).high == 0.5


def test_nonfinite_elements_are_told_apart_from_what_a_scale_can_mend() -> None:
    window = scale_window({"a": histogram_of(torch.tensor([1.0] * 8 + [math.inf, math.nan]))}, share=0.1)
    assert window.nonfinite == {"a": 2}
    assert (window.low, window.high, window.nonzero) == (2.0**-24, 2.0**15, 8)


def test_without_a_nonzero_element_the_window_says_nothing() -> None:
    for histograms in ({}, {"a": histogram_of(torch.zeros(9))}):
        window = scale_window(histograms, share=0.1)
        assert window.nonzero == 0
        assert not window.empty
        assert window.at(1.0).lost == 0.0


def test_ends_stay_within_float64() -> None:
    tiny = scale_window({"a": histogram_of(torch.full((9,), 5e-324, dtype=torch.float64))}, share=0.1)
    assert tiny.low is None
    assert tiny.allowed == 1023
    huge = histogram_of(torch.full((9,), 1.7e308, dtype=torch.float64))
    window = scale_window({"a": huge}, share=0.1)
    assert 0 < (window.low or 0.0) < (window.high or 0.0) < 1e-260


def test_a_share_of_all_leaves_the_lower_end_open() -> None:
    assert scale_window({"a": GradientHistogram({0: 9}, 1.0)}, share=1.0).needed == -1074


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="must be a positive number"):
        scale_window({}, share=0.1).at(scale)


def test_windows_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        scale_window({}, share=0.1).share = 1.0  # type: ignore[misc]


def _gradients(model: torch.nn.Module, x: torch.Tensor, scale: float, low: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=low):
        loss = model(x).float().pow(2).mean()
    (loss * scale).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def mlp() -> tuple[torch.nn.Module, torch.Tensor, ScaleWindow, dict[str, torch.Tensor]]:
    """An MLP whose weight gradients span many binades, as rows of very different size do."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model[2].weight.mul_(torch.logspace(-4, 0, 64, base=10)[None, :])
    x = torch.randn(48, 32, generator=generator) * torch.logspace(-3, 0, 32, base=10)[None, :]
    shadow = _gradients(model, x, 1.0, low=False)
    window = scale_window({name: histogram_of(g) for name, g in shadow.items()}, share=0.1)
    return model, x, window, shadow


def test_a_real_float16_backward_agrees_with_the_prediction(
    mlp: tuple[torch.nn.Module, torch.Tensor, ScaleWindow, dict[str, torch.Tensor]],
) -> None:
    """Tolerance: 1 % of a tensor's elements, since gradients of activations are rounded first; they may also overflow
    one binade earlier than those of the weights."""
    model, x, window, shadow = mlp
    assert window.low is not None
    assert window.high is not None
    for exponent in range(window.needed - 3, window.allowed + 3):
        scale = math.ldexp(1.0, exponent)
        real = _gradients(model, x, scale, low=True)
        told = window.at(scale)
        finite = all(g.isfinite().all() for g in real.values())
        assert finite == (not told.overflows) or exponent == window.allowed
        if not finite:
            continue
        lost = {
            name: float(((g == 0) & (shadow[name] != 0)).sum() / (shadow[name] != 0).sum()) for name, g in real.items()
        }
        assert max(lost.values()) == pytest.approx(told.lost, abs=0.01)
