"""Tensors as calls have them: shape, strides, memory format, close values, masks and tokens."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, find, given, seed, settings
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.strategies import (
    LAYOUTS,
    broadcastable,
    cancelling_pairs,
    heavy_tails,
    masks,
    outlier_channels,
    shapes,
    tensors,
    token_batches,
    values,
)

SEARCH = settings(max_examples=1000, database=None, deadline=None, suppress_health_check=list(HealthCheck))
LOOKS = {
    "contiguous": lambda t: t.is_contiguous(),
    "transposed": lambda t: t.transpose(-1, -2).is_contiguous(),
    "sliced": lambda t: t.stride(-1) == 2,
    "offset": lambda t: t.storage_offset() == 1 and t.is_contiguous(),
    "expanded": lambda t: 0 in t.stride(),
    "channels_last": lambda t: t.is_contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda t: t.is_contiguous(memory_format=torch.channels_last_3d),
}
DIMS = {"channels_last": 4, "channels_last_3d": 5}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_a_layout_is_what_it_is_called_and_keeps_dtype_and_shape(layout: str, data: st.DataObject) -> None:
    shape = (2, 3, 2, 3, 2)[-DIMS.get(layout, 3) :]
    tensor = data.draw(tensors("float16", shape=shape, layout=layout))
    assert LOOKS[layout](tensor)
    assert (tensor.shape, tensor.dtype) == (shape, torch.float16)


@given(tensors("float32", shape=(), layout="any"), tensors("float32", shape=(2, 0), layout="any"))
def test_a_shape_that_has_no_such_layout_is_contiguous(point: torch.Tensor, empty: torch.Tensor) -> None:
    assert point.shape == ()
    assert empty.shape == (2, 0)


@pytest.mark.parametrize("shape", [(3,), (200,), (40, 50)])
@given(data=st.data())
def test_every_element_lies_within_the_bounds(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = data.draw(tensors("bfloat16", shape=shape, min_value=-3, max_value=10))
    assert tensor.shape == shape
    assert bool(((tensor >= -3) & (tensor <= 10)).all())


def test_elements_come_close_together_so_that_their_differences_cancel() -> None:
    fmt = format_of("float16")
    close = lambda x: x[0] > 100 and 0 < abs(float(x[0] - x[1])) <= 4 * fmt.ulp(float(x[0]))  # noqa: E731
    assert close(find(tensors("float16", shape=2), close, settings=SEARCH))


@given(tensors("float32", elements=values("float16"), shape=5))
def test_elements_are_those_of_the_strategy_that_is_given(tensor: torch.Tensor) -> None:
    assert torch.equal(tensor, tensor.half().float())


@given(tensors("int64", max_value=9), tensors("bool"))
def test_integers_and_bools_are_drawn_too(whole: torch.Tensor, flags: torch.Tensor) -> None:
    assert whole.dtype is torch.int64
    assert bool(((whole >= 0) & (whole <= 9)).all())
    assert flags.dtype is torch.bool


def test_a_failure_shrinks_to_one_element_and_the_plainest_layout() -> None:
    for number in range(4):
        seeded = Random(number)
        found = find(tensors("float16", layout="any"), lambda x: bool((x > 11).any()), settings=SEARCH, random=seeded)
        assert found.tolist() == [12]
    assert found.is_contiguous()


@given(shapes(min_dims=2, max_dims=3, min_side=0, max_side=4))
def test_shapes_stay_within_their_limits(shape: tuple[int, ...]) -> None:
    assert 2 <= len(shape) <= 3
    assert all(0 <= side <= 4 for side in shape)


@given(st.data(), shapes())
def test_broadcastable_shapes_broadcast_to_the_first(data: st.DataObject, shape: tuple[int, ...]) -> None:
    found = data.draw(broadcastable(shape, 3))
    assert found[0] == shape
    assert torch.broadcast_shapes(*found) == shape


@given(cancelling_pairs("float16", min_value=-100, max_value=100))
def test_a_pair_cancels_to_a_few_units_in_the_last_place(pair: tuple[float, float]) -> None:
    fmt = format_of("float16")
    assert abs(sum(pair)) <= 5 * fmt.ulp(pair[0]) or pair == (pair[0], pair[0])
    assert all(-100 <= one <= 100 and fmt.round(one) == one for one in pair)


@given(heavy_tails(shape=(64, 64), scale=2.0, limit=50))
def test_heavy_tails_have_a_limit(tensor: torch.Tensor) -> None:
    assert tensor.shape == (64, 64)
    assert float(tensor.abs().amax()) <= 100


@given(outlier_channels("float32", shape=(8, 16, 32), dim=-1, factor=100))
def test_outlier_channels_stand_out_along_their_dimension(tensor: torch.Tensor) -> None:
    sizes = tensor.abs().mean((0, 1)).sort(descending=True).values
    assert bool(sizes[0] > 20 * sizes[16])


@pytest.mark.parametrize("kind", ["bool", "causal", "additive"])
@given(data=st.data())
def test_every_query_of_a_mask_sees_a_key(kind: Any, data: st.DataObject) -> None:
    mask = data.draw(masks((2, 3, 4), kind=kind))
    seen = mask if mask.dtype is torch.bool else mask == 0
    assert bool(seen.any(-1).all())
    assert mask.shape == (2, 3, 4)


@given(token_batches(7, padding=3))
def test_token_batches_are_padded_at_the_end(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    ids, seen = batch
    assert ids.shape == seen.shape
    assert bool(((ids >= 0) & (ids < 7)).all())
    assert bool((ids[seen == 0] == 3).all())
    assert bool((seen.diff(dim=1) <= 0).all())
    assert bool((seen[:, 0] == 1).all())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: tensors("float17").example(), "float17"),
        (lambda: find(tensors(layout="diagonal"), lambda x: True), "diagonal"),
        (lambda: find(tensors(elements=st.just(1.0), max_value=2), lambda x: True), "elements"),
        (lambda: shapes(min_dims=3, max_dims=2), "min_dims <= max_dims"),
        (lambda: find(masks((0,)), lambda x: True), "needs keys"),
        (lambda: find(masks((2,), kind="other"), lambda x: True), "'other'"),  # type: ignore[arg-type]
        (lambda: find(token_batches(0), lambda x: True), "vocabulary"),
        (lambda: find(outlier_channels(shape=(2,), dim=3), lambda x: True), "dim 3"),
    ],
    ids=["dtype", "layout", "elements", "shapes", "mask", "kind", "tokens", "channels"],
)
@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_what_cannot_be_drawn_is_refused_in_one_sentence(make: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_mask_that_hides_everything_beside_alike_values_is_no_rarity() -> None:
    """What an eps stands in a denominator for: no positives, and a prediction of none."""
    pairs = st.tuples(tensors("float16", shape=(4, 3), min_value=-50, max_value=50), tensors("bool", shape=(4, 3)))
    seen: list[bool] = []

    @settings(max_examples=300, database=None, suppress_health_check=list(HealthCheck))
    @seed(0)
    @given(pairs)
    def note(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        seen.append(not bool(pair[1].any()) and bool((pair[0] < -9).all()))

    note()
    assert sum(seen) >= 4
