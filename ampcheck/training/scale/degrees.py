"""How each value of a step depends on the loss scale: its degree, by which a scale of twice the size multiplies it.

A scaled loss has the degree 1, and so have its gradients, sums and norms of them; the norm of a gradient over that norm
has the degree 0, and a sum of both has none. What an optimizer steps must have the degree 0 after the scaler has
divided: then the training is the same at every scale. One run shows it, and the line at which it was lost.

>>> degrees = Degrees(recorder, shadow.store)
>>> with degrees.following():
...     scaler.scale(loss).backward()
>>> degrees.of(weight.grad)
Degree(powers={4384: 1.0}, ...)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.ops.traits import Traits, traits
from ampcheck.shadow.call import leaves
from ampcheck.shadow.companions import CompanionStore, has_companions
from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.private import OpOverload, backward_task, without_modes
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import users_line
from ampcheck.torchtools.storage import StorageMap, local, storage_number
from ampcheck.training.loop import parameters_of
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.scale.degree import NONE, UNKNOWN, Degree, Place, counts, is_short, is_taken, rest_of

_COLLECTIVE = frozenset(("c10d", "_c10d_functional", "fsdp"))
"""Namespaces of ops that sum, average and move values between processes."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """A gradient that depends on the loss scale when it is applied. power: None for a sum of different degrees."""

    name: str
    step: int
    power: float | None
    place: Place


@dataclass(frozen=True, slots=True)
class _Call:
    """An op that ran, of lists (foreach) one element. floating: the floating tensors among its arguments."""

    op: Traits
    values: list[Any]
    options: dict[str, Any]
    floating: list[torch.Tensor]
    result: torch.Tensor


class Degrees:
    """Follows degrees from the scaling of a loss to the steps of optimizers.

    recorder: of the calls; what it asks the scaler is not the user's. store: the companions of what ops have made.
    found: the gradients that depend on the scale when an optimizer steps, the first of each place. looked, unknown: how
    many gradients of a known and of an unknown degree were stepped. follows: whether a loss was scaled, so that there
    is anything to follow. left: whether a number or a decision that depends on the scale left the run.
    """

    def __init__(self, recorder: Recorder, store: CompanionStore) -> None:
        self.found: list[Dependence] = []
        self.looked = self.unknown = 0
        self.follows = self.left = False
        self._store = store
        self._degrees = StorageMap[Degree]()
        self._recorder = recorder
        self._scaler: int | None = None  # whose `scale` runs
        self._numbers: dict[float, Degree] = {}  # those that left the run, and their reciprocals
        self._scales: set[float] = set()  # the powers of two among them
        self._used: set[float] = set()  # those that multiplied what is followed, outside of a backward pass

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what runs inside; its ops come by `see`."""
        of_scaler = subscribed(scaler_scale=self._scale, scaler_get_scale=self._read_early)
        with of_scaler, subscribed(optimizer_step=self._stepped):
            yield

    def of(self, tensor: torch.Tensor) -> Degree | None:
        """The degree of a tensor; None of one that no scaled value went into."""
        return self._degrees.get(tensor)

    def _scale(self, scaler: Any, *_: object, **__: object) -> Iterator[None]:
        if not scaler.is_enabled():
            return
        self.follows, self._scaler = True, id(scaler)
        scale = getattr(scaler, "_scale", None)  # of an earlier run; else it is made in this call
        if isinstance(scale, torch.Tensor):
            self._degrees.put(scale, Degree({id(scaler): 1.0}))
        try:
            yield
        finally:
            self._scaler = None

    def _read_early(self, scaler: Any) -> Generator[None, Any, None]:
        """Before its first use a scaler answers without an op."""
        scale = yield
        if scaler.is_enabled() and not self._recorder.asks and getattr(scaler, "_scale", None) is None:
            self.left = True
            self._note_number(float(scale), Degree({id(scaler): 1.0}))

    def _note_number(self, number: float, degree: Degree) -> None:
        if number and math.isfinite(number):
            common = 0.125 <= abs(number) <= 8.0  # others may have this value, too
            self._numbers[number] = UNKNOWN if common else degree
            self._numbers[1.0 / number] = UNKNOWN if common else degree.times(-1.0)
            self._scales |= {n for n in (number, 1.0 / number) if math.frexp(n)[0] == 0.5}

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> Iterator[None]:
        if not self.follows:
            return
        inside = getattr(optimizer, "grad_scale", None)  # by which a fused optimizer divides in its kernel
        with without_modes(), torch.no_grad():
            divisor = NONE if inside is None else self.of(inside) or UNKNOWN
            for parameter in parameters_of(optimizer):
                self._look(parameter, divisor)
        yield
        for tensor in (t for _, t in tensors((list(parameters_of(optimizer)), list(optimizer.state.values())))):
            self._degrees.pop(tensor)  # each step is judged by itself

    def _look(self, parameter: torch.Tensor, divisor: Degree) -> None:
        if parameter.grad is None:
            return
        degree = self._of_gradient(local(parameter.grad)).over(divisor)
        self.looked, self.unknown = self.looked + degree.known, self.unknown + (not degree.known)
        place = degree.place if degree.place[0] else self._line()
        if not degree.known or not degree.depends or any(known.place == place for known in self.found):
            return
        power = None if degree.mixed or len(degree.powers) > 1 else next(iter(degree.powers.values()))
        self.found.append(Dependence(self._recorder.name_of(parameter), self._recorder.step, power, place))

    def _of_gradient(self, gradient: torch.Tensor) -> Degree:
        """The degree of a gradient. One that has none was made by ops from what does not depend on the scale, or
        written by code in C++ that calls no op."""
        if (known := self.of(gradient)) is not None:
            return known
        companions = self._store.known(gradient) if has_companions(gradient) else None
        return NONE if companions is not None and companions.written and not self.left else UNKNOWN

    def escaped(self, tensor: torch.Tensor, shared: bool) -> None:
        """A tensor leaves the run without an op, to NumPy or a list. shared: it may be written from there."""
        degree = self.of(tensor)
        self.left |= degree is not None and degree.varies
        if shared and self.follows:
            self._degrees.put(tensor, UNKNOWN)

    @property
    def decided(self) -> bool:
        """Whether the degrees answer for every scale: all are known, and no code branches by what depends on it."""
        return bool(self.looked) and not (self.unknown or self.left)

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Follow an op that ran."""
        if self._recorder.asks or not isinstance(func, OpOverload):
            return
        op = traits(func)
        if op.view or op.base == "_amp_update_scale":
            return
        if self._scaler is not None and op.base in ("full", "_to_copy"):  # the scale itself, and its copies by device
            scale = Degree({self._scaler: 1.0})
            self._put([(t, scale) for t in leaves(out) if t.numel() == 1 and self.of(t) is None])
        elif op.base == "_amp_foreach_non_finite_check_and_unscale":
            factor = self._of_gradient(args[2])  # before a fused optimizer it is 1, and looks for infinities alone
            self._put([(gradient, self._of_gradient(gradient).of_product(factor)) for gradient in args[0]])
        else:
            held = [degree for t in leaves((*args, *kwargs.values())) if (degree := self.of(t)) is not None]
            if op.leaves and held:
                self._leave(held[0], out)
            elif held:
                counts = torch.Tag.dynamic_output_shape in func.tags  # a shape is read without an op
                self.left |= counts and any(not degree.known for degree in held)
                self._follow(op, args, kwargs, out)

    def _leave(self, degree: Degree, value: object) -> None:
        """A number or a decision leaves the run."""
        self.left |= degree.varies
        if degree.powers and type(value) is float and degree.known and not degree.mixed:
            self._note_number(value, degree)

    def _follow(self, op: Traits, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in op.writes]
        results: list[tuple[torch.Tensor, Degree]] = []
        for number, target in enumerate(leaves(written) or leaves(out)):
            if target.is_floating_point() or target.is_complex():
                degree = self._of_result(op, args, kwargs, number if op.foreach else None, target)
                results.append((target, degree or NONE))
            else:
                self._decide(op, leaves((*args, *kwargs.values())), target)
        self._put(results)

    def _put(self, results: Sequence[tuple[torch.Tensor, Degree]]) -> None:
        """Note the degrees of results. Those that share memory, as views of one buffer do, have one together."""
        written: dict[int | None, tuple[torch.Tensor, Degree, int]] = {}
        for target, degree in results:
            number = storage_number(target)
            _, other, size = written.get(number, (target, degree, 0))
            alike = (other.powers, other.mixed, other.known) == (degree.powers, degree.mixed, degree.known)
            written[number] = target, degree if alike else UNKNOWN, size + target.nbytes
        for number, (target, degree, size) in written.items():
            if number is None:
                continue
            before = self.of(target)
            part = size < target.untyped_storage().nbytes()
            if part and before is not None and (before.powers, before.known) != (degree.powers, degree.known):
                degree = UNKNOWN  # the rest of the memory has another
            if degree != NONE:
                self._degrees.put(target, degree)
            elif not part:
                self._degrees.pop(target)

    def _decide(self, op: Traits, operands: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """A decision may come out otherwise at another scale, unless all that it compares depends on that alike."""
        degrees = [self._degree(operand) or NONE for operand in operands]
        ranks = op.decides in ("best", "extreme", "selection", "support")  # at every scale alike
        alike = (ranks or len(degrees) > 1) and len({degree.signature for degree in degrees}) == 1
        if op.decides != "finite" and not (alike and degrees[0].known) and any(d.varies for d in degrees):
            self._degrees.put(result, UNKNOWN)

    def _of_result(
        self, op: Traits, args: Sequence[Any], kwargs: dict[str, Any], number: int | None, result: torch.Tensor
    ) -> Degree | None:
        """The degree of a result; None where no operand has one."""

        def item(value: Any) -> Any:
            return value[number] if number is not None and isinstance(value, (list, tuple)) else value

        values, options = list(map(item, args)), {name: item(value) for name, value in kwargs.items()}
        if op.copies is not None:
            return self._degree(values[op.copies])
        if op.fills != "part" and (op.unset or op.shaped or op.resets or op.fills):
            return None
        operands = leaves((*values, *options.values()))
        held = [degree for t in operands if (degree := self._degree(t)) is not None]
        if not held or any(not degree.known for degree in held):
            return UNKNOWN if held else None  # an unknown mask chooses among the values, too
        call = _Call(op, values, options, [t for t in operands if t.is_floating_point() or t.is_complex()], result)
        for rule in (self._product, self._power, self._terms, self._moved):
            if (made := rule(call)) is not None:
                return made
        return UNKNOWN if any(degree.depends for degree in held) else held[0]

    def _product(self, call: _Call) -> Degree | None:
        """The degree of a product or a quotient, to which a term may be added."""
        op, values = call.op, call.values
        if op.base in ("mul", "div") and len(values) > 1 and not call.options.get("rounding_mode"):
            left, right = map(self._of_factor, values[:2])
            return self._combined(left, right, divides=op.base == "div")
        if any(self._of_factor(value) is None for value in (*values, *call.options.values())):
            return UNKNOWN  # a number such as alpha
        if op.factors:
            product = self._combined(*(self._of_factor(values[i]) for i in op.factors))
            added = values[0] if op.linear else values[2] if op.base == "convolution" else None
        elif op.base in ("addcmul", "addcdiv"):
            product = self._combined(*map(self._of_factor, values[1:3]), divides=bool(op.divides))
            added = values[0]
            if op.writes and self._degree(added) is None:
                return UNKNOWN  # what it held is overwritten
        else:
            return None
        return self._sum(call.result, [(product, None), (self._degree(added), added)])

    def _power(self, call: _Call) -> Degree | None:
        """The degree of a power of one operand, and of a backward pass, which is linear in the gradient it is given."""
        first, *others = map(self._of_factor, call.floating)
        if first is None or any(degree is not None and degree.depends for degree in others):
            return None
        exponent = call.values[1] if call.op.base == "pow" else call.op.degree
        if isinstance(exponent, (int, float)) and (exponent != 1 or call.op.base == "pow"):
            return first.times(exponent)
        return first if "backward" in call.op.base else None

    def _terms(self, call: _Call) -> Degree | None:
        """The degree of a sum, and of a choice among several values."""
        op, values, result = call.op, call.values, call.result
        if not (op.adds or op.limits):
            return None
        terms = values[1:] if op.base == "where" else values[:2] if op.adds else [*values, *call.options.values()]
        if any(self._of_factor(other) is not NONE for other in values[2:] if op.adds and other is not None):
            return UNKNOWN  # a weight
        held = [self._degree(term) for term in terms]
        if op.writes and isinstance(values[0], torch.Tensor) and result.data_ptr() == values[0].data_ptr():
            terms[0] = None
            if held[0] is None:  # a constant, which is overwritten
                if op.base not in ("add", "sub") or not isinstance(values[1], torch.Tensor):
                    return UNKNOWN
                sign = (1 if op.base == "add" else -1) * call.options.get("alpha", 1)
                terms[0] = rest_of(result, values[1], sign)
        pairs = zip(held, terms, strict=True)
        return self._sum(result, [(d, t) for d, t in pairs if not op.limits or is_taken(t, result)])

    def _moved(self, call: _Call) -> Degree | None:
        """The degree of elements that are moved, or measured together."""
        op, degrees = call.op, [self._degree(t) for t in call.floating]
        if op.fills == "part":
            numbers = (*call.values[2:], *call.options.values())
            return UNKNOWN if any(v for v in numbers if isinstance(v, (int, float))) else degrees[0] or NONE
        if not (op.places or op.moves or op.degree == 1 or op.namespace in _COLLECTIVE):
            return None
        if op.writes and op.namespace == "aten" and len({(degree or NONE).signature for degree in degrees}) > 1:
            return UNKNOWN  # some elements are overwritten
        made = self._sum(call.result, list(zip(degrees, call.floating, strict=True)))
        return made if any(d is not None and d.mixed for d in degrees) or not made.mixed else UNKNOWN  # side by side

    def _degree(self, value: Any) -> Degree | None:
        return self._degrees.get(value) if isinstance(value, torch.Tensor) else None

    def _of_factor(self, value: Any) -> Degree | None:
        """The degree of a factor; None of a number that may have been made of one that left the run."""
        if isinstance(value, torch.Tensor):
            return self._degree(value) or NONE
        if not self.left or type(value) not in (int, float):
            return NONE
        if backward_task() != -1:  # its numbers are those of the forward pass, or of the formula of a derivative
            return self._numbers[value] if value in self._used else NONE
        if type(value) is int:  # a size, or the scale
            return None if value in self._numbers else NONE
        if value in self._numbers:
            self._used.add(value)
            return self._numbers[value]
        return NONE if self._is_written(value) else None

    def _is_written(self, value: float) -> bool:
        """Whether somebody wrote a number down: it has few digits, and is no product of such a number and a scale."""
        return is_short(value) and not any(is_short(value / scale) for scale in self._scales)

    def _combined(self, left: Degree | None, right: Degree | None, *, divides: bool = False) -> Degree:
        """The degree of a product or quotient; where both operands depend on the scale, the line names it."""
        if left is None or right is None:  # a number that may depend on the scale
            return UNKNOWN
        made = left.over(right) if divides else left.of_product(right)
        if not (left.powers and right.powers) or made.place[0] or self._scaler is not None:
            return made
        return Degree(made.powers, self._line(), made.mixed, made.known)

    def _sum(self, result: torch.Tensor, terms: Sequence[tuple[Degree | None, Any]]) -> Degree:
        """The degree of what several terms make; a term is None where its values are gone. Zeros have every degree."""
        counted = [(degree or NONE, term) for degree, term in terms if degree is not None or counts(term, result)]
        if len({degree.signature for degree, _ in counted}) > 1:  # else nothing is looked at
            counted = [(d, t) for d, t in counted if not isinstance(t, torch.Tensor) or bool(t.any())]
        degrees = [degree for degree, _ in counted] or [NONE]
        first = next((d for d in degrees if d.mixed), next((d for d in degrees if d.place[0]), degrees[0]))
        if first.mixed or len({degree.signature for degree in degrees}) == 1:
            return first
        if self.left and not all(degree.powers for degree in degrees):
            return UNKNOWN  # a constant may be made of a number that left the run
        return Degree(degrees[0].powers, self._line(), mixed=True)

    def _line(self) -> Place:
        return users_line(sys._getframe())
