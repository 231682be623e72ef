"""Tensors with the shapes, strides and memory formats of real calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from hypothesis import strategies as st

from ampcheck.core.arguments import parse_names
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.strategies.values import values

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = "tuple[int, ...]"
Number: TypeAlias = "float | bool"

LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded", "channels_last", "channels_last_3d")
"""Layouts of elements in memory, the plainest first."""

EACH = 64
"""Elements that are drawn one by one; a larger tensor repeats a few drawn ones at random positions."""

_FEW = 8
_STEPS = 16
_INTEGERS = 127


def shapes(*, min_dims: int = 1, max_dims: int = 3, min_side: int = 1, max_side: int = 8) -> st.SearchStrategy[Shape]:
    """Shapes; `min_side=0` gives tensors without elements too. Shrinks to few dimensions and short sides."""
    if not 0 <= min_dims <= max_dims or not 0 <= min_side <= max_side:
        raise UsageError(
            "shapes need 0 <= min_dims <= max_dims and 0 <= min_side <= max_side; "
            f"found dims {min_dims} to {max_dims}, sides {min_side} to {max_side}"
        )
    return st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def broadcastable(draw: st.DrawFn, shape: Shape, count: int = 2) -> tuple[Shape, ...]:
    """`count` shapes that broadcast to `shape` together, the first of them `shape` itself."""
    drawn = [shape]
    for _ in range(count - 1):
        sides = tuple(n if draw(st.booleans()) else 1 for n in shape)
        drawn.append(sides[draw(st.integers(0, len(shape))) :])
    return tuple(drawn)


def tensors(
    dtype: torch.dtype | str = "float32",
    *,
    shape: int | Sequence[int] | st.SearchStrategy[Shape] | None = None,
    elements: st.SearchStrategy[Number] | None = None,
    min_value: float | None = None,
    max_value: float | None = None,
    layout: str | Sequence[str] = "contiguous",
    device: str = "cpu",
) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of a floating, integer or bool dtype.

    shape: fixed, or a strategy; by default `shapes()`. elements: by default `values(dtype)` from `min_value` to
    `max_value`, independent of each other, close together (differences cancel), or equal (an empty mask); integers from
    `min_value` to `max_value`, by default 0 and 127, or 128 of them from a `min_value` above 0, or up to a `max_value`
    below 0; bools.
    layout: names from `LAYOUTS`, or `any`; one that does not fit the shape is replaced by `contiguous`. Up to 64
    elements are drawn one by one; larger tensors repeat up to eight drawn values at random positions.

    Shrinks to zeros and ones, contiguous, in small shapes. Raises `UsageError` for an unknown layout, shape or dtype
    (build complex ones of two real tensors), for bounds without a number between them, and for bounds together with
    `elements`, which has its own.
    """
    import torch

    kind = torch_dtype(dtype)
    if kind.is_complex:
        raise UsageError(f"tensors are floating, integer or bool; found {kind}: make it with torch.complex of two")
    names = LAYOUTS if layout == "any" else parse_names(layout, "layout", LAYOUTS)
    if not names:
        raise UsageError(f"layout must name at least one of {', '.join(LAYOUTS)}; found none")
    if elements is not None and (min_value is not None or max_value is not None):
        raise UsageError("bounds belong into `elements` where it is given; found min_value or max_value as well")
    bounds: tuple[float | None, float | None] | None = None
    source: st.SearchStrategy[Number]
    if elements is not None:
        source = elements
    elif kind.is_floating_point:
        source, bounds = values(kind, min_value=min_value, max_value=max_value), (min_value, max_value)
    elif kind is torch.bool:
        if min_value is not None or max_value is not None:
            raise UsageError(f"bools have no bounds; found {min_value} and {max_value}")
        source = st.booleans()
    else:
        source = st.integers(*_whole(kind, min_value, max_value))
    sides = shapes() if shape is None else shape if isinstance(shape, st.SearchStrategy) else st.just(_sides(shape))
    return _drawn(kind, sides, names, source, bounds, device)


def _sides(shape: object) -> Shape:
    sides = (shape,) if isinstance(shape, int) else shape
    if isinstance(sides, str) or not isinstance(sides, Sequence) or not all(type(n) is int and n >= 0 for n in sides):
        raise UsageError(f"a shape is a side or a sequence of sides, integers of at least 0; found {shape!r}")
    return tuple(sides)


def _whole(kind: torch.dtype, low: float | None, high: float | None) -> tuple[int, int]:
    """The first and last integer to draw."""
    import torch

    facts = torch.iinfo(kind)
    if any(bound is not None and not math.isfinite(bound) for bound in (low, high)):
        raise UsageError(f"integers need finite bounds; found {low} and {high}")
    least = None if low is None else math.ceil(low)
    most = None if high is None else math.floor(high)
    if least is None:
        least = 0 if most is None or most >= 0 else max(facts.min, most - _INTEGERS)
    if most is None:
        most = min(facts.max, max(0, least) + _INTEGERS)
    if not facts.min <= least <= most <= facts.max:
        raise UsageError(
            f"bounds of {kind} need an integer between them and lie within {facts.min} to {facts.max}; "
            f"found {low} and {high}"
        )
    return least, most


@st.composite
def _drawn(
    draw: st.DrawFn,
    kind: torch.dtype,
    shape: st.SearchStrategy[Shape],
    names: Sequence[str],
    source: st.SearchStrategy[Number],
    bounds: tuple[float | None, float | None] | None,
    device: str,
) -> torch.Tensor:
    """bounds: of floating elements that may also come close together; None for others."""
    import torch

    sides = _sides(draw(shape))
    fitting = [name for name in names if _fits(name, sides)] or ["contiguous"]
    layout = draw(st.sampled_from(fitting))
    widest = max(range(len(sides)), key=sides.__getitem__) if layout == "expanded" else None
    base = tuple(1 if dim == widest else n for dim, n in enumerate(sides))
    count = math.prod(base)
    fmt = format_of(kind) if kind.is_floating_point else None
    patterns = ("each", "each", "equal") if bounds is None else ("each", "close", "each", "close", "equal")
    pattern = draw(st.sampled_from(patterns)) if count > 1 else "each"
    pool = count if count <= EACH else _FEW
    drawn: Sequence[Number]
    if pattern == "close" and fmt is not None and bounds is not None:
        low, high = bounds
        low = (-fmt.max if fmt.signed else 0.0) if low is None else low
        drawn = draw(_close(fmt, source, pool, low, fmt.max if high is None else high))
    elif pattern == "equal":
        drawn = [draw(source)] * pool
    else:
        drawn = draw(st.lists(source, min_size=pool, max_size=pool))
    flat = torch.tensor(drawn, dtype=torch.float64 if fmt is not None else kind)
    if count > pool:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 255)))
        flat = flat[torch.randint(0, pool, (count,), generator=generator)]
    tensor = flat.to(device=device, dtype=kind).reshape(base)
    return _laid_out(tensor.expand(sides), layout)


@st.composite
def _close(
    draw: st.DrawFn, fmt: FloatFormat, source: st.SearchStrategy[float], count: int, low: float, high: float
) -> list[float]:
    """Numbers a few units in the last place apart, or a few of a power of two of them: their differences cancel."""
    # Hypothesis shrinks the first draws first, and so removes distances that do not matter.
    steps = draw(st.lists(st.integers(0, 2 * _STEPS), min_size=count, max_size=count))
    power = draw(st.integers(0, fmt.mantissa_bits))
    middle = draw(source)
    step = fmt.ulp(middle) * 2.0**power
    moved = (middle + step * (n // 2 if n % 2 == 0 else -(n // 2) - 1) for n in steps)
    near = (fmt.round(min(max(x, low), high), saturate=True) for x in moved)
    return [x if low <= x <= high else middle for x in near]


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype of torch by its name, or itself."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    known = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(known, torch.dtype):
        raise UsageError(f"dtype must be one of torch's, such as 'float16' or 'int64'; found {dtype!r}")
    return known


def _fits(layout: str, sides: Sequence[int]) -> bool:
    least, most = {"transposed": (2, 99), "channels_last": (4, 4), "channels_last_3d": (5, 5)}.get(layout, (1, 99))
    return layout == "contiguous" or (math.prod(sides) >= 2 and least <= len(sides) <= most)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    import torch

    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        return tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2].copy_(tensor)
    if layout == "offset":  # not at the start of its storage, so that a vector load is not aligned
        return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if layout.startswith("channels_last"):
        return tensor.contiguous(memory_format=getattr(torch, layout))
    return tensor
