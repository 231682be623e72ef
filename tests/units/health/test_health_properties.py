"""Health of any tensor that the strategies draw, against bit patterns; and its merge."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.health import TensorHealth, health_of
from ampcheck.strategies import (
    cancelling_pairs,
    heavy_tails,
    log_uniform,
    masks,
    outlier_channels,
    shapes,
    tensors,
    token_batches,
    values,
)

FIELDS = {"float64": (11, 52), "float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10), "float8_e5m2": (5, 2)}
"""Exponent and mantissa bits; IEEE 754 tells the rest."""
ANY_SHAPE = shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)


def any_tensors(name: str) -> st.SearchStrategy[torch.Tensor]:
    """Every layout, shape, zero size and value, infinities and NaN among them."""
    return tensors(name, shape=ANY_SHAPE, layout="any", elements=values(name, infinity=True, nan=True))


def realistic(name: str) -> st.SearchStrategy[torch.Tensor]:
    """Tensors as models have them."""
    pairs = st.lists(cancelling_pairs(name), min_size=1, max_size=8)
    found = [
        heavy_tails(name, scale=1e-3),
        outlier_channels(name, shape=(4, 6), factor=1e4),
        masks((3, 5), kind="additive", dtype=name),
        tensors(name, elements=log_uniform(1e-8, 1e4).map(lambda x: float(torch.tensor(x, dtype=kind_of(name))))),
        pairs.map(lambda found: torch.tensor(found, dtype=torch.float64).to(kind_of(name))),
    ]
    return st.one_of(found)


def kind_of(name: str) -> torch.dtype:
    kind: torch.dtype = getattr(torch, name)
    return kind


def codes_of(tensor: torch.Tensor) -> list[int]:
    """The bit patterns without their signs."""
    bits = 8 * tensor.dtype.itemsize
    word = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    flat = tensor.contiguous().flatten()
    found = flat.view(word).numpy().astype(np.int64).tolist()
    return [code & ((1 << (bits - 1)) - 1) for code in found]


def by_bits(tensor: torch.Tensor) -> TensorHealth:
    """Every statistic from bit patterns and exact fractions."""
    name = str(tensor.dtype).removeprefix("torch.")
    exponent_bits, mantissa_bits = FIELDS[name]
    bias, infinity = (1 << (exponent_bits - 1)) - 1, ((1 << exponent_bits) - 1) << mantissa_bits
    codes = codes_of(tensor)
    present = [code for code in codes if 0 < code < infinity]
    lowest = 1 - bias - mantissa_bits

    def value(code: int) -> Fraction:
        field, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        whole = mantissa if not field else mantissa + (1 << mantissa_bits)
        return Fraction(whole) * Fraction(2) ** (lowest + max(field - 1, 0))

    found = [value(code) for code in present]
    exponents = Counter(
        (code >> mantissa_bits) - bias if code >> mantissa_bits else lowest + code.bit_length() - 1 for code in present
    )
    try:
        sumsq = float(sum((x * x for x in found), Fraction(0)))
    except OverflowError:
        sumsq = math.inf
    return TensorHealth(
        name,
        len(codes),
        zeros=codes.count(0),
        subnormals=sum(code < 1 << mantissa_bits for code in present),
        infs=codes.count(infinity),
        nans=sum(code > infinity for code in codes),
        amax=float(max(found, default=0)),
        amin=float(min(found)) if found else math.inf,
        sumsq=sumsq,
        histogram=tuple(sorted(exponents.items())),
    )


def measured(tensor: torch.Tensor) -> TensorHealth:
    health = health_of(tensor, histogram=True)
    assert isinstance(health, TensorHealth), health
    return health


def assert_same(got: TensorHealth, expected: TensorHealth) -> None:
    __tracebackhide__ = True
    # Sums of float64 in another order; squares of float64 may be subnormal themselves.
    assert got.sumsq == pytest.approx(expected.sumsq, rel=1e-12, abs=got.numel * 2.0**-1073)
    assert dataclasses.replace(got, sumsq=0.0) == dataclasses.replace(expected, sumsq=0.0)


@given(name=st.sampled_from(sorted(FIELDS)), data=st.data())
def test_any_tensor_is_measured_as_its_bits_say(name: str, data: st.DataObject) -> None:
    tensor = data.draw(any_tensors(name))
    assert_same(measured(tensor), by_bits(tensor))


@given(name=st.sampled_from(["float32", "bfloat16", "float16"]), data=st.data())
def test_tensors_as_models_have_them_are_measured_as_their_bits_say(name: str, data: st.DataObject) -> None:
    tensor = data.draw(realistic(name))
    assert_same(measured(tensor), by_bits(tensor))


@given(name=st.sampled_from(["float32", "bfloat16", "float16"]), data=st.data())
def test_pieces_of_a_tensor_merge_to_the_whole_in_any_order_and_grouping(name: str, data: st.DataObject) -> None:
    tensor = data.draw(any_tensors(name).filter(torch.Tensor.dim) | realistic(name))
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, tensor.shape[dim]), max_size=4)))
    records = [measured(piece) for piece in tensor.tensor_split(cuts, dim)]
    records = data.draw(st.permutations(records))
    while len(records) > 1:  # any grouping: two that stand beside each other become one
        place = data.draw(st.integers(0, len(records) - 2))
        records[place : place + 2] = [records[place] + records[place + 1]]
    assert_same(records[0], measured(tensor))
    if tensor.numel():
        assert_same(TensorHealth.empty() + records[0], records[0])
        assert_same(records[0] + TensorHealth.empty(), records[0])


@given(st.data(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_the_record_of_two_tensors_is_that_of_their_concatenation(data: st.DataObject, name: str) -> None:
    one, other = data.draw(any_tensors(name)), data.draw(any_tensors(name) | realistic(name))
    both = torch.cat([one.flatten(), other.flatten()])
    first, second = measured(one), measured(other)
    assert_same(first + second, measured(both))
    assert_same(second + first, first + second)


@given(st.lists(st.sampled_from(sorted(FIELDS)).flatmap(any_tensors), min_size=1, max_size=4))
def test_records_of_several_dtypes_merge_to_the_counts_of_all_their_bits(many: list[torch.Tensor]) -> None:
    merged = functools.reduce(operator.add, [measured(tensor) for tensor in many])
    parts = [by_bits(tensor) for tensor in many if tensor.numel()]
    for name in ("numel", "zeros", "subnormals", "infs", "nans"):
        assert getattr(merged, name) == sum(getattr(part, name) for part in parts)
    assert merged.amax == max((part.amax for part in parts), default=0.0)
    assert merged.amin == min((part.amin for part in parts), default=math.inf)
    assert dict(merged.histogram or ()) == sum((Counter(dict(part.histogram or ())) for part in parts), Counter())
    kinds = {part.dtype for part in parts}
    assert not kinds or merged.dtype == (kinds.pop() if len(kinds) == 1 else "mixed")


@given(st.data(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_signs_order_and_shape_change_nothing(data: st.DataObject, name: str) -> None:
    tensor = data.draw(any_tensors(name))
    flat = tensor.flatten()
    order = torch.tensor(data.draw(st.permutations(range(len(flat)))), dtype=torch.int64)
    for other in (-tensor, flat, flat[order], torch.copysign(tensor, torch.tensor(-1.0, dtype=tensor.dtype))):
        assert_same(measured(other), measured(tensor))


@given(tensors("float32", elements=log_uniform(2.0**-50, 2.0**50).map(np.float32).map(float)), st.integers(-60, 60))
def test_a_power_of_two_moves_the_histogram_and_leaves_the_counts(tensor: torch.Tensor, exponent: int) -> None:
    before, after = measured(tensor), measured(tensor * 2.0**exponent)
    assert after.histogram == tuple((bin_ + exponent, count) for bin_, count in before.histogram or ())
    assert (after.amax, after.amin) == (before.amax * 2.0**exponent, before.amin * 2.0**exponent)
    assert (after.numel, after.zeros, after.nonfinite, after.subnormals) == (before.numel, 0, 0, 0)


@given(token_batches(1000), st.integers(1, 3))
def test_token_ids_are_counted_as_numbers(batch: tuple[torch.Tensor, torch.Tensor], times: int) -> None:
    ids, seen = batch
    record = functools.reduce(operator.add, [measured(ids)] * times)
    assert record.zeros == times * int((ids == 0).sum())
    assert record.amax == float(ids.max())
    assert record.sumsq == times * sum(x * x for x in ids.flatten().tolist())
    assert measured(seen).zeros == int((seen == 0).sum())


@given(st.data(), st.integers(1, 40))
def test_a_quantile_is_the_binade_of_the_element_of_that_rank(data: st.DataObject, numel: int) -> None:
    """Of n elements the share k/n is reached by the k-th smallest, whatever k/n is rounded to."""
    tensor = data.draw(tensors("float32", shape=(numel,)))
    sizes = sorted(abs(x) for x in tensor.tolist() if x)
    health = measured(tensor)
    if not sizes:
        assert health.quantile_exponent(0.5) is None
    for rank, size in enumerate(sizes, 1):
        assert health.quantile_exponent(rank / len(sizes)) == math.frexp(size)[1] - 1


def test_a_share_of_seven_in_twenty_five_is_reached_by_the_seventh_element() -> None:
    """7 / 25 * 25 is more than 7 in float64."""
    health = measured(2.0 ** torch.arange(25.0))
    assert [health.quantile_exponent(rank / 25) for rank in range(1, 26)] == list(range(25))
