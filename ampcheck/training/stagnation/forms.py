"""How a value depends on tensors as they were before: as a multiple, as a sum of multiples, or otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Region: TypeAlias = "tuple[int, int, int]"
"""A stretch of memory that a tensor covers: its storage, where it begins there, and its number of elements."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a value depends on tensors as they were at the begin of the step.

    gains: a factor for each tensor on which it depends as a multiple, the same for all elements. mixed: those on which
    it depends in another way. pure: it is nothing but a multiple of one tensor.
    """

    gains: Mapping[Region, float] = field(default_factory=dict)
    mixed: frozenset[Region] = frozenset()
    pure: bool = False

    @property
    def origins(self) -> frozenset[Region]:
        """Every tensor on which the value depends."""
        return self.mixed | self.gains.keys()

    def gain(self, region: Region) -> float | None:
        """The factor of one tensor; None where it is not known, 0.0 for one that does not matter."""
        return None if region in self.mixed else self.gains.get(region, 0.0)


CONSTANT = Form()
"""The form of a value that depends on no tensor of the loop."""


def itself(region: Region) -> Form:
    """The form of a tensor that nothing has touched."""
    return Form({region: 1.0}, pure=True)


def scaled(form: Form, factor: float) -> Form:
    """The form of `factor * value`."""
    return Form({region: factor * gain for region, gain in form.gains.items()}, form.mixed, form.pure)


def added(one: Form, other: Form, factor: float = 1.0) -> Form:
    """The form of `one + factor * other`."""
    gains = dict(one.gains)
    for region, gain in other.gains.items():
        gains[region] = gains.get(region, 0.0) + factor * gain
    pure = one.pure and other.pure and one.gains.keys() == other.gains.keys()
    return Form(gains, one.mixed | other.mixed, pure)


def mixed(forms: Iterable[Form]) -> Form:
    """The form of any other function of values."""
    return Form(mixed=frozenset().union(*(form.origins for form in forms)))


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of an op: its form, and its value where it is one constant number for all elements."""

    form: Form
    value: float | None = None


def combine(op: str, operands: Sequence[Operand], alpha: float = 1.0, beta: float = 1.0) -> Form:
    """The form of the result of an op: `op` is its bare name (`mul` for `mul_` and `_foreach_mul_` alike).

    operands: in the order of its schema, the destination of an in-place op first. An op that is not linear in an
    operand mixes it.
    """
    forms = [operand.form for operand in operands]
    first, second = (*operands, Operand(CONSTANT), Operand(CONSTANT))[:2]
    match op:
        case "mul" if second.value is not None:
            return scaled(first.form, second.value)
        case "mul" if first.value is not None:
            return scaled(second.form, first.value)
        case "div" if second.value:
            return scaled(first.form, 1.0 / second.value)
        case "neg":
            return scaled(first.form, -1.0)
        case "add":
            return added(first.form, second.form, alpha)
        case "sub":
            return added(first.form, second.form, -alpha)
        case "rsub":
            return added(second.form, first.form, -alpha)
        case "lerp" if len(operands) > 2 and operands[2].value is not None:
            weight = operands[2].value
            return added(scaled(first.form, 1.0 - weight), second.form, weight)
        case "addcmul" | "addcdiv" | "index_add" | "scatter_add" | "addmm" | "addmv" | "addbmm" | "baddbmm" | "addr":
            return added(scaled(first.form, beta), mixed(forms[1:]))
        case "copy":
            return second.form
        case "clone" | "_to_copy":
            return first.form
        case "zero" | "fill":
            return CONSTANT
    return mixed(forms)
