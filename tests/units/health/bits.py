"""Tensors made of bit patterns: every value that a format has, not only the likely ones."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDE = tuple(getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16"))
NARROW = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def from_codes(codes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose elements have these bit patterns."""
    bits = 8 * dtype.itemsize
    signed = [code - (1 << bits) if bits > 8 and code >> (bits - 1) else code for code in codes]
    return torch.tensor(signed, dtype=WORDS[dtype.itemsize]).view(dtype)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Return all bit patterns of an 8-bit or 16-bit dtype."""
    return from_codes(list(range(1 << 8 * dtype.itemsize)), dtype)


def random_bits(dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    """Return random patterns, an eighth of them small codes: zeros and subnormals are rare otherwise."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2**62), 2**62, (numel,), dtype=torch.int64, generator=generator) * 2
    codes += torch.randint(0, 2, (numel,), generator=generator)
    codes[::8] &= 3
    return codes.to(WORDS[dtype.itemsize]).view(dtype)


def codes_of(dtype: torch.dtype) -> st.SearchStrategy[list[int]]:
    """Lists of bit patterns, the neighbours of powers of two (the edges of exponents) often among them."""
    bits = 8 * dtype.itemsize
    edges = st.builds(
        lambda exponent, step, sign: (((1 << exponent) + step) | sign << (bits - 1)) % (1 << bits),
        st.integers(0, bits - 1),
        st.integers(-2, 2),
        st.integers(0, 1),
    )
    return st.lists(st.one_of(edges, st.integers(0, (1 << bits) - 1)), max_size=80)
