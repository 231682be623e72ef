"""The front of choices, against a search through all of them."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from ampcheck.whatif.front import WIDE, Front, is_best

BITS = {"a": 8.0, "b": 4.5}
ERRORS = st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0)), min_size=1, max_size=5)


@given(errors=ERRORS, weights=st.lists(st.integers(1, 100), min_size=5, max_size=5))
def test_no_choice_of_equal_bits_is_better_than_the_front(
    errors: list[tuple[float, float]], weights: list[int]
) -> None:
    table = {str(i): dict(zip(BITS, pair, strict=True)) for i, pair in enumerate(errors)}
    sizes = dict(zip(table, weights, strict=False))
    front = Front(table, sizes, BITS).choices()
    for point in front:
        for levels in itertools.product([None, *BITS], repeat=len(table)):
            chosen = {m: r for m, r in zip(table, levels, strict=True) if r is not None}
            bits = sum(sizes[m] * (BITS[chosen[m]] if m in chosen else WIDE) for m in table) / sum(sizes.values())
            error = math.sqrt(sum(table[m][r] ** 2 for m, r in chosen.items()))
            assert not (bits < point.bits * (1 - 1e-9) and error < point.error * (1 - 1e-9))


@given(errors=ERRORS)
def test_each_step_saves_bits_and_costs_no_less_down_to_the_narrowest(errors: list[tuple[float, float]]) -> None:
    table = {str(i): dict(zip(BITS, pair, strict=True)) for i, pair in enumerate(errors)}
    front = Front(table, dict.fromkeys(table, 10), BITS).choices()
    assert (front[0].bits, front[0].error) == (WIDE, 0.0)
    assert all(a.bits > b.bits and a.error <= b.error * (1 + 1e-9) for a, b in itertools.pairwise(front))
    assert front[-1].bits == BITS["b"]


def test_a_layer_that_a_recipe_breaks_is_never_in_it() -> None:
    front = Front({"first": {"b": math.inf}, "last": {"b": 0.1}}, {"first": 1, "last": 1}, BITS).choices()
    assert [dict(choice.recipes) for choice in front] == [{}, {"last": "b"}]


def test_choices_are_found_by_bits() -> None:
    front = Front({m: {"b": float(m)} for m in "1234"}, dict.fromkeys("1234", 1), BITS)
    every = front.choices()
    assert front.within(10.25) == every[2]
    assert front.within(4.0) is None
    assert front.spread(2, also=[10.25]) == [every[0], every[2], every[-1]]


def test_what_still_fits_into_a_budget_is_filled_in() -> None:
    front = Front({"large": {"b": 0.3}, "small": {"b": 0.1}}, {"large": 100, "small": 1}, BITS)
    (_, one, both) = front.choices()
    assert dict(one.recipes) == {"large": "b"}
    filled = Front({"large": {"b": 0.1}, "small": {"b": 0.1}}, {"large": 100, "small": 1}, BITS).within(4.7)
    assert filled is not None
    assert dict(filled.recipes) == {"large": "b"}
    assert both.bits < filled.bits <= 4.7


@given(errors=ERRORS, bits=st.floats(4.5, 16.0))
def test_a_budget_is_kept_and_buys_no_less_than_the_front(errors: list[tuple[float, float]], bits: float) -> None:
    table = {str(i): dict(zip(BITS, pair, strict=True)) for i, pair in enumerate(errors)}
    front = Front(table, {module: 1 + int(module) for module in table}, BITS)
    on_front = [choice.error for choice in front.choices() if choice.bits <= bits]
    filled = front.within(bits)
    assert (filled is None) == (not on_front)
    if filled is not None:
        assert filled.bits <= bits + 1e-6
        assert filled.error <= min(on_front) + 1e-12


def test_a_point_is_best_that_none_dominates() -> None:
    points = [(8.0, 0.1), (4.5, 0.2), (8.0, 0.2)]
    assert [is_best(*point, points) for point in points] == [True, True, False]
    assert not is_best(4.0, math.inf, [*points, (4.0, math.inf)])
