"""Einsums that are linear layers: each dimension of the weight is one of the sum, or new in the result."""

from __future__ import annotations

import string
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Projection:
    """The dimensions of input, weight and result of an einsum, a letter for each."""

    input: str
    weight: str
    result: str

    @property
    def kept(self) -> str:
        """The input's dimensions that are in the result."""
        return "".join(letter for letter in self.input if letter not in self.weight)

    @property
    def inner(self) -> str:
        """The dimensions that are summed over."""
        return "".join(letter for letter in self.input if letter in self.weight)

    @property
    def new(self) -> str:
        """The weight's dimensions that are in the result."""
        return "".join(letter for letter in self.weight if letter not in self.input)

    @property
    def is_linear(self) -> bool:
        """True if no dimension is a batch of weights, is summed over alone, or occurs twice."""
        terms = (self.input, self.weight, self.result)
        plain = all(term.isalpha() and len(set(term)) == len(term) for term in terms)
        return plain and bool(self.inner and self.new) and sorted(self.result) == sorted(self.kept + self.new)

    def rows(self, input: torch.Tensor) -> torch.Tensor:
        """The input with what is summed over as its last dimension."""
        return _ordered(input, self.input, self.kept + self.inner).flatten(len(self.kept))

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as (new, inner)."""
        ordered = _ordered(weight, self.weight, self.new + self.inner)
        return ordered.flatten(len(self.new)).flatten(0, len(self.new) - 1)

    def ordered(self, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product of both, in the dimensions of the result."""
        sizes = [weight.shape[self.weight.index(letter)] for letter in self.new]
        return _ordered(product.reshape(*product.shape[:-1], *sizes), self.kept + self.new, self.result)


def _ordered(tensor: torch.Tensor, letters: str, wanted: str) -> torch.Tensor:
    return tensor.permute([letters.index(letter) for letter in wanted])


def projection(equation: object, input: torch.Tensor, weight: torch.Tensor, *, swapped: bool) -> Projection | None:
    """Return what an einsum with an explicit result does, where it is a linear layer. swapped: the weight is written
    first."""
    if not isinstance(equation, str) or equation.count(",") != 1 or equation.count("->") != 1:
        return None
    operands, _, result = equation.replace(" ", "").partition("->")
    of_input, of_weight = operands.split(",")[:: -1 if swapped else 1]
    if "..." in of_input:
        unused = [letter for letter in string.ascii_letters if letter not in equation]
        dots = "".join(unused[: input.dim() - len(of_input) + 3])
        of_input, result = of_input.replace("...", dots), result.replace("...", dots)
    found = Projection(of_input, of_weight, result)
    fits = (len(of_input), len(of_weight)) == (input.dim(), weight.dim())
    return found if fits and found.is_linear else None
