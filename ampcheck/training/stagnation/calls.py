"""A call of an op by the names of its schema: what it writes to, how it runs again in float64, and the form of its
result: how a value depends on tensors as they were before, as a multiple, as a sum of multiples, or otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.torchtools.storage import Region

_STEERING = frozenset(("state_steps", "lr", "grad_scale", "found_inf"))
"""Operands of the fused optimizers that their kernels read as float32, whatever the weights are."""

_WITH_VALUES = frozenset(("mul", "div", "lerp", "add", "sub", "clamp", "clamp_min", "maximum"))
_CASTS = frozenset(("_to_copy", "clone", "copy"))
_REDUCING = frozenset(("norm", "max", "powsum"))
_BATCH_NORM = frozenset(
    (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
    )
)


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


class BoundCall:
    """An op with its arguments. `base` is its bare name: `mul` for `aten::mul`, `mul_` and `_foreach_mul_` alike."""

    def __init__(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.given: list[tuple[Any, Any]] = []
        for number, argument in enumerate(op._schema.arguments):
            if number < len(args):
                self.given.append((argument, args[number]))
            elif argument.name in kwargs:
                self.given.append((argument, kwargs[argument.name]))
        name = op._schema.name.partition("::")[2]
        self.foreach = name.startswith("_foreach_")
        self.fused = name.startswith("_fused_")
        self.base = name.removeprefix("_foreach_").removesuffix("_")
        self.batch_norm = name in _BATCH_NORM
        self.written = [
            tensor
            for argument, value in self.given
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (self.batch_norm and argument.name in ("running_mean", "running_var"))
            for tensor in leaves(value)
        ]

    @property
    def is_view(self) -> bool:
        """Whether the result is the memory of an argument, and nothing is written."""
        returns = self.op._schema.returns
        return not self.written and any(one.alias_info is not None for one in returns)

    @property
    def repeatable(self) -> bool:
        """Whether a second run changes nothing but what is written, and tells what the first would without rounding."""
        if self.op.namespace != "aten" or torch.Tag.nondeterministic_seeded in self.op.tags:
            return False
        if self.written:
            return True
        if self.foreach:
            return self.base not in _REDUCING
        return torch.Tag.pointwise in self.op.tags or self.base in _CASTS

    @property
    def into_integers(self) -> bool:
        """Whether the op reads or writes memory as integers that no cast made: the bits of a float."""
        return any(not tensor.is_floating_point() for tensor in self.written)

    def argument(self, *names: str) -> Any:
        """The value of the first of these arguments that was given."""
        return next((value for argument, value in self.given if argument.name in names), None)

    def number(self, name: str, default: float = 1.0) -> float:
        """A numeric argument."""
        value = self.argument(name)
        if isinstance(value, torch.Tensor):
            return float(value.item()) if value.numel() == 1 else float("nan")
        return default if value is None else float(value)

    def operands(self, index: int, form: Callable[[torch.Tensor], Form]) -> list[Operand]:
        """The operands in the order of the schema; of lists (foreach) the element `index`."""
        found = []
        for argument, given in self.given:
            if argument.name in ("alpha", "beta", "rounding_mode", "out"):
                continue
            value = given[index] if isinstance(given, (list, tuple)) and index < len(given) else given
            if isinstance(value, torch.Tensor):
                its = form(value)
                plain = value.dim() == 0 and not its.origins and self.base in _WITH_VALUES
                found.append(Operand(its, float(value.item()) if plain else None))
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                found.append(Operand(CONSTANT, float(value)))
            elif argument.name == "min":
                found.append(Operand(CONSTANT))
        return found

    def again(self, wide: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Run the op on `wide(tensor)` for each floating tensor, which gives its value in float64."""
        if self.batch_norm:
            return self._batch_norm_again(wide)

        def mapped(name: str, value: object) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value if self.fused and name in _STEERING else wide(value)
            if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
                return [mapped(name, one) for one in value]
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return value

        arguments = self.op._schema.arguments
        args = [mapped(arguments[number].name, value) for number, value in enumerate(self.args)]
        return self.op(*args, **{name: mapped(name, value) for name, value in self.kwargs.items()})

    def _batch_norm_again(self, wide: Callable[[torch.Tensor], torch.Tensor]) -> None:
        statistics = [self.argument(name) for name in ("running_mean", "running_var")]
        if any(one is None for one in statistics) or self.argument("training") is False:
            return
        mean, variance = (wide(one) for one in statistics)
        momentum, eps = self.momentum, self.number("eps", 1e-5)
        given = self.argument("input").to(torch.float64)
        torch.ops.aten.native_batch_norm(given, None, None, mean, variance, True, momentum, eps)

    @property
    def momentum(self) -> float:
        """What a batch norm replaces of its running statistics; 0.0 where it only reads them."""
        if self.argument("training") is False:
            return 0.0
        return self.number("momentum", self.number("exponential_average_factor", 0.0))


def leaves(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result, also in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
