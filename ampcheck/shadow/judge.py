"""Compare every result of the run with its companions, and name the op that is at fault."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.run import Where
from ampcheck.shadow import faults
from ampcheck.shadow.bounds import FLOOR, Examination, examine, look
from ampcheck.shadow.call import Call, Side, leaves
from ampcheck.shadow.companions import Companions, CompanionStore, has_companions, roundoff, view_of
from ampcheck.shadow.decisions import decides, examine_decision
from ampcheck.shadow.faults import Fault, Key, Step, extended
from ampcheck.torchtools.origin import Origin
from ampcheck.torchtools.source import op_name

_LARGEST = 2.0**53
"""Beyond it not even float64 holds every integer; a mask such as finfo.min is no count."""

_COUNTED = 1 << 22
"""Elements among which collisions are counted, at the most."""

_NEAR = 16.0
"""The factor below the maximum of a format from which inputs are looked at as well."""

_ACCUMULATES = 8
"""Writes in a row from which a tensor counts as an accumulator."""

_ACCUMULATED = FLOOR / 8
"""`FLOOR` of an accumulator in 16 bits: accumulated in float32 and rounded once, its error would be one rounding."""


class Judge:
    """The faults of a run, and what is left of them.

    judged: results that were compared; low: those of 16 bits or fewer; whole: those of them that hold whole numbers.
    nonfinite: the ops that make exact values infinite or NaN. largest: by place and dtype of 16 bits, the largest
    finite magnitude of a result, and that of its inputs where the result comes near the end of the format.
    """

    def __init__(self, store: CompanionStore) -> None:
        self.judged = self.low = self.whole = 0
        self.nonfinite: dict[Where, Examination] = {}
        self.largest: dict[tuple[Where, str], tuple[float, float]] = {}
        self._store = store
        self._faults: dict[Key, Fault] = {}
        self._reached: defaultdict[Hashable, dict[str, float]] = defaultdict(dict)
        self._collided: list[tuple[Key, Companions]] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in the order in which they first happened, with what they reached."""
        used = {key for key, companions in self._collided if companions.consumed}
        for key in used:
            self._reached[key].setdefault("later ops", 1.0)
        found = (replace(fault, reaches=dict(self._reached.get(key, {}))) for key, fault in self._faults.items())
        return tuple(sorted(found, key=lambda fault: fault.index))

    decides = staticmethod(decides)

    def judge(
        self,
        call: Call,
        origin: Origin,
        before: list[Companions],
        inherited: frozenset[Key],
        ruled: bool,
        index: int,
    ) -> None:
        """Compare the results of an op that ran. ruled: its companions followed; else they restarted."""
        where = origin.where(op_name(call.op))
        if not call.fresh and not call.written:
            self._decision(call, where, inherited, index)
            return
        if not ruled:
            return
        if decides(call):
            self._decision(call, where, inherited, index)
        if call.schema.moves and not inherited and not call.written:
            return
        statistics = call.name.startswith("native_") and not call.name.endswith("backward")
        for tensor in call.written + (call.fresh[:1] if statistics else call.fresh):
            if tensor.numel():
                self._result(call, tensor, where, before, inherited, index)

    def reach(self, outputs: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        """Record which faults are left in these tensors."""
        for name, tensor in outputs.items():
            companions = self._store.known(tensor) if has_companions(tensor) else None
            for key in companions.faults if companions is not None else ():
                self._reached[key][name] = 1.0
        known = {n: c for n, t in gradients.items() if has_companions(t) and (c := self._store.known(t)) is not None}
        if not any(companions.faults for companions in known.values()):
            return
        total = sum(_square(self._store.exact(gradients[name])) for name in known) ** 0.5
        for name, companions in known.items():
            if not companions.faults:
                continue
            error = _square(gradients[name].double() - self._store.exact(gradients[name])) ** 0.5
            share = error / max(total, 1e-300)
            if not share <= FLOOR * companions.unit:
                for key in companions.faults:
                    self._reached[key][name] = max(share, self._reached[key].get(name, 0.0))

    def reach_ends(self) -> None:
        """Record which faults are left in values that are alive and that no op has used."""
        for companions in self._store:
            if not companions.consumed:
                for key in companions.faults:
                    self._reached[key].setdefault("a result that is still in use", 1.0)

    def _result(
        self,
        call: Call,
        tensor: torch.Tensor,
        where: Where,
        before: list[Companions],
        inherited: frozenset[Key],
        index: int,
    ) -> None:
        companions = self._store.of(tensor)
        exact, moved = view_of(tensor, companions.exact.values), view_of(tensor, companions.moved.values)
        whole, unit = where.phase == "backward", companions.unit
        low = tensor.dtype.itemsize <= 2
        accumulates = low and companions.updates >= _ACCUMULATES
        floor = _ACCUMULATED if accumulates else FLOOR
        self.judged += 1
        self.low += low
        if low:
            self._note_largest(call, tensor, where)
            if companions.whole:
                self.whole += 1
                self._collision(call, tensor, exact, companions, where, index)
        companions.faults, companions.trail = frozenset(), None
        if not tensor.is_complex() and look(tensor, exact, moved, unit, whole=whole, floor=floor):
            return
        form = format_of(torch.float32 if tensor.is_complex() else tensor.dtype)
        seen = examine(tensor, exact, moved, unit, form=form, whole=whole, floor=floor)
        if (seen.exact_nan or seen.exact_inf) and not any(_nonfinite(self._store, t) for t in call.inputs):
            self.nonfinite.setdefault(where, seen)
        if not seen.beyond:
            return
        if inherited:
            companions.faults = inherited
            before_it = next((c.trail for c in before if c.faults and isinstance(c.trail, Step)), None)
        else:
            fault = self._fault(call, tensor, exact, seen, where, form, index)
            self._add(fault)
            companions.faults = frozenset([fault.key]) if fault.kind != faults.MASK else frozenset()
            before_it = None
        companions.trail = extended(where, torch.inf if seen.lost else seen.error, before_it)

    def _decision(self, call: Call, where: Where, inherited: frozenset[Key], index: int) -> None:
        if call.name == "_local_scalar_dense":
            for key in inherited:
                self._reached[key][f"a number that left the run at {where.file}:{where.line}"] = 1.0
            return
        if not decides(call):
            return
        decided = examine_decision(call, self._store)
        if decided is None:
            return
        for key in inherited:
            self._reached[key][f"a decision of {where.op}"] = 1.0
        if not inherited:
            source = call.inputs[0]
            seen = Examination(decided.numel, error=decided.margin, limit=decided.limit)
            fault = Fault(
                faults.DECISION, where, _name(source), seen, tuple(source.shape), _amax(source),
                elements=decided.elements, index=index,
            )  # fmt: skip
            self._add(fault)
            self._reached[fault.key]["the decision"] = decided.elements / max(1, decided.numel)

    def _collision(
        self, call: Call, tensor: torch.Tensor, exact: torch.Tensor, companions: Companions, where: Where, index: int
    ) -> None:
        """Record different whole numbers that became equal."""
        if not 1 < tensor.numel() <= _COUNTED:
            return
        largest = float(exact.abs().amax())
        if not 0.5 <= largest * roundoff(tensor.dtype) < _LARGEST * roundoff(tensor.dtype):
            return
        lost = _different(exact) - _different(tensor)
        if lost <= 0:
            return
        fault = Fault(
            faults.COLLISION, where, _name(tensor), Examination(tensor.numel()), tuple(tensor.shape),
            largest, _amax(tensor), largest, lost, index=index,
        )  # fmt: skip
        self._add(fault)
        self._collided.append((fault.key, companions))

    def _note_largest(self, call: Call, tensor: torch.Tensor, where: Where) -> None:
        """Record how large the values of 16 bits became at each place."""
        largest = float(torch.linalg.vector_norm(tensor.detach(), torch.inf, dtype=torch.float32))
        if not math.isfinite(largest):
            largest = _amax(tensor)
        key = (where, _name(tensor))
        if largest > self.largest.get(key, (-1.0, 0.0))[0]:
            near = largest * _NEAR > format_of(tensor.dtype).max
            self.largest[key] = largest, _largest_input(call) if near else 0.0

    def _add(self, fault: Fault) -> None:
        self._faults[fault.key] = self._faults[fault.key] + fault if fault.key in self._faults else fault

    def _fault(
        self,
        call: Call,
        tensor: torch.Tensor,
        exact: torch.Tensor,
        seen: Examination,
        where: Where,
        form: FloatFormat,
        index: int,
    ) -> Fault:
        accumulates = bool(call.written) or self._store.of(tensor).updates >= _ACCUMULATES
        return Fault(
            self._kind(call, tensor, seen, accumulates),
            where,
            _name(tensor),
            seen,
            tuple(tensor.shape),
            amax_in=_largest_input(call),
            amax_out=_amax(tensor),
            exact_amax=_amax(exact),
            elements=seen.lost or seen.zeroed,
            index=index,
        )

    def _kind(self, call: Call, tensor: torch.Tensor, seen: Examination, accumulates: bool) -> str:
        if seen.lost:
            return faults.MASK if seen.masked else faults.OVERFLOW
        if seen.flushed > 0.5:
            return faults.ZERO if seen.emptied else faults.FLUSH
        if accumulates:
            return faults.DRIFT
        return faults.ROUNDING if self._rounds(call, tensor, seen) else faults.CANCELLATION

    def _rounds(self, call: Call, tensor: torch.Tensor, seen: Examination) -> bool:
        """Whether the op itself loses the digits: float64 on the same inputs gives something else."""
        try:
            alone = _Alone(self._store, "exact").run(call)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return True
        same = [r for r in leaves(alone) if r.shape == tensor.shape and r.is_complex() == tensor.is_complex()]
        if not same:
            return True
        wide = tensor.to(same[0].dtype)
        own = min(float(torch.linalg.vector_norm(wide - r)) for r in same)
        size = min(float(torch.linalg.vector_norm(r)) for r in same)
        return not own <= 0.3 * seen.impact * size


class _Alone(Side):
    """The real inputs of one op, converted to float64."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.convert(tensor)


def _nonfinite(store: CompanionStore, tensor: torch.Tensor) -> bool:
    return not bool(store.exact(tensor).isfinite().all())


def _different(values: torch.Tensor) -> int:
    return int(torch.unique(values).numel())


def _largest_input(call: Call) -> float:
    """The largest finite magnitude among the arguments, numbers included, without those that were overwritten."""
    written = {t.untyped_storage()._cdata for t in call.written}
    tensors = [_amax(t) for t in call.inputs if t.untyped_storage()._cdata not in written]
    numbers = [abs(v) for v in (*call.args, *call.kwargs.values()) if type(v) in (int, float) and math.isfinite(v)]
    return float(max(tensors + numbers, default=0.0))


def _square(values: torch.Tensor) -> float:
    """The sum of the squares; infinite for values that are not finite."""
    total = float(torch.linalg.vector_norm(values)) ** 2
    return total if total == total else torch.inf


def _amax(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    magnitude = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return float(torch.where(magnitude.isfinite(), magnitude, 0.0).amax())


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
