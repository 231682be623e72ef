from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.formats import format_of
from ampcheck.training.lineage import NARROW
from ampcheck.training.stagnation.cures import KAHAN, STOCHASTIC, UNCURED, WIDE, measure_cures, round_stochastically

B16 = torch.bfloat16


def replay(value: float, update: float, count: int = 64, **options):
    """Four equal steps of `count` equal elements."""
    start = torch.full((count,), value, dtype=torch.float64)
    return measure_cures(start, [torch.full((count,), update, dtype=torch.float64)] * 4, B16, **options)


def by_name(cures):
    return {cure.name: cure for cure in cures}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
def test_updates_below_half_a_spacing_arrive_by_every_cure_and_not_as_they_are(share):
    told = by_name(replay(1.0, share * 2**-7))
    assert (told[UNCURED].arrives, told[UNCURED].error) == (0.0, pytest.approx(1.0))
    assert told[WIDE].arrives == pytest.approx(1.0, abs=1e-3)
    assert told[KAHAN].arrives == pytest.approx(1.0, abs=0.2)
    assert told[STOCHASTIC].arrives == pytest.approx(1.0, abs=0.1)
    assert max(told[WIDE].error, told[KAHAN].error) < told[STOCHASTIC].error < told[UNCURED].error


def test_updates_of_many_spacings_arrive_as_they_are():
    told = by_name(replay(1.0, 0.5))
    assert told[UNCURED].arrives == pytest.approx(1.0, abs=0.01)


def test_the_steps_are_those_in_which_the_typical_element_moves_by_four_spacings():
    assert replay(1.0, 2**-7 / 16)[0].steps == 64
    assert replay(1.0, 1e-9)[0].steps == 512


def test_a_decay_that_rounds_back_is_cured():
    told = by_name(replay(0.25, 0.0, gain=0.999))
    assert told[UNCURED].arrives == 0.0
    assert told[UNCURED].steps == 512
    for name in (WIDE, KAHAN, STOCHASTIC):
        assert told[name].arrives == pytest.approx(1.0, abs=0.1)


def test_a_counter_in_bfloat16_counts_to_256_and_with_kahan_summation_on():
    told = by_name(replay(0.0, 1.0, 1, steps=512))
    assert told[UNCURED].arrives == 0.5
    assert told[KAHAN].arrives == pytest.approx(1.0, abs=0.01)
    assert told[WIDE].arrives == 1.0


def test_what_does_not_move_and_what_is_not_finite_has_no_cure():
    assert measure_cures(torch.zeros(1), [], B16) == ()
    assert replay(1.0, 0.0) == ()
    assert replay(math.nan, 1.0) == ()


@pytest.mark.parametrize("dtype", sorted(NARROW, key=str))
@given(data=st.data())
def test_stochastic_rounding_gives_one_of_the_two_neighbours(dtype, data):
    form = format_of(dtype)
    value = data.draw(st.floats(-form.max, form.max))
    rounded = round_stochastically(
        torch.full((32,), value, dtype=torch.float64),
        form,
        torch.Generator().manual_seed(data.draw(st.integers(0, 99))),
    )
    for one in set(rounded.tolist()):
        assert form.round(one) == one
        assert abs(one - value) < form.ulp(value) or one == value


def test_stochastic_rounding_is_right_on_average():
    values = torch.full((200_000,), 1.0 + 0.3 * 2**-7, dtype=torch.float64)
    rounded = round_stochastically(values, format_of(B16), torch.Generator().manual_seed(0))
    assert float(rounded.mean()) == pytest.approx(float(values[0]), abs=5 * 2**-7 / math.sqrt(len(values)))
