from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.formats import format_of
from ampcheck.tools.lab.stagnation import round_stochastically
from ampcheck.training.lineage import NARROW

B16 = torch.bfloat16


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
