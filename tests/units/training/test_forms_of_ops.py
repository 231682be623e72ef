"""Promise: the form of a result follows from the factors in the table, whatever operands are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampcheck.facts.linear import Form, Operand, combined, itself
from ampcheck.ops.traits import traits

ATEN = torch.ops.aten
A, B = Operand(itself(1)), Operand(itself(2))


def number(value: float) -> Operand:
    return Operand(Form(), value)


@pytest.mark.parametrize(
    ("op", "operands", "gains", "pure"),
    [
        (ATEN.add.Tensor, (A, B), {1: 1.0, 2: 3.0}, False),
        (ATEN.sub_.Tensor, (A, A), {1: -2.0}, True),
        (ATEN.rsub.Tensor, (A, B), {1: -3.0, 2: 1.0}, False),
        (ATEN.add.Scalar, (A, number(1.0)), {1: 1.0}, False),
        (ATEN.mul.Tensor, (number(4.0), A), {1: 4.0}, True),
        (ATEN.mul.Tensor, (A, B), {}, False),
        (ATEN._foreach_div_.Scalar, (A, number(4.0)), {1: 0.25}, True),
        (ATEN.div.Tensor, (A, number(0.0)), {}, False),
        (ATEN.div.Tensor, (A,), {}, False),
        (ATEN.lerp.Scalar, (A, B, number(0.25)), {1: 0.75, 2: 0.25}, False),
        (ATEN.lerp.Tensor, (A, B, Operand(Form())), {}, False),
        (ATEN.addcmul_.default, (A, B, B, number(2.0)), {1: 1.0}, False),
        (ATEN.addmm.default, (A, B, B), {1: 0.5}, False),
        (ATEN.copy_.default, (A, B), {2: 1.0}, True),
        (ATEN.zero_.default, (A,), {}, False),
        (ATEN.neg.default, (A,), {1: -1.0}, True),
        (ATEN.exp.default, (A,), {}, False),
    ],
)
def test_a_form_follows_from_the_factors(
    op: torch._ops.OpOverload, operands: tuple[Operand, ...], gains: dict[int, float], pure: bool
) -> None:
    form = combined(traits(op), operands, alpha=3.0, beta=0.5)
    assert (dict(form.gains), form.pure) == (gains, pure)


def test_what_fills_depends_on_nothing() -> None:
    fill: Any = ATEN.fill_.Tensor
    assert combined(traits(fill), (A, B)) == Form()
