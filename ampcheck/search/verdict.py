"""Verdict of one run under `Shadow`: the errors that are left in its results, the ops at fault, and a score."""

from __future__ import annotations

import math

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.run import Where
from ampcheck.facts.norms import finite_parts, real_parts
from ampcheck.numerics.record import Execution
from ampcheck.parity.example import Example
from ampcheck.records import faults
from ampcheck.records.property import ACCURACY, DECISION, NONFINITE, RANGE, Look, Peak, Problem
from ampcheck.records.results import FLOOR, JUDGED_UNIT, MOVE, SLACK
from ampcheck.shadow import Fault, Reference, Shadow, bounds
from ampcheck.shadow.bounds import examine, group_dims
from ampcheck.shadow.compare import at_the_edge

_FEW = 64
"""Elements up to which each is judged by itself, too, where a fault is left in the output."""

_TINY = 2.0
"""Smallest subnormals that a result may be off: by its own rounding, and by that of what it was made of."""


class Judged:
    """One run under a shadow, and what it shows: `look`."""

    def __init__(self, example: Example, run: Execution, shadow: Shadow) -> None:
        assert shadow.judge is not None
        self.look, self.run = Look(), run
        self._example, self._largest = example, shadow.judge.results.largest
        # That whole numbers of a floating format became equal is honest rounding here: the inputs are exact.
        self._faults = [fault for fault in shadow.faults if fault.kind != faults.COLLISION]
        for (_, path, _), result in run.results.items():
            self.look.elements += result.value.numel()
            if result.reference is not None:
                self._judge(path, result.value, result.reference)
        if not self.look.problems:
            self._judge_decisions()
        self._note_range()

    def problem(self, path: str, tensor: torch.Tensor, *, inherits: bool = False) -> Problem | None:
        """Return what is wrong with an output of this run, or of the compiled code, that seems beyond its bound.

        inherits: a fault of the run is left in it, of which the conditioning of the data is no excuse.
        """
        reference = self.run.results["output", path, 0].reference
        assert reference is not None
        value, exact, moved = (real_parts(t).double() for t in (tensor, reference.exact, reference.moved))
        form = format_of(real_parts(tensor).dtype)
        unit = max(reference.unit, form.unit_roundoff)
        # Next to the end of the range rounding decides on which side a value falls, below it on which subnormal; and
        # what is zero by mathematics may be off by a rounding of the data.
        size, end = exact.abs(), form.overflows_at
        apart = torch.where(moved.isfinite(), moved - exact, 0.0).abs()
        honest = SLACK * (apart * (unit / MOVE) + FLOOR * unit * size)
        edge = at_the_edge(value, exact, form, honest) & (size < end)
        tiny = _TINY * max(f.smallest_subnormal for f in self._formats(form))
        near = (value - exact).abs() <= torch.where(exact == 0, max(tiny, unit * self._scale()), tiny)
        value = torch.where(edge | near, exact, value)
        seen = examine(value, exact, moved, unit, form=form, whole=False, strict=inherits)
        if inherits and not seen.beyond and value.numel() <= _FEW:
            seen = examine(value, exact, moved, unit, form=form, whole=False, strict=True, single=True)
        if not seen.beyond:
            return None
        observed, limit = (float(seen.lost), 0.0) if seen.lost else (seen.error, seen.limit)
        if seen.lost:
            lost = (~value.isfinite() & exact.isfinite()).reshape(-1)
            inside = lost & (size.reshape(-1) < end)
            kind = NONFINITE if bool(inside.any()) else RANGE
            index = int((inside if kind == NONFINITE else lost).nonzero()[0])
        else:
            kind = ACCURACY
            norm = torch.linalg.vector_norm(finite_parts(exact), dim=group_dims(exact.shape), keepdim=True)
            index = int((finite_parts(value - exact).abs() / norm.clamp_min(1e-300)).argmax())
        low, wide = float(value.reshape(-1)[index]), float(exact.reshape(-1)[index])
        blamed = self._blamed(path, kind)
        where = blamed.where if blamed is not None else Where(phase="forward")
        vanished = blamed is not None and not blamed.examination.lost
        return Problem(kind, path, index, low, wide, observed, limit, where=where, vanished=vanished)

    def _judge(self, path: str, tensor: torch.Tensor, known: Reference) -> None:
        """Compare an output with its companions: at a glance, and as a whole where that shows something."""
        look, exact, moved, unit = self.look, known.exact, known.moved, known.unit
        inherits = any(path in fault.reaches for fault in self._faults)
        if inherits or tensor.is_complex() or not bounds.look(tensor, exact, moved, unit, whole=False).within:
            problem = self.problem(path, tensor, inherits=inherits)
            undefined = int((~exact.isfinite()).sum())
            look.elements -= undefined
            look.undefined += undefined
            look.problems += [problem] if problem is not None else []
        elif unit >= JUDGED_UNIT:
            size, spread, error = (
                float(torch.linalg.vector_norm(t)) for t in (exact, moved - exact, tensor.detach() - exact)
            )
            limit = bounds.slack_of(tensor.numel()) * spread * unit / MOVE + SLACK * FLOOR * unit * size
            look.ratio = max(look.ratio, error / limit if limit else 0.0)

    def _judge_decisions(self) -> None:
        """Decisions that exact takes otherwise, and numbers that left the run with an error."""
        for fault in self._faults:
            seen = fault.examination
            reach = next((r for r in fault.reaches if r.startswith(("a decision", "a number that left"))), "")
            if fault.kind == faults.DECISION or reach:
                kind = DECISION if not reach.startswith("a number") else NONFINITE if seen.lost else ACCURACY
                detail = reach or f"a decision of {fault.where.op}"
                problem = Problem(kind, "", 0, 0.0, 0.0, seen.error, seen.limit, detail, fault.where)
                self.look.problems.append(problem)
                return

    def _note_range(self) -> None:
        """Note the headroom of the values inside, and values beyond the end of their format that had no effect."""
        for (where, name), (largest, source) in self._largest.items():
            most = format_of(name).max
            masked = largest == most <= source  # the lowest value of a mask, and what is added to it
            if not masked and (not self.look.peak.format or largest / most > self.look.peak.share):
                self.look.peak = Peak(largest / most, largest, where, name)
        lost = next((f for f in self._faults if f.kind == faults.OVERFLOW and not f.reaches), None)
        if lost is not None and not self.look.problems:
            self.look.overflow = Peak(math.inf, math.inf, lost.where, lost.dtype)

    def _blamed(self, path: str, kind: str) -> Fault | None:
        """The first fault that is left in an output; of what is not finite, the first that overflows."""
        reaching: list[Fault] = [fault for fault in self._faults if path in fault.reaches]
        lost = [fault for fault in self._faults if fault.examination.lost]
        if kind in (NONFINITE, RANGE):
            reaching = [fault for fault in reaching if fault in lost] or reaching
        return next(iter((*reaching, *lost)), None)

    def _formats(self, form: FloatFormat) -> set[FloatFormat]:
        """The formats of an output and of all 16-bit results."""
        return {form, *(format_of(name) for _, name in self._largest)}

    def _scale(self) -> float:
        """The largest finite magnitude among the inputs."""
        tensors = self._example.floats().values()
        return max((float(finite_parts(t).abs().amax()) for t in tensors if t.numel()), default=0.0)
