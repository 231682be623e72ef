"""The results of another run beside the exact ones of a shadowed run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcheck.records.results import Key, ResultError
from ampcheck.shadow import Reference, Shadow
from ampcheck.shadow.compare import Result, compare_results, compare_shadowed, result_of
from ampcheck.shadow.freedom import Freedom

U32, U16 = 2.0**-24, 2.0**-11
OUT: Key = ("output", "", 0)


def result(exact: Tensor, value: Tensor | None = None, unit: float = U32, spread: float = 1.0, **more: Any) -> Result:
    """A result whose data move by `spread` roundings."""
    signs = torch.randint(0, 2, exact.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    moved = (exact * (1 + spread * 2.0**-11 * signs)).float()
    return Result(exact.float() if value is None else value, Reference(exact.double(), moved, unit), **more)


def compared(result: Result, value: Tensor | None, key: Key = OUT) -> ResultError:
    (error,) = compare_results({key: result}, {} if value is None else {key: value})
    return error


X = torch.linspace(1, 2, 64, dtype=torch.float64)


def test_rounding_is_within_and_sixteen_bits_in_place_of_float32_are_not() -> None:
    assert not compared(result(X), X.float()).at_fault
    error = compared(result(X), X.half().float())
    assert error.at_fault
    assert error.error == pytest.approx(U16 / 3, rel=1)
    assert error.eager_error < U32
    assert not compared(result(X, unit=U16), X.half().float()).at_fault


def test_a_result_of_few_roundings_has_a_smaller_bound() -> None:
    off = (X * (1 + 20 * U16)).half()
    assert not compared(result(X, X.half(), U16, roundings=8), off).at_fault
    assert compared(result(X, X.half(), U16, roundings=1), off).at_fault


def test_a_long_sum_may_be_made_in_another_order() -> None:
    off = (X * (1 + 100 * U32)).float()
    assert compared(result(X), off).at_fault
    assert not compared(result(X, terms=4096), off).at_fault


def test_what_eager_mode_loses_itself_is_no_fault_of_the_other_run_unless_it_is_far_worse() -> None:
    eager = (X * 1.01).float()
    assert not compared(result(X, eager), (X * 1.02).float()).at_fault
    assert compared(result(X, eager), (X * 1.2).float()).at_fault


def test_elements_that_are_not_finite_count_where_eager_mode_and_exact_agree() -> None:
    value, eager = X.float(), X.float()
    value[3] = math.inf
    assert (compared(result(X), value).lost, compared(result(X), value).at_fault) == (1, True)
    eager[3] = math.inf
    both = compared(result(X, eager), value)
    assert (both.lost, both.at_fault) == (0, False)
    hidden = compared(result(X, eager), X.float())
    assert (hidden.hidden, hidden.at_fault) == (1, False)
    large = torch.tensor([65500.0], dtype=torch.float64)
    at_the_edge = compared(result(large, large.half(), U16), torch.tensor([math.inf]).half())
    assert at_the_edge.lost == 0


def test_infinities_that_exact_has_too_are_compared_in_sign_and_nan_is_counted() -> None:
    exact = torch.tensor([1.0, -math.inf, math.nan], dtype=torch.float64)
    same = compared(result(exact), exact.float())
    assert (same.at_fault, same.nan, same.judged) == (False, 1, 2)
    assert compared(result(exact), exact.float().abs()).lost == 1


def test_what_the_other_run_does_not_give_is_beyond() -> None:
    for value in (None, torch.ones(3), torch.ones(64, dtype=torch.int64)):
        error = compared(result(X), value)
        assert (error.absent, error.at_fault, error.error) == (True, True, math.inf)


def test_integers_are_equal_or_they_are_not() -> None:
    whole = Result(torch.arange(4), None)
    assert not compared(whole, torch.arange(4)).at_fault
    assert compared(whole, torch.tensor([0, 1, 2, 4])).apart == 0.25


def test_a_gradient_that_the_data_hardly_determine_counts_by_its_share_of_all_of_them() -> None:
    keys: list[Key] = [("gradient", "a", 0), ("gradient", "b", 0)]
    large, small = result(X), result(X * 1e-9, spread=2e6)
    results = dict(zip(keys, (large, small), strict=True))
    values = dict(zip(keys, (X.float(), X.float() * 3e-9), strict=True))
    assert [e.at_fault for e in compare_results(results, values)] == [False, False]
    assert compared(small, values[keys[1]], keys[1]).at_fault
    values[keys[0]] = X.float() * 1.01
    assert [e.at_fault for e in compare_results(results, values)] == [True, False]


def test_a_gradient_that_the_data_determine_has_its_own_bound_however_small_it_is() -> None:
    keys: list[Key] = [("gradient", "a", 0), ("gradient", "b", 0)]
    for unit, honest in ((U32, 1e-7), (2.0**-8, 0.003)):
        results = dict(zip(keys, (result(X, unit=unit), result(X * 1e-9, unit=unit)), strict=True))
        for factor, at_fault in ((1 + honest, False), (-1.0, True)):
            values = dict(zip(keys, (X.float(), X.float() * 1e-9 * factor), strict=True))
            error = compare_results(results, values)[1]
            assert (error.at_fault, error.beyond(2.0)) == (at_fault, at_fault)


def test_sides_of_kinks_excuse_no_gradient_of_the_opposite_sign() -> None:
    keys: list[Key] = [("gradient", "a", 0), ("gradient", "b", 0)]
    results = dict(zip(keys, (result(X, unit=2.0**-8), result(X * 1e-3, unit=2.0**-8)), strict=True))
    for factor, at_fault in ((1.3, False), (-1.0, True)):
        values = dict(zip(keys, (X.float(), X.float() * 1e-3 * factor), strict=True))
        assert compare_results(results, values, Freedom(kinks=0.005, kinked=100))[1].at_fault is at_fault


def test_a_gradient_that_is_zero_by_mathematics_is_noise_that_must_stay_small_beside_the_others() -> None:
    keys: list[Key] = [("gradient", "a", 0), ("gradient", "noise", 0)]
    noise = result(X * 1e-9, spread=1e9)
    results = dict(zip(keys, (result(X), noise), strict=True))
    error = compare_results(results, {keys[0]: X.float(), keys[1]: -X.float() * 1e-9})[1]
    assert (error.noise, error.at_fault) == (True, False)
    assert compare_results(results, {keys[0]: X.float(), keys[1]: X.float()})[1].at_fault


def test_results_of_a_shadowed_run_keep_the_values_of_their_time() -> None:
    with Shadow() as shadow:
        x = torch.linspace(0, 1, 9)
        y = (x * 3.3).sin()
        kept = result_of(shadow, y)
        y.add_(1)
    assert not compared(kept, (x * 3.3).sin()).at_fault
    assert compared(kept, y).at_fault
    assert result_of(shadow, torch.arange(3)).reference is None


def test_what_the_data_do_not_determine_is_wrong_where_it_lies_far_from_its_spread_and_from_eager_mode() -> None:
    exact = torch.full((8, 64), 1e-12, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 8, 64, generator=generator) * 1e-8
    moved = (exact + noise[0] * 2.0**13).float()  # a step of float32 moves it by about 1e-8
    ill = Result(noise[1], Reference(exact, moved, U32))
    for key in (OUT, ("gradient", "a", 0)):
        for value, at_fault in ((-noise[1], False), (noise[1] * 10, False), (torch.full((8, 64), 1e-3), True)):
            error = compared(ill, value, key)
            assert (error.at_fault, error.known) == (at_fault, at_fault)
    row = noise[1].clone()
    row[3] = 1e6
    assert compared(ill, row).at_fault


def test_digits_of_float32_alone_are_no_loss_of_low_precision() -> None:
    with Shadow() as shadow:
        value = torch.linspace(1, 2, 64) * 3.0
    reference = shadow.reference(value)
    assert not compare_shadowed(("output", "", 0), value * 1.001, reference).beyond(2.0)
    assert compare_shadowed(("output", "", 0), value * 1.02, reference).beyond(2.0)
