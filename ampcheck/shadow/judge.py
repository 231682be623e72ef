"""Compare every result of the run with its companions, and record the ops that are at fault."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.shadow import faults
from ampcheck.shadow.bounds import Examination, Look, cut_off, examine, floor_of, look
from ampcheck.shadow.call import Call
from ampcheck.shadow.casts import is_own_cast
from ampcheck.shadow.cause import (
    fault_at,
    fault_of,
    float32_keeps,
    largest_input,
    largest_of,
    makes_nonfinite,
    with_sizes,
)
from ampcheck.shadow.companions import Companions, CompanionStore, Key, has_companions, roundoff, view_of
from ampcheck.shadow.comparisons import ZERO, determine, own_error, restarts
from ampcheck.shadow.decisions import decides, examine_decision, tests_finiteness
from ampcheck.shadow.faults import Fault, extended
from ampcheck.shadow.guards import bound_that_decides, divisors
from ampcheck.shadow.integers import CONSECUTIVE, IDENTITIES, collisions_in
from ampcheck.shadow.memory import dtype_name, largest_number
from ampcheck.shadow.norms import error_square, exact_square, honest_share, relative_error
from ampcheck.shadow.ranking import hides_ranking
from ampcheck.shadow.reached import LEFT, UNSCALES, Reached
from ampcheck.shadow.recurrence import Recurrence
from ampcheck.shadow.spread import widened
from ampcheck.shadow.suspects import (
    BLURRED,
    BOUND,
    COLLIDED,
    ERROR,
    ILL,
    MASKED,
    TAKEN,
    UNHELD,
    VANISHED,
    Suspects,
    drop,
    emptied_rows,
    missing_terms,
    pass_on,
    vanished,
)

_SUSPECTS, _DEPTH, _GRADIENT = attrgetter("suspects"), attrgetter("depth"), attrgetter("gradient")

_LOST_UPDATE = 0.5
"""The part of an update from which it is lost."""

_NEAR = 16.0
"""The factor below the maximum of a format from which inputs are looked at as well."""

_ACCUMULATES = 8
"""Writes in a row from which a tensor counts as an accumulator."""

_ACCUMULATED = 1.0
"""The honest error of an accumulator of 16 bits, in unit roundoffs: added in float32 and rounded once, it has one."""

_LOST = 0.25
"""The relative error of an output from which less than two bits agree: whatever explains it, the value is lost."""

_VANISHING = (faults.FLUSH, faults.ZERO)
_VANISHED_SHARE = 0.05
"""The relative error of an update of a weight from which what vanished from it counts."""

_FEW = 64
"""Elements up to which an error heals only if each of them is within its bound."""


class Judge:
    """The faults of a run, and what is left of them.

    dropped: count faults in results that nothing used as well. judged: results that were compared; low: those of 16
    bits or fewer; whole: those of them that hold whole numbers. nonfinite: the ops that make exact values infinite
    or NaN. largest: by place and dtype of 16 bits, the largest finite magnitude of a result, and that of its inputs
    where the result comes near the end of the format. casts: of the code itself, by place. scale: of a `GradScaler`.
    """

    def __init__(self, store: CompanionStore, *, dropped: bool = False) -> None:
        self.judged = self.low = self.whole = 0
        self.scale = 1.0
        self.nonfinite: dict[Where, Examination] = {}
        self.casts: Counter[tuple[str, int | None, str]] = Counter()
        self.largest: dict[tuple[Where, str], tuple[float, float]] = {}
        self._store = store
        if dropped:
            store.on_forget = self._dropped
        self._faults: dict[Key, Fault] = {}
        self._suspects = Suspects()
        self._reached = Reached()
        self._recurrence = Recurrence()
        self._unheld: set[Key] = set()
        self._compensates = False

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in the order in which they first happened, with what they reached."""
        counts = [key for key in self._faults if self._recurrence.recurs(key) and not self._heals(key)]
        recorded = (replace(self._faults[key], reaches=self._reached.of(key)) for key in counts)
        return tuple(sorted(recorded, key=lambda fault: fault.index))

    def judge(self, call: Call, ruled: bool) -> None:
        """Compare the results of an op that ran. ruled: its companions followed; else they restarted."""
        where, inherited = call.where, call.inherited
        carried = list(filter(_SUSPECTS, call.before))
        if call.traits.decides and tests_finiteness(call):
            self._reached.test(inherited)
        elif call.traits.decides and decides(call, faulty=bool(inherited)):
            self._decision(call)
        elif call.name == "_local_scalar_dense":
            self.reach_values(call.before, LEFT.format(f"{where.file}:{where.line}"), reported=True)
        elif call.name == UNSCALES:
            self.scale = self._reached.unscale(call)
        elif call.name == "_amp_update_scale_":
            self.scale = float(call.args[0])
        if carried:
            self._suffer(call, carried)
        results = call.written + call.fresh
        if not results:
            return
        if call.name == "_to_copy" and is_own_cast(call):
            self.casts[where.file, where.line, dtype_name(call.fresh[0].dtype)] += 1
        lacks = (carried or inherited) and where.phase != "backward"
        if lacks and (missing := missing_terms(call, results, self._store)):
            self.reach_values(missing, "a sum that lacks it")
            for suspect in [*self._suspects.of(missing, ILL, VANISHED)][:1]:
                self._accuse(suspect, "a sum that lacks it")
        if where.phase != "backward" and call.written:
            if is_weight := any(t.requires_grad and t.is_leaf for t in call.written):
                self._update(call)
            self._lose_update(call, persists=is_weight or not any(c.depth for c in call.before[:1]))
        if carried or call.written:
            self._use_weights(call)
        after = list(map(self._store.of, results))
        self._pass_on(call, results, after)
        if not ruled:
            for companions in after if inherited else ():  # nothing is known of it but what it was made of
                companions.faults = inherited
            return
        if not inherited and not call.written and (call.moves or call.widens):
            return
        statistics = call.name.startswith(("native_", "_ctc_loss")) and not call.name.endswith("backward")
        judged = len(call.written) + 1 if statistics else len(results)
        for tensor, companions in zip(results[:judged], after, strict=False):
            if tensor.numel():
                self._result(call, tensor, companions)

    def _suffer(self, call: Call, carried: Sequence[Companions]) -> None:
        """Accuse the suspects that an op suffers from whatever it returns."""
        if call.traits.decides in IDENTITIES or (call.name == "_to_copy" and not call.fresh):
            for suspect in self._suspects.of(carried, COLLIDED):
                self._accuse(suspect, "a comparison or an index")
        if call.where.phase != "backward":
            for suspect in self._suspects.of(call.before[divisors(call)], BOUND):
                self._accuse(suspect, "what is divided by it")

    def reach(
        self, outputs: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], weights: Collection[str] = ()
    ) -> None:
        """Record which faults are left in these tensors. weights: outputs of which data may leave anything open."""
        for name, tensor in outputs.items():
            companions = self._store.known(tensor) if has_companions(tensor) else None
            if companions is None:
                continue
            self.reach_values([companions], name)
            for suspect in self._suspects.of([companions], ILL, TAKEN) if name not in weights else ():
                self._accuse_if_lost(suspect, tensor, name)
        known = {n: c for n, t in gradients.items() if has_companions(t) and (c := self._store.known(t)) is not None}
        for name, companions in known.items():
            for suspect in self._suspects.of([companions], MASKED):  # no softmax takes a gradient
                self._accuse(replace(suspect, kind=faults.OVERFLOW), name)
        if not any(companions.faults for companions in known.values()):
            return
        total = sum(exact_square(gradients[name], self._store) for name in known) ** 0.5
        for name, companions in known.items():
            if not companions.faults:
                continue
            error = error_square(gradients[name], self._store) ** 0.5
            share = error / max(total, 1e-300)
            if not share <= honest_share(gradients[name], total, self._store):
                for key in companions.faults:
                    self._reached.note(key, name, share)

    def reach_ends(self) -> None:
        """Record which faults are left in values that are alive and that no op has used."""
        for companions in self._store:
            if not companions.consumed:
                self.reach_values([companions], "a result that is still in use")

    def _update(self, call: Call) -> None:
        """Record what vanished from an update that a weight could take up: the weight itself hardly shows it."""
        written = {id(tensor) for tensor in call.written}
        keeps = sum(float(torch.linalg.vector_norm(t.detach()).double() * roundoff(t.dtype)) ** 2 for t in call.written)
        for tensor, companions in zip(call.inputs, call.before, strict=True):
            if id(tensor) in written or not companions.faults or relative_error(tensor, self._store) <= _VANISHED_SHARE:
                continue
            known = (self._faults[key] for key in companions.faults if key in self._faults)  # others are of other ranks
            for fault in known if error_square(tensor, self._store) > keeps else ():
                if fault.kind in _VANISHING and fault.where.phase != "backward":
                    self._reached.note(fault.key, "an update of a weight")

    def _lose_update(self, call: Call, *, persists: bool) -> None:
        """Record what is added to 16-bit values that do not hold it. persists: to a weight, or to data that entered;
        other values may be those of a weight once they are used."""
        if not self._compensates and (lost := _lost_update(call)) > _LOST_UPDATE:
            seen = Examination(call.written[0].numel(), error=lost, limit=_LOST_UPDATE, impact=lost)
            note = "most of what is added is below half of the spacing of the values, which stay as they were"
            fault = replace(fault_at(faults.DRIFT, call, call.written[0], seen), note=note)
            if persists:
                self._unheld.add(fault.key)
                self._add(fault, "what it was added to")
            else:
                self._suspects.add(call.before[0], UNHELD, fault)

    def _use_weights(self, call: Call) -> None:
        """Record what was added in vain to values that turn out to be those of a weight."""
        for tensor, companions in zip(call.inputs, call.before, strict=True):
            if UNHELD not in companions.suspects or self._compensates:
                continue
            used = tensor if tensor._base is None else tensor._base
            if used.requires_grad and used.is_leaf:
                for fault in self._suspects.of([companions], UNHELD):
                    self._unheld.add(fault.key)
                    self._accuse(fault, "what it was added to")

    def _heals(self, key: Key) -> bool:
        """Whether all that a fault did was to skip steps of a loss scale, which are made at a lower one."""
        return self._reached.retried(key) or (self._reached.unused(key) and self._recurrence.recovers(key))

    def reach_values(self, values: Sequence[Companions], name: str, *, reported: bool = False) -> None:
        """Record what is left in values that leave the run: faults, and whole numbers that collided."""
        for key in frozenset[Key]().union(*[c.faults for c in values]):
            self._reached.note(key, name, reported=reported)
        for suspect in self._suspects.of(values, COLLIDED):
            self._accuse(suspect, name)

    def _accuse_if_lost(self, suspect: Fault, tensor: torch.Tensor, name: str) -> None:
        """Report a suspect of a tensor whose digits are gone. A zero of float64, as the rest of a sum, has none."""
        if _LOST < (error := relative_error(tensor, self._store)) < 1 / ZERO:
            self._add(replace(suspect, examination=replace(suspect.examination, error=error)), name)

    def _pass_on(self, call: Call, results: Sequence[torch.Tensor], after: Sequence[Companions]) -> None:
        """Let results inherit how often their values were rounded, and what may yet do harm."""
        call.depths = tuple(map(_DEPTH, call.before))
        depth = max(call.depths, default=0)
        pass_on(call.before if not call.traits.shaped else (), after)
        gradient = call.where.phase == "backward" or call.name == UNSCALES or _takes_gradients(call)
        for tensor, companions in zip(results, after, strict=True):
            companions.gradient = gradient
            rounds = tensor.dtype.itemsize <= 2 and not call.moves
            companions.depth = max(depth, companions.depth if call.written else 0) + rounds
            if COLLIDED in companions.suspects and (
                (call.traits.sums and all(c.whole for c in call.before))
                or not (companions.whole or call.moves or self._is_position(companions))
            ):
                drop(companions, COLLIDED)  # a measurement
            if companions.suspects:
                gone = (BLURRED,) if call.traits.contracts else ()
                drop(companions, *gone, *((BOUND,) if not call.moves and call.name != "_to_copy" else ()))
            if call.traits.base.startswith("clamp") and (bound := bound_that_decides(call, tensor)):
                fault, is_end = bound
                self._suspects.add(companions, BOUND, fault)
                if is_end:
                    self._accuse(fault, "the values that it cuts off")

    def _result(self, call: Call, tensor: torch.Tensor, companions: Companions) -> None:
        where, before, inherited = call.where, call.before, call.inherited
        values = companions.held or companions.values
        exact, moved = view_of(tensor, values.exact), view_of(tensor, values.moved)
        whole, unit, low = companions.gradient, companions.unit, tensor.itemsize <= 2
        accumulates = low and companions.updates >= _ACCUMULATES
        floor = _ACCUMULATED if accumulates else floor_of(companions.depth)
        self.judged += 1
        self._recurrence.runs[where, tuple(tensor.shape)] += 1
        self.low += low
        self.whole += low and companions.whole
        if companions.whole:
            self._integers(call, tensor, companions)
        if tensor.numel() * (2 if tensor.is_complex() else 1) == companions.numel:
            companions.faults, companions.trail = frozenset(), None  # else faults of other parts of the storage stay
        if ERROR in companions.suspects and determine(call, tensor, self._store, companions):
            moved = self._store.moved(tensor)
            drop(companions, ERROR)
        single = bool(inherited) and tensor.numel() <= _FEW
        seen_at_once = Look(False, largest=math.nan)
        if not tensor.is_complex() and not single:
            rounds = call.name == "_to_copy" and not any(c.written for c in before)
            seen_at_once = look(
                tensor, exact, moved, unit, whole=whole, floor=floor, rounds=rounds, strict=bool(inherited)
            )
        self._note_range(call, tensor, exact, companions, seen_at_once, single=single)
        if ERROR in companions.suspects and restarts(tensor, self._store, companions):
            companions.faults = inherited
            return
        if companions.suspects and seen_at_once.within and not (seen_at_once.ill or single):
            drop(companions, ERROR, TAKEN)
        widens = not (seen_at_once.within or single or inherited)
        if widens and widened(call, tensor, self._store):
            moved = self._store.moved(tensor)
            seen_at_once = look(tensor, exact, moved, unit, whole=whole, floor=floor)
        doubtful = not single and (seen_at_once.ill or not seen_at_once.within)
        if doubtful and not inherited and (sort := own_error(call, tensor, self._store)):
            self._suspects.add(companions, sort, fault_at(faults.CANCELLATION, call, tensor, Examination(0)))
            if sort == TAKEN:  # the code looks at what arrived, and adds the rest later
                self._compensates = True
                for key in self._unheld:
                    self._faults.pop(key, None)
            return
        known = {ILL, ERROR, TAKEN} & companions.suspects.keys()
        if seen_at_once.ill and not known and float32_keeps(call, tensor, self._store):
            ill = fault_at(faults.CANCELLATION, call, tensor, Examination(tensor.numel(), error=1.0))
            self._suspects.add(companions, ILL, with_sizes(ill, call, tensor, self._store))
        ranks = low and not (whole or single or BLURRED in companions.suspects)
        if ranks and hides_ranking(call, tensor, self._store, seen_at_once, accumulates=accumulates):
            fault = fault_at(faults.DECISION, call, tensor, Examination(tensor.numel()))
            self._suspects.add(companions, BLURRED, fault)
        carried = list(filter(_SUSPECTS, before))
        masked = bool(carried) and any(MASKED in c.suspects for c in carried)
        if seen_at_once.within and not masked:
            if self._reached.lost:
                self._reached.repeat(where, exact)
            if companions.suspects:
                drop(companions, MASKED)
            return
        form = format_of(torch.float32 if tensor.is_complex() else tensor.dtype)
        seen = examine(
            tensor, exact, moved, unit, form=form, whole=whole, floor=floor, single=single, strict=bool(inherited)
        )  # fmt: skip
        if masked and not seen.beyond and (rows := emptied_rows(tensor, exact, moved)):
            seen = replace(seen, flagged=rows, error=1.0)
        if makes_nonfinite(call, seen, self._store):
            self.nonfinite.setdefault(where, seen)
        if not seen.beyond:
            drop(companions, MASKED)
            return
        if inherited:
            companions.faults = inherited
            self._recurrence.note_return(where, tuple(tensor.shape), inherited)
            earlier = next((c.trail for c in before if c.faults and c.trail is not None), None)
            companions.trail = extended(where, torch.inf if seen.lost else seen.error, earlier)
            return
        result = fault_of(call, tensor, seen, self._store, accumulates=accumulates)
        if result.kind == faults.MASK:
            if MASKED not in companions.suspects:
                self._suspects.add(companions, MASKED, result)
            self._add(result)
            return
        fault = self._suspects.origin_of(result, call, tensor, self._store)
        self._recurrence.note(fault, accumulates=accumulates)
        self._reached.lose(fault, exact)
        self._add(fault)
        if accumulates and fault.kind == faults.DRIFT:  # what is made of it later has other bounds
            self._reached.note(fault.key, "the accumulator", seen.impact)
        companions.faults = frozenset({fault.key})
        companions.trail = extended(where, torch.inf if seen.lost else seen.error, None)

    def _note_range(
        self, call: Call, tensor: torch.Tensor, exact: torch.Tensor, companions: Companions, seen: Look, *, single: bool
    ) -> None:
        """Record how large a value of 16 bits or fewer became, and its zeros."""
        if tensor.itemsize <= 2:
            self._note_largest(call, tensor, seen.largest)
        if tensor.itemsize == 1 and call.traits.copies is not None:
            self._cut_off(call, tensor, exact)
        if seen.emptier or single:
            self._note_zeros(call, tensor, exact, companions)
        elif companions.suspects:
            drop(companions, VANISHED)

    def _cut_off(self, call: Call, tensor: torch.Tensor, exact: torch.Tensor) -> None:
        """Record values of the run that a cast to 8 bits cuts off, though float64's fit: a scale is too small."""
        values = call.inputs[-1].detach().double().expand_as(tensor)
        lost = cut_off(tensor, values) & ~cut_off(tensor, exact)
        if not bool(lost.any()):
            return
        error = float(1 - tensor[lost].double().abs().min() / values[lost].abs().max())
        seen = Examination(tensor.numel(), int(lost.sum()), saturated=int(lost.sum()), error=error)
        fault = with_sizes(fault_at(faults.OVERFLOW, call, tensor, seen), call, tensor, self._store)
        fault = replace(fault, exact_amax=fault.amax_in)
        self._add(fault)
        self._reached.lose(fault, exact)

    def _is_position(self, companions: Companions) -> bool:
        """Whether the numbers that collided were counted through without a gap."""
        return any(suspect.note == CONSECUTIVE for suspect in self._suspects.of([companions], COLLIDED))

    def _note_zeros(self, call: Call, tensor: torch.Tensor, exact: torch.Tensor, companions: Companions) -> None:
        if VANISHED in companions.suspects and not call.traits.rescues and tensor.numel() > _FEW:
            return  # elements that are zero were seen by `look`; the place where they began is known
        if (suspect := vanished(call, tensor, exact)) is None:
            drop(companions, VANISHED)
        elif tensor.dtype.itemsize <= 2 and (VANISHED not in companions.suspects or call.traits.rescues):
            self._suspects.add(companions, VANISHED, suspect)

    def _decision(self, call: Call) -> None:
        blurred = next(self._suspects.of(call.before, BLURRED, ILL), None)
        if (fault := examine_decision(call, self._store, blurred)) is None:
            return
        name = f"a decision of {call.where.op}"
        for key in call.inherited:
            self._reached.note(key, name)
        causes = list(self._suspects.of(call.before, COLLIDED))
        for suspect in causes:
            self._accuse(suspect, name)
        if not (call.inherited or causes):
            self._add(fault, "the decision")

    def _integers(self, call: Call, tensor: torch.Tensor, companions: Companions) -> None:
        """Let different whole numbers that became equal travel on, until something takes them for ids."""
        if COLLIDED in companions.suspects or (fault := collisions_in(call, tensor, self._store)) is None:
            return
        self._suspects.add(companions, COLLIDED, fault)
        if fault.note == CONSECUTIVE:
            self._add(fault)

    def _note_largest(self, call: Call, tensor: torch.Tensor, largest: float) -> None:
        """Record how large the values of 16 bits became at each place."""
        largest = largest if math.isfinite(largest) else largest_of(tensor)
        key = (call.where, dtype_name(tensor.dtype))
        if largest > self.largest.get(key, (-1.0, 0.0))[0]:
            near = largest * _NEAR > largest_number(tensor.dtype)
            self.largest[key] = largest, largest_input(call) if near else 0.0

    def _accuse(self, suspect: Fault, reaches: str) -> None:
        """Record a suspect as the fault that it is."""
        self._faults.setdefault(suspect.key, suspect)
        self._reached.note(suspect.key, reaches)

    def _dropped(self, companions: Companions) -> None:
        """Record which faults are in a value that is gone and that no op has used."""
        if not companions.consumed:
            top, known = largest_number(torch.float32), companions.faults & self._faults.keys()
            large = [key for key in known if self._faults[key].exact_amax > top]
            self._reached.discard(companions.faults, scaled=self.scale != 1, large=large)

    def _add(self, fault: Fault, reaches: str = "") -> None:
        self._faults[fault.key] = self._faults[fault.key] + fault if fault.key in self._faults else fault
        if reaches:
            self._reached.note(fault.key, reaches)


def _lost_update(call: Call) -> float:
    """Which part of what is added to 16-bit values, which have no gradient, they cannot take up."""
    if call.name not in ("add_", "sub_") or call.args[0].itemsize > 2:
        return 0.0
    weight, update = call.args[:2]
    if weight.is_leaf and weight.grad is not None:  # training, of which `stagnation` judges all steps
        return 0.0
    if not has_companions(update) or update.numel() <= 1:
        return 0.0
    update = (update.detach().double() * call.argument("alpha", 1)).expand_as(weight)
    gone = update.abs() <= weight.detach().double().abs() * roundoff(weight.dtype)
    return float(torch.linalg.vector_norm(update[gone]) / torch.linalg.vector_norm(update).clamp_min(1e-300))


def _takes_gradients(call: Call) -> bool:
    """Whether an op scales or copies gradients, as clipping does, or averages them in float32, as optimizers do.

    Gradients are judged as a whole, so their small rows may have any error, which the result has then too.
    """
    if True not in map(_GRADIENT, call.before):
        return False
    op, written = call.traits, {id(tensor) for tensor in call.written}
    averages = "other" in op.linear or (op.adds and not op.divides)
    averages = averages and all(t.itemsize > 2 and not t.requires_grad for t in call.written)
    if not averages and op.copies is None and op.linear[:1] not in (("-1",), ("other",), ("1/other",)):
        return False
    many = [(id(t) in written, c) for t, c in zip(call.inputs, call.before, strict=True) if t.numel() > 1]
    overwrites = averages or op.resets
    sources = [c for was_written, c in many if not (was_written and overwrites)] or [c for _, c in many]
    return bool(sources) and all(companions.gradient for companions in sources)
