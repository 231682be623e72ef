"""How each value of a step depends on the loss scale: its degree, by which a scale of twice the size multiplies it.

A scaled loss has the degree 1, and so have its gradients, sums and norms of them; the norm of a gradient over that norm
has the degree 0, and a sum of both has none. What an optimizer steps must have the degree 0 after the scaler has
divided: then the training is the same at every scale. One run shows it, and the line at which it was lost.

>>> degrees = Degrees()
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
from dataclasses import dataclass, field
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

_SLIGHT = 2.0**-11
"""What changes a result by less than the roundoff of float16 is no term of it, as an eps beside a norm."""

_COLLECTIVE = frozenset(("c10d", "_c10d_functional", "fsdp"))
"""Namespaces of ops that sum, average and move values between processes."""

Place = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Degree:
    """powers: by scaler (its `id`), without zeros. place: the line of the user's code that made it so, where that
    combined values that depend on the scale. mixed: a sum of different degrees; known: whether this is known."""

    powers: dict[int, float] = field(default_factory=dict)
    place: Place = ("", None)
    mixed: bool = False
    known: bool = True

    @property
    def depends(self) -> bool:
        """Whether it is known to change with the scale."""
        return self.mixed or bool(self.powers)

    def times(self, exponent: float) -> Degree:
        """The degree of a power."""
        powers = {s: p * exponent for s, p in self.powers.items() if exponent}
        return Degree(powers, self.place, self.mixed, self.known)

    def over(self, other: Degree) -> Degree:
        """The degree of a quotient."""
        return self.of_product(other.times(-1.0))

    def of_product(self, other: Degree) -> Degree:
        """The degree of a product."""
        powers = {s: self.powers.get(s, 0.0) + other.powers.get(s, 0.0) for s in {*self.powers, *other.powers}}
        kept = {s: power for s, power in powers.items() if power}
        place = self.place if self.place[0] else other.place
        return Degree(kept, place, self.mixed or other.mixed, self.known and other.known)


_NONE = Degree()
_UNKNOWN = Degree(known=False)


@dataclass(frozen=True, slots=True)
class Dependence:
    """A gradient that depends on the loss scale when it is applied. power: None for a sum of different degrees."""

    name: str
    step: int
    power: float | None
    place: Place


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
            self._numbers[number] = _UNKNOWN if common else degree
            self._numbers[1.0 / number] = _UNKNOWN if common else degree.times(-1.0)
            self._scales |= {n for n in (number, 1.0 / number) if math.frexp(n)[0] == 0.5}

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> Iterator[None]:
        if not self.follows:
            return
        with without_modes(), torch.no_grad():
            if getattr(optimizer, "grad_scale", None) is None:  # else it unscales in its kernel
                for parameter in parameters_of(optimizer):
                    self._look(parameter)
        yield
        for tensor in (t for _, t in tensors((list(parameters_of(optimizer)), list(optimizer.state.values())))):
            self._degrees.pop(tensor)  # each step is judged by itself

    def _look(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        degree = self._of_gradient(local(parameter.grad))
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
        return _NONE if companions is not None and companions.written and not self._numbers else _UNKNOWN

    @property
    def decided(self) -> bool:
        """Whether the degrees answer for every scale: all are known, and no code branches by what depends on it."""
        return bool(self.looked) and not (self.unknown or self.left)

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Follow an op that ran."""
        if self._recorder.asks or not isinstance(func, OpOverload):
            return
        op = traits(func)
        if op.view:
            return
        if self._scaler is not None and op.base in ("full", "_to_copy"):  # the scale itself, and its copies by device
            for result in leaves(out):
                if result.numel() == 1 and self.of(result) is None:
                    self._degrees.put(result, Degree({self._scaler: 1.0}))
            return
        if op.base == "_amp_update_scale":
            return
        operands = leaves((*args, *kwargs.values()))
        if not any(self._degrees.get(t) is not None for t in operands):
            return
        if op.leaves:
            degree = self.of(args[0])
            if degree is not None and (degree.depends or not degree.known):
                self.left = True
                if type(out) is float and degree.known and not degree.mixed:
                    self._note_number(out, degree)
            return
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in op.writes]
        if op.base == "_amp_foreach_non_finite_check_and_unscale":
            factor = self.of(args[2]) or _UNKNOWN
            self._put([(gradient, self._of_gradient(gradient).of_product(factor)) for gradient in args[0]])
            return
        targets = leaves(written) or leaves(out)
        results: list[tuple[torch.Tensor, Degree]] = []
        for number, target in enumerate(targets):
            if not target.is_floating_point() and not target.is_complex():
                self._decide(op, operands, target)
                continue
            degree = self._of_result(op, args, kwargs, number if op.foreach else None, target)
            results.append((target, degree or _NONE))
        self._put(results)

    def _put(self, results: Sequence[tuple[torch.Tensor, Degree]]) -> None:
        """Note the degrees of results. Those that share memory, as views of one buffer do, have one together."""
        written: dict[int | None, tuple[torch.Tensor, Degree, int]] = {}
        for target, degree in results:
            number = storage_number(target)
            _, other, size = written.get(number, (target, degree, 0))
            alike = (other.powers, other.mixed, other.known) == (degree.powers, degree.mixed, degree.known)
            written[number] = target, degree if alike else _UNKNOWN, size + target.nbytes
        for number, (target, degree, size) in written.items():
            if number is None:
                continue
            before = self.of(target)
            part = size < target.untyped_storage().nbytes()
            if part and before is not None and (before.powers, before.known) != (degree.powers, degree.known):
                degree = _UNKNOWN  # the rest of the memory has another
            if degree != _NONE:
                self._degrees.put(target, degree)
            elif not part:
                self._degrees.pop(target)

    def _decide(self, op: Traits, operands: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """A decision may come out otherwise at another scale, unless all that it compares depends on that alike."""
        degrees = [self._degree(operand) or _NONE for operand in operands]
        alike = len(degrees) > 1 and len({tuple(sorted(d.powers.items())) for d in degrees}) == 1
        if op.decides == "finite" or alike:
            return
        if any(degree.depends or not degree.known for degree in degrees):
            self._degrees.put(result, _UNKNOWN)

    def _of_result(
        self, op: Traits, args: Sequence[Any], kwargs: dict[str, Any], number: int | None, result: torch.Tensor
    ) -> Degree | None:
        """The degree of a result; None where no operand has one."""

        def item(value: Any) -> Any:
            return value[number] if number is not None and isinstance(value, (list, tuple)) else value

        values = [item(value) for value in args]
        options = {name: item(value) for name, value in kwargs.items()}
        if op.copies is not None:
            return self._degree(values[op.copies])
        if op.fills == "part":  # of the result
            zero = not any(v for v in (*values[2:], *options.values()) if isinstance(v, (int, float)))
            return self._degree(values[0]) if zero else _UNKNOWN
        if op.fills or op.unset or op.shaped or op.resets:
            return None
        floating = [t for t in leaves((*values, *options.values())) if t.is_floating_point() or t.is_complex()]
        degrees = [self._degree(t) for t in floating]
        known = [degree for degree in degrees if degree is not None]
        if any(not degree.known for degree in known):
            return _UNKNOWN
        base = op.base
        if base in ("mul", "div") and len(values) > 1 and not options.get("rounding_mode"):
            if not known:
                return None  # a constant, though a number that depends on the scale may be in it
            left, right = self._of_factor(values[0]), self._of_factor(values[1])
            if left is None or right is None:  # a number that may depend on the scale
                return _UNKNOWN
            made = left.over(right) if base == "div" else left.of_product(right)
            return None if left is right is _NONE else self._placed(made, left, right)
        if not known:
            return None
        if op.factors:
            one, two = (self._degree(values[i]) or _NONE for i in op.factors)
            product = self._placed(one.of_product(two), one, two)
            added = values[0] if op.linear else values[2] if base == "convolution" else None
            return self._sum(result, [(product, None), (self._degree(added), added)])
        first = degrees[0]
        if first is not None and sum(degree.depends for degree in known) == first.depends:
            exponent = values[1] if base == "pow" else op.degree
            if isinstance(exponent, (int, float)) and (exponent != 1 or base == "pow"):
                return first.times(exponent)
            if "backward" in base:
                return first  # linear in the gradient that it is given
        if base in ("addcmul", "addcdiv"):
            one, two = (self._degree(value) or _NONE for value in values[1:3])
            product = self._placed(one.over(two) if op.divides else one.of_product(two), one, two)
            return self._sum(result, [(self._degree(values[0]), None if op.writes else values[0]), (product, None)])
        if op.adds or op.limits:
            terms = values[1:] if base == "where" else values[:2] if op.adds else [*values, *options.values()]
            held = [self._degree(term) for term in terms]
            if op.writes and isinstance(values[0], torch.Tensor) and result.data_ptr() == values[0].data_ptr():
                terms[0] = None
                if held[0] is None:  # a constant, which is overwritten
                    if base not in ("add", "sub") or not isinstance(values[1], torch.Tensor):
                        return _UNKNOWN
                    sign = (1 if base == "add" else -1) * options.get("alpha", 1)
                    terms[0] = _rest(result, values[1], sign)
            pairs = zip(held, terms, strict=True)
            return self._sum(result, [(d, t) for d, t in pairs if not op.limits or _is_taken(t, result)])
        if op.places or op.moves or op.degree == 1 or op.namespace in _COLLECTIVE:
            powers = {tuple(sorted((degree or _NONE).powers.items())) for degree in degrees}
            if op.writes and op.namespace == "aten" and len(powers) > 1:
                return _UNKNOWN  # some elements are overwritten
            made = self._sum(result, [(self._degree(t), t) for t in floating])
            return made if any(degree.mixed for degree in known) or not made.mixed else _UNKNOWN  # side by side
        return _UNKNOWN if any(degree.depends for degree in known) else known[0]

    def _degree(self, value: Any) -> Degree | None:
        return self._degrees.get(value) if isinstance(value, torch.Tensor) else None

    def _of_factor(self, value: Any) -> Degree | None:
        """The degree of a factor; None of a number that may have been made of one that left the run."""
        if isinstance(value, torch.Tensor):
            return self._degree(value) or _NONE
        if not self._numbers or type(value) not in (int, float):
            return _NONE
        if backward_task() != -1:  # its numbers are those of the forward pass, or of the formula of a derivative
            return self._numbers[value] if value in self._used else _NONE
        if type(value) is int:  # a size, or the scale
            return None if value in self._numbers else _NONE
        if value in self._numbers:
            self._used.add(value)
            return self._numbers[value]
        return _NONE if self._is_written(value) else None

    def _is_written(self, value: float) -> bool:
        """Whether somebody wrote a number down: it has few digits, and is no product of such a number and a scale."""
        return _is_short(value) and not any(_is_short(value / scale) for scale in self._scales)

    def _placed(self, made: Degree, *operands: Degree) -> Degree:
        """Name the line where several operands depend on the scale."""
        if sum(bool(d.powers) for d in operands) < 2 or made.place[0] or self._scaler is not None:
            return made
        return Degree(made.powers, self._line(), made.mixed, made.known)

    def _sum(self, result: torch.Tensor, terms: Sequence[tuple[Degree | None, Any]]) -> Degree:
        """The degree of what several terms make; a term is None where its values are gone. Zeros have every degree."""
        counted = [(degree or _NONE, term) for degree, term in terms if degree is not None or _counts(term, result)]
        if len({tuple(sorted(degree.powers.items())) for degree, _ in counted}) > 1:  # else nothing is looked at
            counted = [(d, t) for d, t in counted if not isinstance(t, torch.Tensor) or bool(t.any())]
        degrees = [degree for degree, _ in counted] or [_NONE]
        told = next((d for d in degrees if d.mixed), next((d for d in degrees if d.place[0]), degrees[0]))
        if told.mixed or len({tuple(sorted(degree.powers.items())) for degree in degrees}) == 1:
            return told
        if self._numbers and not all(degree.powers for degree in degrees):
            return _UNKNOWN  # a constant may be made of a number that left the run
        return Degree(degrees[0].powers, self._line(), mixed=True)

    def _line(self) -> Place:
        return users_line(sys._getframe())


def _rest(result: torch.Tensor, term: torch.Tensor, factor: float) -> torch.Tensor:
    """What a result held before a term was added in place; zero where that is no more than the rounding."""
    whole = result.detach().double()
    rest = whole - factor * term.detach().double()
    return torch.where(rest.abs() <= 4 * torch.finfo(result.dtype).eps * whole.abs(), 0.0, rest)


def _is_taken(term: Any, result: torch.Tensor) -> bool:
    """Whether a limit was reached, or an alternative taken; so does what was overwritten count."""
    if term is None or isinstance(term, bool):
        return term is None
    return bool((result == term).any())


def _is_short(value: float) -> bool:
    return float(f"{value:.4g}") == value


def _counts(term: Any, result: torch.Tensor) -> bool:
    """Whether a constant is a term: no eps, which changes nothing at this scale."""
    if isinstance(term, torch.Tensor):
        return True
    if type(term) not in (int, float):
        return False
    return bool((result.detach().double().abs() * _SLIGHT < abs(term)).any())
