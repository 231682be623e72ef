"""Lineage of the values of a step in the tensors of the loop: as a multiple, as a sum with multiples, or otherwise.

Companions say what a value should be. They do not say whether a tensor was updated or overwritten, and whether
its old value was kept whole (a sum), in part (a moving average), or multiplied on its own (a decay).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ampcheck.core.errors import OP_ERRORS, brief
from ampcheck.core.formats import format_of
from ampcheck.facts.linear import Form, LinearFacts, Operand, combined, itself, mixed
from ampcheck.facts.memory import dtype_name
from ampcheck.records.stagnation import Decay, VanishedConstant
from ampcheck.records.state import Role
from ampcheck.stream.ops import OpEvent, OpSubscriber, leaves
from ampcheck.torchtools.private import backward_task, without_modes
from ampcheck.torchtools.storage import storage_number
from ampcheck.training.loop import Resident

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NARROW = frozenset((torch.float16, torch.bfloat16, *_FLOAT8))
"""Floating dtypes narrower than float32 in which values are added up (block scales and packed formats are not)."""

_MASK, _LEARNS = attrgetter("mask"), attrgetter("requires_grad")

_OTHERWISE = frozenset(("alpha", "beta", "rounding_mode", "out", "accumulate"))
_READS = frozenset(("other", "1/other", "weight"))
"""Factors that are values of other operands, see `Traits.linear`."""

_FUSED_GAINS = {"exp_avgs": "beta1", "exp_avg_sqs": "beta2", "momentum_buffer_list": "momentum", "state_sums": ""}

_DECAYED = 0.5
"""Of the part that a parameter takes of another tensor, how much a decay may take away in the same step."""


@dataclass(slots=True)
class Written:
    """Writes to one tensor within a step: the last op that wrote to it, and the line of the first one,
    or of the copy that replaced what was written before."""

    op: str = ""
    file: str = ""
    line: int | None = None
    decay: Decay = field(default_factory=Decay)


class Lineage(OpSubscriber):
    """Follows forms through the ops of a step. It stands above the shadow, and changes nothing.

    facts: the forms, of one step. written: by storage what was done to the tensors of the loop. overwritten: is called
    with a tensor of the loop, or a part of it, that was given values which do not depend on the ones it had. iterates:
    the names of further weights: tensors that parameters are mixed from, as the second iterate of a schedule-free
    optimizer. drawn: the origin of random numbers; weights: those of narrow parameters and iterates. draws: whether
    random numbers were drawn after a backward pass or while autograd was off, as by an optimizer that rounds at random.
    additions: watches, such as a `ReductionWatch`, which see every op and may add origins. active: whether ops are
    followed. unfollowed: counts ops that were not, by reason.

    An op that is neither elementwise nor a write hands on `loose` origins only, such as those of running sums; so do
    ops that autograd records or runs, for the parameters: a gradient does not count as made of its weight.
    """

    def __init__(self, *additions: Any) -> None:
        self.ops = 0
        self.active = True
        self.overwritten: Callable[[torch.Tensor], None] | None = None
        self.vanished: dict[tuple[float, str], VanishedConstant] = {}
        self.unfollowed = Counter[str]()
        self.iterates: set[str] = set()
        self._additions = additions
        self._before, self._after, self._divided = (
            [getattr(addition, name) for addition in additions if hasattr(addition, name)]
            for name in ("before", "after", "divided")
        )
        self._origins: dict[int, Resident] = {}
        self.begin(())

    def begin(self, residents: Sequence[Resident]) -> None:
        """A step begins: its origins are the narrow ones of these tensors."""
        self.iterates.update(self._mixed_into_weights())
        self.facts = LinearFacts()
        self._origins = {}
        self.written: dict[int, Written] = {}
        self.weights = 0
        self.draws = self._after_backward = False
        self._residents = self.drawn = self.facts.new_origin()
        for resident in residents:
            narrow = resident.tensor.dtype in NARROW and resident.role is not Role.GRADIENT
            if narrow and not self.facts.bit_of(resident.tensor):
                bit = self.facts.enter(resident.tensor)
                self._origins[bit] = resident
                self._residents |= bit
                self.weights |= bit if resident.role is Role.PARAMETER or resident.name in self.iterates else 0
        for watch in self._additions:
            watch.begin(self)

    def _mixed_into_weights(self) -> Iterator[str]:
        """The tensors of which a parameter took a part in the step, and gave up as much of what it had.

        A gradient, or a sum of them that is then cleared, is added to a parameter that keeps all but a decay.
        """
        for parameter in (resident for resident in self._origins.values() if resident.role is Role.PARAMETER):
            gains = self.facts.form(parameter.tensor).gains
            extra = abs(sum(gains.values()) - 1.0)
            mixed_in = [self._origins[bit] for bit, gain in gains.items() if extra < _DECAYED * gain]
            yield from (
                other.name for other in mixed_in if self.facts.form(other.tensor).mask & self.facts.bit_of(other.tensor)
            )

    def see(self, event: OpEvent) -> Any:
        """Follow the values of an op. Within a subclass a DTensor runs its ops on the local shard, and those count."""
        if not self.active or event.higher or event.fake:
            return event.run()
        if event.wrapped:
            return NotImplemented
        self.ops += 1
        if event.traits.view:
            return event.run()
        backward = backward_task() != -1
        self._after_backward |= backward
        recorded = backward or (torch.is_grad_enabled() and any(map(_LEARNS, event.tensors)))
        planned = self._before_op(event, recorded)
        out = event.run()
        if planned is not None:
            self._after_op(event, *planned)
        return out

    def _before_op(self, event: OpEvent, recorded: bool) -> tuple[list[_Note], list[Form]] | None:
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            try:  # what cannot be followed must not pose as a failure of the run
                plan = self._plan(event, recorded)
                for before in self._before if event.traits.writes or len(event.traits.linear) > 1 else ():
                    before(event, self)
                for divided in self._divided if event.traits.divides else ():
                    divided(event, self)
                return plan
            except OP_ERRORS as error:
                self._miss(event, error)
        return None

    def _after_op(self, event: OpEvent, notes: list[_Note], forms: list[Form]) -> None:
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            try:
                for number, tensor in enumerate(leaves(event.out) if forms else ()):
                    notes.append(_Note(tensor, forms[min(number, len(forms) - 1)]))
                for note in notes:
                    self._note(event, *note)
                for after in self._after:
                    after(event, self)
            except OP_ERRORS as error:
                self._miss(event, error)

    def _miss(self, call: OpEvent, error: Exception) -> None:
        self.unfollowed[f"{call.traits.title} is not followed through sums: {brief(error)}"] += 1

    def _plan(self, call: OpEvent, recorded: bool) -> tuple[list[_Note], list[Form]]:
        """Return what to note of the tensors that an op writes, and the forms of those that it will return.

        Forms follow from what the arguments hold before it; the last one is that of all further results.
        """
        values = enumerate(call.written_values()) if call.traits.writes else ()
        written = [(number, tensor) for number, value in values for tensor in leaves(value)] if values else []
        if call.traits.random:
            self.draws |= self._after_backward or not torch.is_grad_enabled()
            return [_Note(t, Form(self.drawn)) for _, t in written], [] if written else [Form(self.drawn)]
        if not any(map(_MASK, filter(None, map(self.facts.get, call.tensors)))):
            return [_Note(tensor, Form()) for _, tensor in written] if written else [], []
        op = call.traits
        followed = bool(written) or op.pointwise or op.copies is not None
        followed = (followed or (op.foreach and not op.reduces)) and op.namespace == "aten"
        # Bits that are read or written as integers are no values.
        followed = followed and (
            op.copies is None or op.moves or all(tensor.is_floating_point() for tensor in leaves(call.args[:2]))
        )
        hidden = (0 if followed else self._residents) | (self.weights if recorded else 0)
        notes, counts = [], Counter[int]()
        for position, tensor in written:
            operands = self._operands(call, counts[position])
            counts[position] += 1
            form = self._result(call, operands, tensor).without(hidden & ~self.facts.bit_of(tensor))
            scaled = self._bare(call, operands, tensor, form)
            old = tensor.detach().clone() if 0.0 < scaled < 1.0 and tensor.dtype in NARROW else None
            notes.append(_Note(tensor, form, scaled, old))
        if written or op.shaped:  # made after the shape of a tensor alone
            return notes, []
        numbers = range(len(call.args[0])) if op.foreach else (0,)
        return [], [self._result(call, self._operands(call, n), None).without(hidden) for n in numbers]

    def _operands(self, call: OpEvent, index: int) -> list[Operand]:
        """The operands in the order of the schema; of lists (foreach) the element `index`."""
        operands, reads = [], not _READS.isdisjoint(call.traits.linear)
        for position, argument in enumerate(call.op._schema.arguments):
            value = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
            if argument.name in _OTHERWISE or value is None:
                continue
            value = value[index] if isinstance(value, (list, tuple)) and index < len(value) else value
            if isinstance(value, torch.Tensor):
                form = self.facts.form(value)
                plain = value.dim() == 0 and not form.mask and reads
                plain = plain and value.device.type != "meta" and not value.is_complex()
                operands.append(Operand(form, float(value) if plain else None))
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                operands.append(Operand(Form(), float(value)))
        return operands

    def _result(self, call: OpEvent, operands: list[Operand], target: torch.Tensor | None) -> Form:
        op = call.traits
        selects = op.accumulates and not call.argument("accumulate")
        if selects or call.argument("rounding_mode") is not None:
            return mixed([operand.form for operand in operands])
        if target is not None and "batch_norm" in op.base:
            momentum = call.argument("momentum", call.argument("exponential_average_factor", 0.0))
            return self.facts.form(target).times(1.0 - (momentum if call.argument("training", True) else 0.0))
        if target is not None and op.base.startswith("_fused_"):
            for name, option in _FUSED_GAINS.items():  # its kernels mix all, but keep of the state a fixed part
                if any(t is target for t in leaves(call.argument(name))):
                    return self.facts.form(target).times(float(call.argument(option)) if option else 1.0)
            return Form(self.facts.form(target).mask)
        alpha, beta = (_number(call, "alpha"), _number(call, "beta")) if op.linear else (1.0, 1.0)
        return combined(op, operands, alpha, beta)

    def _bare(self, call: OpEvent, operands: list[Operand], target: torch.Tensor | None, form: Form) -> float:
        """The factor where a tensor of the loop is multiplied by a number and nothing is added; else 0."""
        bit, op = self.facts.bit_of(target) if target is not None else 0, call.traits
        if not bit or target is None or not operands or "batch_norm" in op.base or op.base.startswith("_fused_"):
            return 0.0
        if op.copies == 1 or not any(t is target for t in leaves(call.args[:1])):  # assigned, as by out=
            gain, now = form.gain(bit), self.facts.form(target).gain(bit)
            return gain / now if form.pure and gain and now else 0.0
        relative = self._result(call, [Operand(itself(bit)), *operands[1:]], target)
        return (relative.gain(bit) or 0.0) if relative.pure else 0.0

    def _note(self, call: OpEvent, result: torch.Tensor, form: Form, scaled: float, old: torch.Tensor | None) -> None:
        bit = self.facts.bit_of(result)
        if result.is_floating_point():
            self._constant(call, result, form, bit)
        self.facts.note(result, form)
        if not bit or (number := storage_number(result)) is None:
            return
        if not form.mask & bit and self.overwritten is not None:
            self.overwritten(result)
        written = self.written.setdefault(number, Written())
        if not written.op or call.traits.copies == 1:  # which replaces what was written before
            written.file, written.line = call.line()
        written.op = call.traits.title
        if old is not None:
            moves = old.float() * scaled != old.float()  # what float32 leaves as well, no format of 16 bits lost
            stuck = int((moves & (result == old)).sum())
            written.decay += Decay(scaled, int(moves.sum()), stuck, call.traits.title)

    def _constant(self, call: OpEvent, result: torch.Tensor, form: Form, bit: int) -> None:
        """Note a constant that guards (an eps) and is zero in the format of what it is added to."""
        guards = call.traits.rescues and not bit and result.dtype in NARROW
        if not guards or not form.mask & self._residents & ~self.drawn:
            return
        values = (v for v in (*call.args[1:2], call.kwargs.get("min")) if isinstance(v, (int, float)))
        constant = next(values, 0.0) * _number(call, "alpha")
        if not 0 < abs(constant) <= format_of(result.dtype).flushes_at:
            return
        dtype = dtype_name(result.dtype)
        names = [r.name for b, r in self._origins.items() if form.mask & b]
        new = VanishedConstant(constant, dtype, call.traits.title, *call.line())
        seen = self.vanished.setdefault((constant, dtype), new)
        seen.of = tuple(dict.fromkeys((*seen.of, *sorted(names))))
        seen.zeros += int((result == 0).sum())


class _Note(NamedTuple):
    """A result of an op, its form, and of a bare multiplication the factor and the old values."""

    result: torch.Tensor
    form: Form
    scaled: float = 0.0
    old: torch.Tensor | None = None


def _number(call: OpEvent, name: str) -> float:
    value = call.argument(name)
    return float(value) if isinstance(value, (int, float)) else 1.0
