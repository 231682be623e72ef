"""Dependence of a value on the tensors of the loop: as a multiple of some, as a sum with multiples, or otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter, or_
from types import MappingProxyType
from typing import NamedTuple

import torch

from ampcheck.facts.parts import PartMap
from ampcheck.facts.store import StorageMap
from ampcheck.ops.traits import Traits


class Form(NamedTuple):
    """Dependence of a value on origins. mask: a bit for each origin; gains: the factors of those that enter as a
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


_CONSTANT = Form()


def itself(bit: int) -> Form:
    """The form of an origin that nothing has touched."""
    return Form(bit, {bit: 1.0}, pure=True)


def mixed(forms: Sequence[Form]) -> Form:
    """The form of any other function of values."""
    return Form(reduce(or_, map(attrgetter("mask"), forms), 0))


class Operand(NamedTuple):
    """An operand of an op: its form, and its value where it is one constant number for all elements."""

    form: Form
    number: float | None = None


def combined(op: Traits, operands: Sequence[Operand], alpha: float = 1.0, beta: float = 1.0) -> Form:
    """The form of the result of an op."""
    if op.fills in ("units", "number"):
        return Form()
    operands = [*operands, *([Operand(Form())] * (len(op.linear) - len(operands)))]
    factors = _factors(op, [operand.number for operand in operands], alpha, beta)
    terms = [form.times(factor) for (form, _), factor in zip(operands, factors, strict=False) if factor is not None]
    rest = operands[len(op.linear) if terms else 0 :]
    if not terms or any(operand.number is None for operand in rest):
        terms.append(mixed([operand.form for operand in rest]))
    return reduce(Form.plus, terms)


def _factors(op: Traits, numbers: Sequence[float | None], alpha: float, beta: float) -> Iterator[float | None]:
    """The factors of operands, see `Traits.linear`; None where one is no known number, and for a term of none."""
    weight = numbers[2] if len(numbers) > 2 else None
    known = {"1": 1.0, "-1": -1.0, "alpha": alpha, "-alpha": -alpha, "beta": beta, "weight": weight}
    known["1-weight"] = None if weight is None else 1.0 - weight
    for position, name in enumerate(op.linear):
        other = numbers[1 - position] if len(numbers) > 1 else None
        known |= {"other": other, "1/other": 1.0 / other if other else None}
        yield known.get(name)


def _either(first: Form, second: Form) -> Form:
    """The form of what two parts of a memory hold together."""
    same = {bit: gain for bit, gain in first.gains.items() if second.gains.get(bit) == gain}
    return Form(first.mask | second.mask, same)


class LinearFacts(PartMap[Form]):
    """The forms of the values in each part of memory, and the origins that they are made of."""

    def __init__(self) -> None:
        super().__init__(_either)
        self._bits, self._count = StorageMap[int](), 0

    def new_origin(self) -> int:
        """The bit of a new origin."""
        self._count += 1
        return 1 << (self._count - 1)

    def enter(self, tensor: torch.Tensor) -> int:
        """Make the present values of a tensor an origin; its bit."""
        bit = self.new_origin()
        self._bits.put(tensor, bit)
        self.note(tensor, itself(bit))
        return bit

    def bit_of(self, key: object) -> int:
        """The bit of a tensor, or a storage, that entered; 0 for another."""
        return self._bits.get(key) or 0

    def form(self, tensor: torch.Tensor) -> Form:
        """The form of the values of a tensor."""
        return self.get(tensor) or _CONSTANT

    def note(self, tensor: torch.Tensor, form: Form) -> None:
        """Note the form of the values of a tensor; other parts of its memory keep theirs."""
        if form.mask or self.get(tensor) is not None:
            self.put(tensor, form)

    def depend(self, tensor: torch.Tensor, mask: int) -> None:
        """Let what a tensor holds depend on further origins."""
        form = self.form(tensor)
        self.put(tensor, form._replace(mask=form.mask | mask))
