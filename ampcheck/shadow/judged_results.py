"""Compare each result of an op with its companions: within its bound, suspect, or a fault of the op."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.facts.history import extended
from ampcheck.facts.memory import dtype_name, largest_number, view_of
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.records import faults
from ampcheck.records.results import Examination
from ampcheck.shadow.accumulators import is_accumulator
from ampcheck.shadow.bounds import Look, cut_off, examine, floor_of, look
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import (
    fault_at,
    fault_of,
    float32_keeps,
    largest_input,
    largest_of,
    makes_nonfinite,
    with_sizes,
)
from ampcheck.shadow.comparisons import determine, own_error, restarts
from ampcheck.shadow.found import Found
from ampcheck.shadow.integers import CONSECUTIVE, collisions_in
from ampcheck.shadow.ranking import hides_ranking
from ampcheck.shadow.spread import widened
from ampcheck.shadow.suspects import (
    BLURRED,
    COLLIDED,
    CUT,
    CUTS,
    ERROR,
    ILL,
    MASKED,
    TAKEN,
    VANISHED,
    drop,
    emptied_rows,
    vanished,
)
from ampcheck.shadow.updates import UpdateJudge

_HEADROOM_FACTOR = 16.0
"""The factor below the maximum of a format from which inputs are looked at as well."""

_ACCUMULATED = 1.0
"""The honest error of an accumulator of 16 bits, in unit roundoffs: added in float32 and rounded once, it has one."""

_SMALL_NUMEL = 64
"""Elements up to which an error heals only if each of them is within its bound."""

_UNSEEN = Look(False, largest=math.nan)
_SUSPECTS = attrgetter("suspects")


@dataclass(slots=True)
class _Result:
    """A result of an op beside its companions.

    low: it has 16 bits or fewer. accumulates: it is written again and again. floor: see `bounds.FLOOR`. single: each of
    its elements is looked at alone. masked: an input carries a mask whose infinities exact does not have. glance: what
    a fast look showed; of complex and single ones nothing.
    """

    call: Call
    tensor: torch.Tensor
    companions: Companions
    exact: torch.Tensor
    moved: torch.Tensor
    low: bool
    accumulates: bool
    floor: float
    single: bool
    masked: bool
    glance: Look = _UNSEEN

    def look(self, *, rounds: bool = False, strict: bool = False) -> None:
        """Look at the whole, fast."""
        whole, unit = self.companions.gradient, self.companions.unit
        self.glance = look(
            self.tensor, self.exact, self.moved, unit, whole=whole, floor=self.floor, rounds=rounds, strict=strict
        )

    def examined(self) -> Examination:
        """Compare it with its companions in float64."""
        form = format_of(torch.float32 if self.tensor.is_complex() else self.tensor.dtype)
        seen = examine(
            self.tensor,
            self.exact,
            self.moved,
            self.companions.unit,
            form=form,
            whole=self.companions.gradient,
            floor=self.floor,
            single=self.single,
            strict=bool(self.call.inherited),
        )
        if self.masked and not seen.beyond and (rows := emptied_rows(self.tensor, self.exact, self.moved)):
            return replace(seen, flagged=rows, error=1.0)
        return seen


class ResultJudge:
    """The judge of results.

    judged: results that were compared; low: those of 16 bits or fewer; whole: those of them that hold whole numbers.
    nonfinite: the ops that make exact values infinite or NaN. chosen: the ops that chose a NaN of exact. largest: by
    place and dtype of 16 bits, the largest finite magnitude of a result, and that of its inputs where the result comes
    near the end of the format.
    """

    def __init__(self, store: CompanionStore, found: Found, updates: UpdateJudge) -> None:
        self.judged = self.low = self.whole = 0
        self.nonfinite: dict[Where, Examination] = {}
        self.chosen: dict[Where, None] = {}
        self.largest: dict[tuple[Where, str], tuple[float, float]] = {}
        self._store, self._found, self._updates = store, found, updates

    def judge(self, call: Call, tensor: torch.Tensor, companions: Companions) -> None:
        """Compare a result with its companions."""
        result = self._beside(call, tensor, companions)
        if ERROR in companions.suspects and restarts(tensor, self._store, companions):
            companions.faults = call.inherited
            return
        self._note_range(result)
        doubtful = result.glance.ill or not result.glance.within
        if (doubtful or companions.suspects) and self._explained_by_own_error(result):
            return
        if doubtful or result.low:
            self._suspect(result)
        if result.glance.within and not result.masked:
            if self._found.reached.lost:
                self._found.reached.repeat(call.where, result.exact)
            if companions.suspects:
                drop(companions, MASKED)
            return
        seen = result.examined()
        if makes_nonfinite(call, seen, self._store):
            self.nonfinite.setdefault(call.where, seen)
        if not seen.beyond:
            drop(companions, MASKED)
        elif call.inherited:
            self._go_on(result, seen)
        else:
            self._blame(result, seen)

    def _beside(self, call: Call, tensor: torch.Tensor, companions: Companions) -> _Result:
        """Count a result, let whole numbers collide, and look at it beside its companions."""
        low = tensor.itemsize <= 2
        self.judged += 1
        self.low += low
        self.whole += low and companions.whole
        self._found.recurrence.runs[call.where, tuple(tensor.shape)] += 1
        if companions.whole:
            self._collide(call, tensor, companions)
        if tensor.numel() * (2 if tensor.is_complex() else 1) == companions.numel:
            companions.faults, companions.trail = frozenset(), None  # else faults of other parts of the storage stay
        if ERROR in companions.suspects and determine(call, tensor, self._store, companions):
            drop(companions, ERROR)
        values = companions.held or companions.values
        exact, moved = view_of(tensor, values.exact), view_of(tensor, values.moved)
        accumulates = low and is_accumulator(call, tensor, companions)
        floor = _ACCUMULATED if accumulates else floor_of(companions.depth)
        single = bool(call.inherited) and tensor.numel() <= _SMALL_NUMEL
        carried = list(map(_SUSPECTS, filter(_SUSPECTS, call.before)))
        masked = bool(carried) and any(MASKED in suspects for suspects in carried)
        result = _Result(call, tensor, companions, exact, moved, low, accumulates, floor, single, masked)
        if not tensor.is_complex() and not single:
            rounds = call.name == "_to_copy" and not any(c.written for c in call.before)
            result.look(rounds=rounds, strict=bool(call.inherited))
        return result

    def _note_range(self, result: _Result) -> None:
        """Record how large values became, what a cast to 8 bits cut off, and which elements vanished."""
        if result.low:
            self._note_largest(result)
        if result.tensor.itemsize == 1 and result.call.traits.copies is not None:
            self._cut_off(result)
        if result.glance.emptier or result.single:
            self._note_zeros(result)
        elif result.companions.suspects:
            drop(result.companions, VANISHED)

    def _explained_by_own_error(self, result: _Result) -> bool:
        """Return whether a result that seems wrong is an error that the code itself measures, or what a sum has taken
        up."""
        call, tensor, companions = result.call, result.tensor, result.companions
        if companions.suspects and result.glance.within and not (result.glance.ill or result.single):
            drop(companions, ERROR, TAKEN)
        widens = not (result.glance.within or result.single or call.inherited)
        if widens and widened(call, tensor, self._store):
            result.moved = self._store.moved(tensor)
            result.look()
        doubtful = not result.single and (result.glance.ill or not result.glance.within)
        if not doubtful or call.inherited or not (sort := own_error(call, tensor, self._store)):
            return False
        self._found.suspects.add(companions, sort, fault_at(faults.CANCELLATION, call, tensor, Examination(0)))
        if sort == TAKEN:
            self._updates.compensate()
        return True

    def _suspect(self, result: _Result) -> None:
        """Let a result travel on as a suspect that is ill, or whose ranking is hidden."""
        call, tensor, companions = result.call, result.tensor, result.companions
        known = {ILL, ERROR, TAKEN} & companions.suspects.keys()
        if result.glance.ill and not known and float32_keeps(call, tensor, self._store):
            ill = fault_at(faults.CANCELLATION, call, tensor, Examination(tensor.numel(), error=1.0))
            self._found.suspects.add(companions, ILL, with_sizes(ill, call, tensor, self._store))
        ranks = result.low and not (companions.gradient or result.single or BLURRED in companions.suspects)
        if ranks and hides_ranking(call, tensor, self._store, result.glance, accumulates=result.accumulates):
            fault = fault_at(faults.DECISION, call, tensor, Examination(tensor.numel()))
            self._found.suspects.add(companions, BLURRED, fault)

    def _go_on(self, result: _Result, seen: Examination) -> None:
        """Let a result suffer from the faults of the inputs."""
        call, companions = result.call, result.companions
        companions.faults = call.inherited
        self._found.recurrence.note_return(call.where, tuple(result.tensor.shape), call.inherited)
        earlier = next((c.trail for c in call.before if c.faults and c.trail is not None), None)
        companions.trail = extended(call.where, torch.inf if seen.lost else seen.error, earlier)

    def _blame(self, result: _Result, seen: Examination) -> None:
        """Record the fault of an op, at the place where it began."""
        call, tensor, companions, found = result.call, result.tensor, result.companions, self._found
        fault = fault_of(call, tensor, seen, self._store, accumulates=result.accumulates)
        if fault.kind == faults.MASK:
            if MASKED not in companions.suspects:
                found.suspects.add(companions, MASKED, fault)
            found.add(fault)
            return
        fault = found.suspects.origin_of(fault, call, tensor, self._store)
        found.recurrence.note(fault, accumulates=result.accumulates)
        found.reached.lose(fault, result.exact)
        found.add(fault)
        if result.accumulates and fault.kind == faults.DRIFT:  # what is made of it later has other bounds
            found.reached.note(fault.key, "the accumulator", seen.impact)
        companions.faults = frozenset({fault.key})
        companions.trail = extended(call.where, torch.inf if seen.lost else seen.error, None)

    def _cut_off(self, result: _Result) -> None:
        """Record values of the run that a cast to 8 bits cuts off, though float64's fit, as a scale is too small, and
        those that a clamp to the end of its format has cut off."""
        call, tensor = result.call, result.tensor
        for suspect in self._found.suspects.of(call.before, CUT):
            if suspect.amax_out == format_of(tensor.dtype).max:
                self._found.accuse(suspect, CUTS)
        values = call.inputs[-1].detach().double().expand_as(tensor)
        lost = cut_off(tensor, values) & ~cut_off(tensor, result.exact)
        if not bool(lost.any()):
            return
        error = float(1 - tensor[lost].double().abs().min() / values[lost].abs().max())
        seen = Examination(tensor.numel(), int(lost.sum()), saturated=int(lost.sum()), error=error)
        fault = with_sizes(fault_at(faults.OVERFLOW, call, tensor, seen), call, tensor, self._store)
        fault = replace(fault, exact_amax=fault.amax_in)
        self._found.add(fault)
        self._found.reached.lose(fault, result.exact)

    def _note_zeros(self, result: _Result) -> None:
        """Let elements that are zero here and not in exact travel on as a suspect, until none is left."""
        call, tensor, companions = result.call, result.tensor, result.companions
        if VANISHED in companions.suspects and not call.traits.rescues and tensor.numel() > _SMALL_NUMEL:
            return  # elements that are zero were seen by `look`; the place where they began is known
        if (suspect := vanished(call, tensor, result.exact)) is None:
            drop(companions, VANISHED)
        elif result.low and (VANISHED not in companions.suspects or call.traits.rescues):
            self._found.suspects.add(companions, VANISHED, suspect)

    def _collide(self, call: Call, tensor: torch.Tensor, companions: Companions) -> None:
        """Let different whole numbers that became equal travel on, until something takes them for ids."""
        if COLLIDED in companions.suspects or (fault := collisions_in(call, tensor, self._store)) is None:
            return
        self._found.suspects.add(companions, COLLIDED, fault)
        if fault.note == CONSECUTIVE:
            self._found.add(fault)

    def _note_largest(self, result: _Result) -> None:
        """Record how large the values of 16 bits became at each place."""
        largest = result.glance.largest
        largest = largest if math.isfinite(largest) else largest_of(result.tensor)
        key = (result.call.where, dtype_name(result.tensor.dtype))
        if largest > self.largest.get(key, (-1.0, 0.0))[0]:
            near = largest * _HEADROOM_FACTOR > largest_number(result.tensor.dtype)
            self.largest[key] = largest, largest_input(result.call) if near else 0.0
