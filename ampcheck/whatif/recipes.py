"""Recipes as data: in which format, and with which scales, each operand of a linear layer's three products is.

A linear layer computes `output = input @ weight.T`, `grad_input = grad @ weight` and `grad_weight = grad.T @ input`. A
recipe gives the two operands of each, or None where the product stays in 16 bits. Formats: OCP 8-bit Floating Point
(OFP8) and OCP Microscaling (MX), in `ampcheck.core.formats`. Recipes: torchao's `float8` and `mx_formats`,
TransformerEngine's `common.recipe`, DeepGEMM's casts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from ampcheck.core.arguments import parse_names
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FloatFormat, format_of

Scale: TypeAlias = Literal["float32", "power of two", "reciprocal", "e8m0 floor", "e8m0 ceil", "e4m3", "e4m3 alone"]
"""Scale of a block: `float32`, the largest value of the format over the largest of the block; `power of two`, that
rounded down to one; `reciprocal`, the same as float32 by the other factor, as DeepGEMM has it; `e8m0 floor`, as the MX
specification has it in 6.3; `e8m0 ceil`, with which nothing saturates; `e4m3`, relative to one float32 scale of the
whole tensor; `e4m3 alone`, without it, as torchao has it where no scale of the tensor is given."""

ALL = -1
"""In a block: as far as the tensor goes."""

PRODUCTS = ("forward", "grad_input", "grad_weight")


@dataclass(frozen=True, slots=True)
class Operand:
    """The format of one operand of a product.

    format: of its elements. block: rows and elements of the inner dimension that share a scale; (ALL, ALL) is
    tensorwise, (1, ALL) rowwise. least: the smallest amax of a block that is scaled. stochastic: rounded up with the
    probability of the distance, and not to nearest. hadamard: length of the random Hadamard transform along the inner
    dimension, 0 for none. history: calls whose largest amax gives the scale of the next one; 0 for its own.
    Raises `UsageError` for a block of the wrong shape.
    """

    format: str = "float8_e4m3fn"
    block: tuple[int, int] = (ALL, ALL)
    scale: Scale = "float32"
    least: float = 1e-12
    stochastic: bool = False
    hadamard: int = 0
    history: int = 0

    def __post_init__(self) -> None:
        format_of(self.format)
        if len(self.block) != 2 or any(size < 1 and size != ALL for size in self.block):
            raise UsageError(f"a block has two sizes, each at least 1 or ALL; found {self.block}")

    @property
    def element(self) -> FloatFormat:
        """The format of the elements."""
        return format_of(self.format)

    @property
    def bits(self) -> float:
        """Bits per element with the scales of blocks; those of a row or tensor do not count."""
        rows, inner = self.block
        if ALL in self.block:
            return float(self.element.bits)
        return self.element.bits + (32 if self.scale in ("float32", "power of two", "reciprocal") else 8) / rows / inner


Product: TypeAlias = "tuple[Operand, Operand] | None"
"""The operands of a product, in the order of the formulas above with the transposed one second; None: in 16 bits."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The formats of the three products of a linear layer. source: where the recipe is from."""

    name: str
    forward: Product
    grad_input: Product = None
    grad_weight: Product = None
    source: str = ""

    def __getitem__(self, product: str) -> Product:
        """The operands of one of `PRODUCTS`."""
        operands: Product = getattr(self, product)
        return operands

    @property
    def bits(self) -> float:
        """Bits per weight, as the forward product reads it; 16 where that stays in 16 bits."""
        return self.forward[1].bits if self.forward else 16.0


def _recipe(
    name: str,
    source: str,
    input: Operand,
    *,
    weight: Operand | None = None,
    grad: Operand | None = None,
) -> Recipe:
    """A recipe whose three products have the same formats of input, weight and gradient of the output."""
    weight, grad = weight or input, grad or input
    return Recipe(name, (input, weight), (grad, weight), (grad, input), source)


_TENSOR, _E5M2 = Operand(), Operand("float8_e5m2")
_ROW = Operand(block=(1, ALL), scale="power of two")
_DELAYED = replace(_TENSOR, least=0.0, history=1024)
_MX = Operand(block=(1, 32), scale="e8m0 ceil", least=0.0)
_TILE, _SQUARE = (1, 128), (128, 128)
_POWER = Operand(block=_TILE, scale="power of two", least=0.0)
_DEEP = Operand(block=_TILE, scale="reciprocal", least=1e-4)
_NV = Operand("float4_e2m1fn", (1, 16), "e4m3", 0.0)
_NV_WEIGHT = replace(_NV, block=(16, 16))
_NV_GRAD = replace(_NV, stochastic=True)

_TE_NVFP4 = Recipe(
    "te-nvfp4",
    (_NV, _NV_WEIGHT),
    (_NV_GRAD, _NV_WEIGHT),
    (replace(_NV_GRAD, hadamard=16), replace(_NV, hadamard=16)),
    "TransformerEngine NVFP4BlockScaling",
)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            _recipe("tensorwise", "torchao float8", _TENSOR, grad=_E5M2),
            _recipe("rowwise", "torchao float8", _ROW),
            Recipe(
                "rowwise_with_gw_hp",
                (_ROW, _ROW),
                (_ROW, replace(_TENSOR, scale="power of two")),
                None,
                "torchao float8",
            ),
            _recipe("mxfp8", "torchao mx_formats", _MX),
            _recipe("mxfp4", "torchao mx_formats", replace(_MX, format="float4_e2m1fn", scale="e8m0 floor")),
            _recipe("nvfp4", "torchao mx_formats", _NV),
            _recipe(
                "delayed",
                "TransformerEngine DelayedScaling",
                _DELAYED,
                grad=replace(_DELAYED, format="float8_e5m2"),
            ),
            _recipe(
                "current",
                "TransformerEngine Float8CurrentScaling",
                replace(_TENSOR, least=0.0),
                grad=replace(_E5M2, least=0.0),
            ),
            _recipe(
                "te-blockwise",
                "TransformerEngine Float8BlockScaling",
                _POWER,
                weight=replace(_POWER, block=_SQUARE),
            ),
            _recipe("te-mxfp8", "TransformerEngine MXFP8BlockScaling", _MX),
            _TE_NVFP4,
            _recipe("blockwise", "DeepSeek-V3, DeepGEMM", _DEEP, weight=replace(_DEEP, block=_SQUARE)),
        )
    }
)
"""The recipes that are shipped, by name."""


def parse_recipes(recipes: str | Recipe | Iterable[str | Recipe]) -> tuple[Recipe, ...]:
    """The named recipes, and those that are given as such, each once. Raises `UsageError` for an unknown name."""
    items = (recipes,) if isinstance(recipes, (str, Recipe)) else tuple(recipes)
    chosen = [item if isinstance(item, Recipe) else RECIPES[parse_names(item, "recipes", RECIPES)[0]] for item in items]
    by_name = {recipe.name: recipe for recipe in chosen}
    if not by_name or len(by_name) < len(set(chosen)):
        raise UsageError(f"recipes must name one of {', '.join(RECIPES)}, or be a Recipe with a name of its own")
    return tuple(by_name.values())
