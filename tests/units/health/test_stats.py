"""The record: its merge is a monoid, and what it derives."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.health import TensorHealth, Unmeasured, health_of

counts = st.integers(0, 2**40)
histograms = st.none() | st.dictionaries(st.integers(-149, 127), st.integers(1, 2**40)).map(
    lambda bins: tuple(sorted(bins.items()))
)
dtypes = st.sampled_from(["float32", "float16", "mixed"])
filled = st.builds(
    TensorHealth,
    dtypes,
    st.integers(1, 2**40),
    *[counts] * 4,
    amax=st.floats(0, 1e38),
    amin=st.floats(0, math.inf, exclude_min=True),
    # Integers below 2**50 add up exactly, so that the law can be checked with ==.
    sumsq=st.integers(0, 2**50).map(float),
    histogram=histograms,
)
records = filled | st.builds(TensorHealth.empty, dtypes)


@given(records, records, records)
def test_the_merge_is_associative(a, b, c):
    assert (a + b) + c == a + (b + c)


@given(records, records)
def test_the_merge_is_commutative(a, b):
    assert a + b == b + a


@given(filled, dtypes)
def test_the_empty_record_is_the_identity(record, dtype):
    assert record + TensorHealth.empty(dtype) == record
    assert TensorHealth.empty(dtype) + record == record


@given(st.lists(st.integers(0, 1000), max_size=4), st.sampled_from([torch.float32, torch.float16]))
def test_the_chunks_merge_to_the_whole(cuts, dtype):
    tensor = torch.randn(1000).mul(torch.tensor(10.0) ** torch.randn(1000).mul(4)).to(dtype)
    tensor[::50] = math.nan
    chunks = tensor.tensor_split(sorted(cuts))
    measured = [health_of(chunk, histogram=True) for chunk in chunks]
    merged = functools.reduce(operator.add, measured, TensorHealth.empty())
    whole = health_of(tensor, histogram=True)
    assert merged.sumsq == pytest.approx(whole.sumsq, rel=1e-12)
    assert dataclasses.replace(merged, sumsq=0.0) == dataclasses.replace(whole, sumsq=0.0)


def test_dtypes_mix():
    merged = health_of(torch.ones(2)) + health_of(torch.ones(3, dtype=torch.float16))
    assert (merged.dtype, merged.numel) == ("mixed", 5)


def test_what_one_side_lacks_is_not_passed_off_as_whole():
    with_all = health_of(torch.ones(2), histogram=True)
    assert (with_all + health_of(torch.ones(2))).histogram is None


def test_derived_numbers():
    health = health_of(torch.tensor([3.0, 4.0, 0.0, math.nan, math.inf, -math.inf]))
    assert (health.finite, health.nonfinite, health.nonzero) == (3, 3, 2)
    assert health.norm == 5.0
    assert health.rms == pytest.approx(math.sqrt(25 / 3))
    assert TensorHealth.empty().rms == 0.0


def test_quantiles_of_the_exponent():
    health = health_of(torch.tensor([0.0, 1.0, 2.0, 2.5, 4.0]), histogram=True)
    assert [health.quantile_exponent(q) for q in (0.0, 0.25, 0.5, 0.75, 0.76, 1.0)] == [0, 0, 1, 1, 2, 2]
    assert health_of(torch.zeros(3), histogram=True).quantile_exponent(0.5) is None
    with pytest.raises(UsageError, match="histogram=True"):
        health_of(torch.ones(1)).quantile_exponent(0.5)
    with pytest.raises(UsageError, match="between 0 and 1"):
        health.quantile_exponent(1.5)


def test_a_record_is_plain_data():
    health = health_of(torch.tensor([1.0, 1e-9]), histogram=True)
    assert pickle.loads(pickle.dumps(health)) == health
    data = json.loads(json.dumps(dataclasses.asdict(health)))
    assert data["numel"] == 2
    assert hash(health) == hash(pickle.loads(pickle.dumps(health)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        health.numel = 3


def test_only_records_add_up():
    with pytest.raises(TypeError):
        TensorHealth.empty() + 1
    assert str(Unmeasured("it is raining")) == "not measured, because it is raining"
