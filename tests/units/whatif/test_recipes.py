"""Recipes as data, against what their libraries document."""

from __future__ import annotations

import pytest

import ampcheck
from ampcheck.whatif.recipes import ALL, PRODUCTS, RECIPES, Operand, Recipe, parse_recipes


def formats(name: str, product: str) -> tuple[str, ...]:
    return tuple(operand.format for operand in RECIPES[name][product] or ())


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "current"])
def test_gradients_are_e5m2_where_the_library_has_its_hybrid_format(name: str) -> None:
    assert formats(name, "forward") == ("float8_e4m3fn", "float8_e4m3fn")
    assert formats(name, "grad_input") == formats(name, "grad_weight") == ("float8_e5m2", "float8_e4m3fn")


def test_a_weight_has_the_bits_that_the_specifications_of_the_formats_name() -> None:
    bits = {name: recipe.bits for name, recipe in RECIPES.items()}
    assert (bits["rowwise"], bits["mxfp8"], bits["mxfp4"], bits["nvfp4"]) == (8.0, 8.25, 4.25, 4.5)


def test_a_product_that_stays_wide_has_no_operands() -> None:
    assert RECIPES["rowwise_with_gw_hp"].grad_weight is None
    assert RECIPES["rowwise_with_gw_hp"]["grad_input"][1].block == (ALL, ALL)
    assert Recipe("wide", None).bits == 16.0


def test_both_operands_of_a_product_have_one_hadamard_transform() -> None:
    for recipe in RECIPES.values():
        for operands in filter(None, map(recipe.__getitem__, PRODUCTS)):
            assert operands[0].hadamard == operands[1].hadamard


def test_recipes_are_named_or_given() -> None:
    own = Recipe("own", (Operand(block=(1, 64)), Operand()))
    assert parse_recipes(["mxfp8", own, "mxfp8"]) == (RECIPES["mxfp8"], own)
    assert parse_recipes("nvfp4") == (RECIPES["nvfp4"],)
    with pytest.raises(ampcheck.UsageError, match="recipes must be one of tensorwise"):
        parse_recipes("mxfp9")
    with pytest.raises(ampcheck.UsageError, match="a name of its own"):
        parse_recipes(["mxfp8", Recipe("mxfp8", None)])
    with pytest.raises(ampcheck.UsageError, match="a block has two sizes"):
        Operand(block=(0, 32))
    with pytest.raises(ampcheck.UsageError, match="floating-point format"):
        Operand("float7")
