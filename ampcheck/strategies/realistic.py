"""Magnitudes and structures of real models: log-uniform, heavy tails, outlier channels, masks, token batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hypothesis import strategies as st

from ampcheck.core.arguments import parse_choice
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.strategies.tensors import EACH, Shape, shapes, torch_dtype
from ampcheck.strategies.values import values

if TYPE_CHECKING:
    import torch

Mask = Literal["bool", "causal", "additive"]


def log_uniform(low: float, high: float, *, signed: bool = True) -> st.SearchStrategy[float]:
    """Magnitudes from `low` to `high`, each binade alike, as activations and gradients spread; both signs if `signed`.

    For use as `elements`. Shrinks to `low`'s binade and powers of two. Raises `UsageError` unless 0 < low <= high.
    """
    if not (0 < low <= high < math.inf):
        raise UsageError(f"log_uniform needs 0 < low <= high, both finite; found {low} and {high}")
    first, last = math.frexp(low)[1] - 1, math.frexp(high)[1] - 1
    closed = low < high == math.ldexp(1, last)  # a binade of one number, which ends the previous one
    last -= closed

    @st.composite
    def drawn(draw: st.DrawFn) -> float:
        step, exponent = draw(st.integers(0, 255)), draw(st.integers(first, last))
        size = high if closed and (step, exponent) == (255, last) else math.ldexp(1 + step / 256, exponent)
        if not low <= size <= high:  # the first or last binade is only partly in the range
            share = draw(st.integers(0, 255)) / 255
            size = min(max(math.exp(math.log(low) * (1 - share) + math.log(high) * share), low), high)
        return -size if signed and draw(st.booleans()) else size

    return drawn()


def cancelling_pairs(
    dtype: torch.dtype | str, *, min_value: float | None = None, max_value: float | None = None
) -> st.SearchStrategy[tuple[float, float]]:
    """Two numbers of the format whose sum is at most a few units in the last place: a and nearly -a.

    Raises `UsageError` unless the range contains numbers of both signs.
    """
    fmt = format_of(dtype)
    low, high = -fmt.max if min_value is None else min_value, fmt.max if max_value is None else max_value
    if not (fmt.signed and low < 0 < high):
        raise UsageError(
            f"cancelling_pairs need a range on both sides of zero; found {low:g} to {high:g} in {fmt.name}"
        )
    reach = min(-low, high, fmt.max)

    @st.composite
    def drawn(draw: st.DrawFn) -> tuple[float, float]:
        first = draw(values(fmt, min_value=-reach, max_value=reach))
        second = fmt.round(-(first + draw(st.integers(-4, 4)) * fmt.ulp(first)), saturate=True)
        return first, second if low <= second <= high else -first

    return drawn()


@st.composite
def heavy_tails(
    draw: st.DrawFn,
    dtype: torch.dtype | str = "float32",
    *,
    shape: Sequence[int] | st.SearchStrategy[Shape] | None = None,
    scale: float = 1.0,
    limit: float = 1e4,
) -> torch.Tensor:
    """Normal numbers of deviation `scale` with single elements up to `limit` times as large, clamped to the dtype.

    Student's t with 1 to 8 degrees of freedom, as activations of trained transformers have.
    """
    import torch

    sides = draw(shapes() if shape is None else shape) if not isinstance(shape, Sequence) else shape
    generator = torch.Generator().manual_seed(draw(st.integers(0, 255)))
    freedom = draw(st.integers(1, 8))
    normal = torch.randn(tuple(sides), generator=generator, dtype=torch.float64)
    squares = torch.randn((freedom, *sides), generator=generator, dtype=torch.float64).square().mean(0)
    return _cast(scale * (normal / squares.sqrt()).clamp(-limit, limit), dtype)


@st.composite
def outlier_channels(
    draw: st.DrawFn,
    dtype: torch.dtype | str = "float32",
    *,
    shape: Sequence[int],
    dim: int = -1,
    scale: float = 1.0,
    factor: float = 100.0,
) -> torch.Tensor:
    """Normal numbers of deviation `scale`, with one to three channels along `dim` that are `factor` times as large
    (Dettmers et al., arXiv:2208.07339), clamped to the dtype."""
    import torch

    sides = tuple(shape)
    if not sides or not -len(sides) <= dim < len(sides) or not sides[dim]:
        raise UsageError(f"outlier_channels need a shape with a side at dim; found shape {sides} and dim {dim}")
    generator = torch.Generator().manual_seed(draw(st.integers(0, 255)))
    tensor = scale * torch.randn(sides, generator=generator, dtype=torch.float64)
    channels = st.integers(0, sides[dim] - 1)
    for channel in draw(st.lists(channels, min_size=1, max_size=min(3, sides[dim]), unique=True)):
        tensor.select(dim, channel).mul_(factor)
    return _cast(tensor, dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | str) -> torch.Tensor:
    largest = format_of(dtype).max
    return tensor.clamp(-largest, largest).to(torch_dtype(dtype))


@st.composite
def masks(
    draw: st.DrawFn, shape: Sequence[int], *, kind: Mask = "bool", dtype: torch.dtype | str = "float32"
) -> torch.Tensor:
    """Attention masks over (..., queries, keys); True, or 0, is visible, and every query sees at least one key.

    kind: `bool` (any), `causal`, or `additive`: 0 and minus infinity in `dtype`. Shrinks to a mask without hidden keys.
    """
    import torch

    parse_choice(kind, "kind", ("bool", "causal", "additive"))
    sides = tuple(shape)
    if not sides or (kind == "causal" and len(sides) < 2) or 0 in sides:
        raise UsageError(f"a mask needs keys, and a causal one queries too; found shape {sides}")
    if kind == "causal":
        return torch.ones(sides, dtype=torch.bool).tril()
    rows, keys = math.prod(sides[:-1]), sides[-1]
    hidden = torch.zeros((rows, keys), dtype=torch.bool)
    how = draw(st.sampled_from(["nothing", "padding", "any"]))
    if how == "padding":
        for row in hidden:
            row[keys - draw(st.integers(0, keys - 1)) :] = True
    elif how == "any":
        if hidden.numel() <= EACH:
            drawn = draw(st.lists(st.booleans(), min_size=hidden.numel(), max_size=hidden.numel()))
            hidden = torch.tensor(drawn).reshape(rows, keys)
        else:
            generator = torch.Generator().manual_seed(draw(st.integers(0, 255)))
            hidden = torch.rand((rows, keys), generator=generator) < draw(st.integers(1, 7)) / 8
        hidden[torch.arange(rows), draw(st.integers(0, keys - 1))] = False
    mask = ~hidden.reshape(sides)
    if kind == "bool":
        return mask
    return torch.zeros(sides, dtype=torch_dtype(dtype)).masked_fill_(~mask, -math.inf)


@st.composite
def token_batches(
    draw: st.DrawFn, vocabulary: int, *, max_batch: int = 4, max_length: int = 16, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), both int64 of shape (batch, length), rows padded at the end with `padding` to one length.

    Shrinks to one token, of the lowest number.
    """
    import torch

    if vocabulary < 1 or max_batch < 1 or max_length < 1:
        raise UsageError(
            "token_batches need a vocabulary, batch and length of at least 1; "
            f"found {vocabulary}, {max_batch} and {max_length}"
        )
    tokens = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=max_length)
    rows = draw(st.lists(tokens, min_size=1, max_size=max_batch))
    length = max(map(len, rows))
    ids = torch.tensor([row + [padding] * (length - len(row)) for row in rows], dtype=torch.int64)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], dtype=torch.int64)
    return ids, mask
