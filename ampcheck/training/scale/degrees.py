"""Degrees of the values of a step in the loss scale: twice the scale multiplies a value by two to its degree.

A scaled loss has the degree 1, and so have its gradients, sums and norms of them; the norm of a gradient over that norm
has the degree 0, and a sum of both has none. What an optimizer steps must have the degree 0 after the scaler has
divided: then the training is the same at every scale. One run shows it, and the line at which it was lost. The scale
before `scaler.update()` and the one after it are two scales.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from ampcheck.facts.degree import ENTERED, NONE, NOWHERE, UNKNOWN, Degree, counts, is_taken, joined, rest_of
from ampcheck.facts.memory import has_companions
from ampcheck.facts.parts import PartMap
from ampcheck.facts.values import CompanionStore
from ampcheck.ops.traits import Traits
from ampcheck.records.invariance import RETURNED, Dependence, Place
from ampcheck.shadow.call import item_of
from ampcheck.stream.calls import subscribed
from ampcheck.stream.ops import OpEvent, leaves
from ampcheck.torchtools.patching import attribute
from ampcheck.torchtools.private import backward_task, without_modes
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import users_line
from ampcheck.torchtools.storage import local
from ampcheck.training.loop import TrainingLoop, parameters_of
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.scale.scales import Numbers, Read, Scales

_KNOWN, _ENTERED = attrgetter("known"), attrgetter("entered")
_COLLECTIVE = frozenset(("c10d", "_c10d_functional", "fsdp"))
"""Namespaces of ops that sum, average and move values between processes."""


@dataclass(frozen=True, slots=True)
class _Call:
    """An op that ran, of lists (foreach) one element. floating: the floating tensors among its arguments."""

    op: Traits
    values: list[Any]
    options: dict[str, Any]
    floating: list[torch.Tensor]
    result: torch.Tensor


_TAKE = TrainingLoop._take.__code__
"""Reads what a step returned, which is no line of the user's."""


class Degrees:
    """Follows degrees from the scaling of a loss to the steps of optimizers.

    The scale itself may be read: code compares it with that of before, to see whether a step was skipped. What else
    depends on the scale and leaves the run decides what code does next, which degrees do not show, unless it is what
    the step returns.

    recorder: of the calls; what it asks the scaler is not the user's. store: the companions of what ops have made.
    found: what depends on the scale when an optimizer steps, or when it is returned, once for each line and parameter.
    looked, unknown: how many gradients of a known and of an unknown degree were stepped, or left out by a scaler. lost:
    where the first unknown one became so. left: the line of the first decision. numbers, scales: what was read.
    """

    def __init__(self, recorder: Recorder, store: CompanionStore) -> None:
        self.found: list[Dependence] = []
        self.looked = self.unknown = 0
        self.left: Place | None = None
        self.lost: Place | None = None
        self.recorder, self.numbers = recorder, Numbers()
        self._degrees = PartMap[Degree](joined)
        self.scales = Scales(recorder, self._degrees, self.numbers)
        self._store, self._stepping = store, False
        self._left_sizes: set[int] = set()  # of tensors that left the run with values that vary

    def following(self) -> AbstractContextManager[None]:
        """Follow what runs inside; its ops come by `see`."""
        of_scalers = {"scale": self.scales.scale, "get_scale": self.scales.read, "update": self.scales.update}
        calls: dict[str, Any] = {f"scaler_{name}": observer for name, observer in of_scalers.items()}
        return subscribed(optimizer_step=self._stepped, scaler_step=self._skipped, **calls)

    def returned(self, value: float) -> None:
        """Judge the value that a step returned, at its end."""
        if (made := self.numbers.returned(value)) is not None:
            read = made[0].place
            self._add(RETURNED, "", made[1], read if read[0] else self.scales.at)  # it may return a tensor

    def of(self, value: Any) -> Degree | None:
        """The degree of a tensor; None of one that no scaled value went into, and of what is no tensor."""
        return self._degrees.get(value) if isinstance(value, torch.Tensor) else None

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> Iterator[None]:
        if not self.scales.used:
            return
        inside = getattr(optimizer, "grad_scale", None)  # by which a fused optimizer divides in its kernel
        with without_modes(), torch.no_grad():
            self._lose(self.numbers.made_option(optimizer))
            divisor = NONE if inside is None else self.of(inside) or UNKNOWN
            graded = [(p, local(p.grad)) for p in parameters_of(optimizer) if p.grad is not None]
            judged = [(gradient, self._look(parameter, gradient, divisor)) for parameter, gradient in graded]
        for gradient in (gradient for gradient, degree in judged if degree == NONE):
            self._degrees.pop(gradient)  # nothing of the optimizer depends on the scale
        with attribute(self, "_stepping", True):
            yield
        for tensor in (t for _, t in tensors((list(parameters_of(optimizer)), list(optimizer.state.values())))):
            self._degrees.pop(tensor)  # each step is judged by itself
        for gradient, degree in judged:
            if inside is not None or self.of(gradient) is None:
                self._degrees.put(gradient, degree)

    def _skipped(self, scaler: Any, optimizer: Any, *_: object, **__: object) -> Iterator[None]:
        """Where a scaler leaves a step out, gradients that are finite in float64 are equal at the scales that serve."""
        before = self.looked + self.unknown
        yield
        if self.scales.used and scaler.is_enabled() and self.looked + self.unknown == before:
            with without_modes(), torch.no_grad():
                for gradient in (local(p.grad) for p in parameters_of(optimizer) if p.grad is not None):
                    finite = has_companions(gradient) and bool(self._store.exact(gradient).isfinite().all())
                    self.looked += finite and not self._of_gradient(gradient).varies

    def _look(self, parameter: torch.Tensor, gradient: torch.Tensor, divisor: Degree) -> Degree:
        degree = self._of_gradient(gradient).over(divisor)
        self.looked, self.unknown = self.looked + degree.known, self.unknown + (not degree.known)
        if not degree.known:
            self.lost = self.lost or degree.place
        elif degree.depends and bool(gradient.isfinite().all()):  # else it follows from another step
            name = self.recorder.name_of(parameter)
            self._add(f"the gradient of {name} that the optimizer sees", name, degree)
        return degree

    def _add(self, what: str, name: str, degree: Degree, read: Place = ("", None)) -> None:
        place = read if read[0] else degree.place if degree.place[0] else self._line()
        if all(place != known.place and name != known.name for known in self.found):
            powers = () if degree.mixed else tuple(degree.powers.values())
            self.found.append(Dependence(what, name, self.recorder.step, powers, place))

    def _of_gradient(self, gradient: torch.Tensor) -> Degree:
        """The degree of a gradient. One that has none was made by ops from what does not depend on the scale, or
        written by code in C++ that calls no op."""
        if (known := self.of(gradient)) is not None:
            return known
        companions = self._store.known(gradient) if has_companions(gradient) else None
        return NONE if companions is not None and companions.written and not self.numbers.known else UNKNOWN

    def escaped(self, tensor: torch.Tensor, shared: bool) -> None:
        """A tensor leaves the run without an op, to NumPy or a list. shared: it may be written from there."""
        degree = self.of(tensor)
        if degree is not None and degree.varies:
            self._lose(True)
            self._left_sizes.add(tensor.numel())
        if shared and self.scales.used:
            self._degrees.put(tensor, UNKNOWN)

    def see(self, event: OpEvent, out: Any) -> None:
        """Follow an op that ran."""
        if self.recorder.asks or event.higher:
            return
        op, args = event.traits, event.args
        if op.view or op.base == "_amp_update_scale":
            return
        if (scale := self.scales.scaling) is not None and op.base in ("full", "_to_copy"):  # it, and copies by device
            made = [t for t in leaves(out) if t.numel() == 1 and t.is_floating_point() and self.of(t) is None]
            self._put([(t, scale) for t in made])
        elif op.base == "_amp_foreach_non_finite_check_and_unscale":
            factor = self._of_gradient(args[2])  # before a fused optimizer it is 1, and looks for infinities alone
            self._put([(gradient, self._of_gradient(gradient).of_product(factor)) for gradient in args[0]])
        else:
            held = list(filter(None, map(self._degrees.get, event.tensors)))
            if self.numbers.known or self._left_sizes:
                held += filter(None, map(self._made_outside, event.tensors))
            if op.leaves and held:
                if not self.scales.reading:
                    self._leave(held[0], out)
            elif held or (self.numbers.known and (op.fills == "number" or self._scales_by_hand(args))):
                if torch.Tag.dynamic_output_shape in event.op.tags:  # a shape is read without an op
                    self._lose(any(not (degree.known or degree.entered) for degree in held))
                self._follow(event, out)

    def _made_outside(self, tensor: torch.Tensor) -> Degree | None:
        """The degree of data that may be made of what left the run, from now on: of a number, and of values as many as
        some that left; None of other data."""
        is_number = bool(self.numbers.known) and tensor.numel() == 1
        if tensor.requires_grad or not tensor.is_floating_point() or not has_companions(tensor):
            return None
        if not (is_number or tensor.numel() in self._left_sizes) or self.of(tensor) is not None:
            return None
        companions = self._store.known(tensor)
        if companions is None or companions.written:
            return None
        unknown = Degree(place=self.left or NOWHERE, known=False)
        self._degrees.put(tensor, (self._of_factor(float(tensor)) or ENTERED) if is_number else unknown)
        return self.of(tensor)

    def _scales_by_hand(self, args: Sequence[Any]) -> bool:
        """Return whether a loss is multiplied by a number that left the run."""
        is_loss = [tensor.numel() == 1 and tensor.is_floating_point() for tensor in leaves(args)] == [True]
        return is_loss and any(type(value) is float and value in self.numbers.known for value in args)

    def _leave(self, degree: Degree, value: object) -> None:
        """A number or a decision leaves the run."""
        if degree.entered:
            return
        if degree.powers and type(value) is float and degree.known and not degree.mixed:
            self.numbers.add(Read(value, degree, self._line(), self.recorder.step, of_scale=False))
        else:
            self._lose(degree.varies)

    def _lose(self, varies: bool) -> None:
        """Note that what happens next may depend on the scale in a way that degrees do not show."""
        if varies and self.left is None:
            self.left = self._line()

    def _follow(self, event: OpEvent, out: Any) -> None:
        op = event.traits
        results: list[tuple[torch.Tensor, Degree | None]] = []
        written = leaves(event.written_values()) if op.writes else []
        for number, target in enumerate(written or leaves(out)):
            if target.is_floating_point() or target.is_complex():
                degree = self._of_result(event, number if op.foreach else None, target)
                results.append((target, degree))
                if op.writes and target.requires_grad and target.is_leaf and not self._stepping:
                    term = self.of(event.args[1]) if op.base in ("add", "sub") else None
                    self._look_written(target, term or degree or NONE)
            else:
                self._decide(op, event.tensors, target)
        self._put(results)

    def _look_written(self, weight: torch.Tensor, degree: Degree) -> None:
        """A weight that code updates itself, with something of this degree."""
        self._lose(not degree.known)
        if degree.known and degree.depends:
            name = self.recorder.name_of(weight)
            self._add(f"what the code itself writes into {name}", name, degree)

    def _put(self, results: Sequence[tuple[torch.Tensor, Degree | None]]) -> None:
        """Note the degrees of results; what does not depend on the scale any more has none."""
        for target, degree in results:
            if degree is not None or self._degrees.pop(target):  # a constant part of a memory that has others
                self._degrees.put(target, degree or NONE)

    def _decide(self, op: Traits, operands: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """A decision may come out otherwise at another scale, unless all that it compares depends on that alike."""
        degrees = [self.of(operand) or NONE for operand in operands]
        ranks = op.decides in ("best", "extreme", "selection", "support")  # at every scale alike
        alike = (ranks or len(degrees) > 1) and len({degree.signature for degree in degrees}) == 1
        varying = [degree for degree in degrees if degree.varies]
        if op.decides != "finite" and varying and not (alike and degrees[0].known):
            unknown = Degree(place=self._line(), known=False)
            self._degrees.put(result, ENTERED if all(map(_ENTERED, varying)) else unknown)

    def _of_result(self, event: OpEvent, number: int | None, result: torch.Tensor) -> Degree | None:
        """The degree of a result, of lists of the one with this number; None where no operand has one."""
        op, values, options, operands = event.traits, list(event.args), event.kwargs, event.tensors
        if number is not None:
            values = [item_of(value, number) for value in values]
            options = {name: item_of(value, number) for name, value in options.items()}
            operands = leaves((*values, *options.values()))
        if op.copies is not None:
            return self.of(values[op.copies])
        if op.fills == "number" and self.numbers.known:
            return self._of_factor(next((value for value in values if type(value) is float), None)) or UNKNOWN
        if op.fills != "part" and (op.unset or op.shaped or op.resets or op.fills):
            return None
        held = list(filter(None, map(self._degrees.get, operands)))
        if not held and not self._scales_by_hand(values):
            return None
        if not all(map(_KNOWN, held)):  # an unknown mask chooses among the values, too
            lost = next((d for d in held if not d.known and not d.entered), Degree(place=self._line(), known=False))
            return ENTERED if all(map(_ENTERED, held)) else lost
        call = _Call(op, values, options, [t for t in operands if t.is_floating_point() or t.is_complex()], result)
        for rule in (self._product, self._power, self._terms, self._moved):
            if (made := rule(call)) is not None:
                return made if made is not UNKNOWN else Degree(place=self._line(), known=False)
        mixed = next((degree for degree in held if degree.mixed), None)  # no function of it is the same at every scale
        varies = not held or any(degree.depends for degree in held)
        lost = Degree(place=self._line(), known=False) if varies else held[0]
        return lost if mixed is None or op.jumps else mixed

    def _product(self, call: _Call) -> Degree | None:
        """The degree of a product or a quotient, to which a term may be added."""
        op, values = call.op, call.values
        if op.base in ("mul", "div") and len(values) > 1 and not call.options.get("rounding_mode"):
            left, right = map(self._of_factor, values[:2])
            return self._combined(left, right, divides=op.base == "div")
        numbers = (value for value in (*values, *call.options.values()) if not isinstance(value, torch.Tensor))
        if self.numbers.known and any(self._of_factor(number) is not NONE for number in numbers):
            return UNKNOWN  # such as alpha
        if op.factors:
            product = self._combined(*(self._of_factor(values[i]) for i in op.factors))
            added = values[0] if op.linear else values[2] if op.base == "convolution" else None
        elif op.base in ("addcmul", "addcdiv"):
            product = self._combined(*map(self._of_factor, values[1:3]), divides=bool(op.divides))
            added = values[0]
            if op.writes and self.of(added) is None:
                return UNKNOWN  # what it held is overwritten
        else:
            return None
        return self._sum(call.result, [(product, None), (self.of(added), added)])

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
        held = [self.of(term) for term in terms]
        if op.writes and isinstance(values[0], torch.Tensor) and result.data_ptr() == values[0].data_ptr():
            terms[0] = None
            if held[0] is None:  # a constant, which is overwritten
                if op.base not in ("add", "sub") or not isinstance(values[1], torch.Tensor):
                    return UNKNOWN
                sign = (1 if op.base == "add" else -1) * call.options.get("alpha", 1)
                terms[0] = rest_of(result, values[1], sign)
        if op.limits and op.base != "where":
            ends = [isinstance(term, torch.Tensor) and bool(term.isinf().all()) for term in terms]
            compared = [d or NONE for d, t, end in zip(held, terms, ends, strict=True) if counts(t, result) and not end]
            self._lose(len({degree.signature for degree in compared}) > 1)  # at another scale it may take another
        pairs = zip(held, terms, strict=True)
        made = self._sum(result, [(d, t) for d, t in pairs if not op.limits or is_taken(t, result)])
        # Where the limit was taken throughout, the line says why there is nothing left of the scale.
        return replace(made, place=self._line()) if op.limits and any(held) and not made.place[0] else made

    def _moved(self, call: _Call) -> Degree | None:
        """The degree of elements that are moved, or measured together."""
        op, degrees = call.op, [self.of(t) for t in call.floating]
        if op.fills == "part":
            numbers = (*call.values[2:], *call.options.values())
            return UNKNOWN if any(v for v in numbers if isinstance(v, (int, float))) else degrees[0] or NONE
        if not (op.places or op.moves or op.degree == 1 or op.namespace in _COLLECTIVE):
            return None
        if op.writes and op.namespace == "aten" and len({(degree or NONE).signature for degree in degrees}) > 1:
            return UNKNOWN  # some elements are overwritten
        made = self._sum(call.result, list(zip(degrees, call.floating, strict=True)))
        return made if any(d is not None and d.mixed for d in degrees) or not made.mixed else UNKNOWN  # side by side

    def _of_factor(self, value: Any) -> Degree | None:
        """The degree of a factor; None of a number that may have been made of one that left the run."""
        if isinstance(value, torch.Tensor):
            return self.of(value) or NONE
        if not self.numbers.known or type(value) not in (int, float):
            return NONE
        return self.numbers.factor(value, in_pass=backward_task() != -1)

    def _combined(self, left: Degree | None, right: Degree | None, *, divides: bool = False) -> Degree:
        """The degree of a product or quotient; where both operands depend on the scale, the line names it."""
        if left is None or right is None:  # a number that may depend on the scale
            return UNKNOWN
        made = left.over(right) if divides else left.of_product(right)
        if not (left.powers and right.powers) or made.place[0] or self.scales.scaling is not None:
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
        if self.numbers.known and any(degree is None for degree, _ in terms):
            return UNKNOWN  # a constant may be made of a number that left the run
        return Degree(degrees[0].powers, self._line(), mixed=True)

    def _line(self) -> Place:
        return users_line(sys._getframe(), inside=_TAKE)
