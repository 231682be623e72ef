"""Promise: the table has one row per op, each trait has a meaning, and each overload has its traits."""

from __future__ import annotations

import doctest
from collections import Counter
from dataclasses import fields

import pytest
import torch

from ampcheck.ops.table import ROWS, TABLE
from ampcheck.ops.traits import Traits, traits

ATEN = torch.ops.aten
SCHEMAS = {schema.name for schema in torch._C._jit_get_all_schemas()}


def test_no_op_stands_in_two_rows() -> None:
    names = Counter(name for line in TABLE.splitlines() if "|" in line for name in line.partition("|")[0].split())
    assert [name for name, rows in names.items() if rows > 1] == []
    assert len(names) == len(ROWS) > 150


def test_each_word_is_a_trait() -> None:
    known = {field.name for field in fields(Traits)} | {"updates"}
    assert {trait for row in ROWS.values() for trait in row} <= known


@pytest.mark.needs_torch("2.13", "the table names ops that older releases do not have")
def test_each_row_is_of_an_op() -> None:
    quantized = {name for name in ROWS if "::" in name}
    variants = {
        name: {f"aten::{name}", f"aten::{name}_", f"aten::_foreach_{name}"} for name in ROWS if "::" not in name
    }
    assert {name for name, titles in variants.items() if not titles & SCHEMAS} == set()
    assert quantized <= SCHEMAS


def test_the_values_of_words() -> None:
    assert ROWS["mul"]["whole"] is True
    assert ROWS["copy"]["copies"] == 1
    assert ROWS["addmm"]["factors"] == (1, 2)
    assert ROWS["sub"]["linear"] == ("1", "-alpha")
    assert ROWS["reciprocal"]["divides"] == ("self",)
    assert ROWS["mm"]["terms"] == "last"


def test_every_overload_has_traits() -> None:
    overloads = [
        getattr(packet, name)
        for packet in (getattr(ATEN, name) for name in dir(ATEN))
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    ]
    assert len(overloads) > 300
    for op in overloads:
        assert traits(op).name in op._schema.name
        assert traits(op) is traits(op)


def test_variants_have_the_traits_of_their_op_unless_what_they_read_is_gone() -> None:
    assert all(traits(op).moves for op in (ATEN.neg.default, ATEN.neg_.default, ATEN._foreach_neg.default))
    assert traits(ATEN.floor.default).decides == "integer"
    assert traits(ATEN.floor_.default).decides == traits(ATEN._foreach_floor.default).decides == ""
    assert traits(ATEN.frac_.default).keeps
    assert [traits(op).keeps for op in (ATEN.frac.default, ATEN._foreach_frac_.default)] == [False, False]


def test_arguments_that_the_schema_keeps_to_itself() -> None:
    assert traits(ATEN.native_batch_norm.default).writes == ((3, "running_mean"), (4, "running_var"))
    assert traits(ATEN.mul_.Tensor).writes == ((0, "self"),)


def test_an_op_without_a_row_has_the_traits_of_its_tags() -> None:
    assert "sinh" not in ROWS
    op = traits(ATEN.sinh.default)
    assert (op.pointwise, op.promotes, op.moves, op.reduces, op.whole) == (True, True, False, False, False)
    assert traits(ATEN.bernoulli.default).random
    assert traits(ATEN.randn_like.default).shaped
    assert (traits(ATEN.alias_copy.default).places, traits(ATEN.alias_copy.default).moves) == (True, True)
    assert traits(ATEN._scaled_dot_product_flash_attention.default).terms == "heads"


def test_another_namespace_has_no_row_of_an_op_of_the_same_name() -> None:
    with torch.library._scoped_library("ops_of_tests", "FRAGMENT") as library:
        library.define("add(Tensor self, Tensor other) -> (Tensor, Tensor)")
        op = traits(torch.ops.ops_of_tests.add.default)
    assert (op.name, op.adds, op.checks) == ("ops_of_tests::add", False, True)


def test_the_example() -> None:
    import sys

    import ampcheck.ops.traits  # noqa: F401

    assert doctest.testmod(sys.modules["ampcheck.ops.traits"]) == doctest.TestResults(failed=0, attempted=3)
