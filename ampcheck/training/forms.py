"""How a value depends on the tensors of the loop: as a multiple of some, as a sum with multiples, or otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import NamedTuple

_LINEAR = frozenset(("addcmul", "addcdiv", "index_add", "scatter_add", "addmm", "addmv", "addbmm", "baddbmm", "addr"))


class Form(NamedTuple):
    """How a value depends on origins. mask: a bit for each origin; gains: the factors of those that enter as a
    multiple, by bit; pure: the value is nothing but a multiple of one origin."""

    mask: int = 0
    gains: Mapping[int, float] = MappingProxyType({})
    pure: bool = False

    def gain(self, bit: int) -> float | None:
        """The factor of one origin; None where it is not known, 0.0 for one that does not matter."""
        return self.gains.get(bit, None if self.mask & bit else 0.0)

    def times(self, factor: float) -> Form:
        """The form of a multiple."""
        return Form(self.mask, {bit: factor * gain for bit, gain in self.gains.items()}, self.pure)

    def plus(self, other: Form, factor: float = 1.0) -> Form:
        """The form of `self + factor * other`."""
        # The bits of the gains are distinct, so that their sum is their union.
        shared = self.mask & other.mask & ~(sum(self.gains) & sum(other.gains))
        gains = {bit: gain for bit, gain in self.gains.items() if not bit & shared}
        for bit, gain in other.gains.items():
            if not bit & shared:
                gains[bit] = gains.get(bit, 0.0) + factor * gain
        return Form(self.mask | other.mask, gains, self.pure and other.pure and self.gains.keys() == other.gains.keys())

    def without(self, hidden: int) -> Form:
        """The form without some of its origins."""
        if not hidden & self.mask:
            return self
        return Form(self.mask & ~hidden, {bit: gain for bit, gain in self.gains.items() if not bit & hidden})


def itself(bit: int) -> Form:
    """The form of an origin that nothing has touched."""
    return Form(bit, {bit: 1.0}, pure=True)


def mixed(forms: Sequence[Form]) -> Form:
    """The form of any other function of values."""
    return Form(reduce(or_, (form.mask for form in forms), 0))


class Operand(NamedTuple):
    """An operand of an op: its form, and its value where it is one constant number for all elements."""

    form: Form
    number: float | None = None


def combined(base: str, operands: Sequence[Operand], alpha: float = 1.0, beta: float = 1.0) -> Form:
    """The form of the result of an op. base: `mul` for `mul_` and `_foreach_mul_` alike."""
    forms = [operand.form for operand in operands]
    first, second = (*operands, Operand(Form()), Operand(Form()))[:2]
    match base:
        case "mul" if second.number is not None:
            return first.form.times(second.number)
        case "mul" if first.number is not None:
            return second.form.times(first.number)
        case "div" if second.number:
            return first.form.times(1.0 / second.number)
        case "neg":
            return first.form.times(-1.0)
        case "add" | "sub":
            return first.form.plus(second.form, alpha if base == "add" else -alpha)
        case "rsub":
            return second.form.plus(first.form, -alpha)
        case "lerp" if len(operands) > 2 and operands[2].number is not None:
            weight = operands[2].number
            return first.form.times(1.0 - weight).plus(second.form, weight)
        case base if base in _LINEAR:
            return first.form.times(beta).plus(mixed(forms[1:]))
        case "copy":
            return second.form
        case "clone" | "_to_copy":
            return first.form
        case "zero" | "fill":
            return Form()
    return mixed(forms)
