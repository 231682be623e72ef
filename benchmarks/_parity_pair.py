"""A pair of executions from real code, what was planted in it, and what a comparison has to say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.records.parity import AGREE, ANOTHER

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Make = Callable[[torch.dtype], tuple[Any, ...]]


@dataclass(frozen=True)
class Pair:
    """make: of a dtype, `(a, b, args)` or `(a, b, args, options)` of `sides_of`. planted: what was changed in b, ""
    in an honest pair. outcome: the right one. names: a regular expression, found in what the comparison says of the op.
    link: the thread in which the pair was asked about."""

    name: str
    group: str
    make: Make
    dtypes: tuple[str, ...]
    planted: str = ""
    outcome: str = AGREE
    names: str = ""
    link: str = ""


PAIRS: dict[str, Pair] = {}


def honest(group: str, *dtypes: str, name: str = "") -> Callable[[Make], Make]:
    """Register a pair that must agree, in these dtypes; by default in all three."""
    return _register(group, dtypes or tuple(DTYPES), name)


def planted(
    group: str, what: str, names: str, *dtypes: str, outcome: str = ANOTHER, name: str = ""
) -> Callable[[Make], Make]:
    """Register a pair in which something was planted, which the comparison must name."""
    return _register(group, dtypes or ("bfloat16",), name, planted=what, names=names, outcome=outcome)


def _register(group: str, dtypes: tuple[str, ...], name: str, **expected: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        title = name or make.__name__.replace("_", " ")
        assert title not in PAIRS, title
        PAIRS[title] = Pair(title, group, make, dtypes, **expected)
        return make

    return register


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def enliven(module: torch.nn.Module, dtype: torch.dtype, seed: int = 0) -> Any:
    """A module whose norms and biases are not ones and zeros, so that each of them shows; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() <= 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.to(dtype).eval()
