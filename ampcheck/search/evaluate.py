"""One example under every property: finite in and finite out, agreement with float64, compiled code, invariances."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.search.arms import Arms, Example, Outputs
from ampcheck.search.cast_tracking import CastTracker, FormatFacts
from ampcheck.search.compiling import Compiled
from ampcheck.search.invariances import Invariance
from ampcheck.search.rounding import VOTES, Rounding, roundings_of
from ampcheck.search.stats import (
    ACCURACY,
    COMPILED,
    DECISION,
    INVARIANCE,
    NONFINITE,
    RAISES,
    RANGE,
    SHAPE,
    Problem,
)

_LEAST = 2
"""Roundings that every example is granted: of its inputs and of its result."""


_NEAR = 2
"""Times that changed inputs are moved by roundings of float64, to see how much these matter."""


@dataclass(slots=True)
class Evaluation:
    """What one example showed. outside: why it could not be judged, "" where it was; lacking: for want of a kernel."""

    problems: list[Problem] = field(default_factory=list)
    outside: str = ""
    lacking: str = ""
    elements: int = 0
    undefined: int = 0
    ratio: float = 0.0
    amax: float = 0.0
    flushed: float = 0.0


class Evaluator:
    """Looks at examples; remembers how many roundings each shape of call makes."""

    def __init__(self, arms: Arms, invariances: Sequence[Invariance] = (), compiled: Compiled | None = None) -> None:
        self.arms, self.invariances, self.compiled = arms, invariances, compiled
        self.facts = FormatFacts()
        self.held_against: Counter[str] = Counter()  # by invariance, the examples that it changed and that were judged
        self._roundings: dict[Any, int] = {}
        self.unsteady: str | None = None  # not known before something else than zeros comes out

    def look(self, example: Example) -> Evaluation:
        """Judge one example."""
        if reason := self.arms.settle(example):
            return Evaluation(outside=reason)
        if self.unsteady is None:
            self.unsteady = self.arms.unsteady(example)
        if self.unsteady:
            return Evaluation(outside=self.unsteady)
        with self.facts.noted():
            low = self.arms.judged(example)
        if low.lacking:
            return Evaluation(outside=low.lacking, lacking=low.lacking)
        with self.facts.answered():
            wide = self.arms.wide(example)
            if wide.error is not None:
                return Evaluation(outside=brief(wide.error))
            seen = self._judge(example, low, wide)
        if not seen.problems and self.compiled is not None:
            seen.problems += self._look_at_compiled(example, low, wide)
        for invariance in self.invariances if not seen.problems else ():
            with self.facts.answered():
                seen.problems += self._look_at(invariance, example, wide)
        return seen

    def roundings(self, example: Example) -> int:
        """The chain of roundings, counted once for each shape of call."""
        key = example.signature()
        if key not in self._roundings:
            self._roundings[key] = roundings_of(self.arms, example)
        return self._roundings[key]

    def _judge(self, example: Example, low: Outputs, wide: Outputs) -> Evaluation:
        seen = Evaluation()
        if low.error is not None:
            seen.problems.append(Problem(RAISES, detail=brief(low.error)))
            return seen
        rounding: Rounding | None = None
        for path, twin in wide.found.items():
            own = low.found.get(path)
            if own is None or own.shape != twin.shape:
                rounding = rounding or self._rounding(example, wide)
                if own is not None and any(path in run and run[path].shape == own.shape for run in _votes(rounding)):
                    seen.undefined += twin.numel()
                    continue
                found = "missing" if own is None else f"of shape {tuple(own.shape)}"
                seen.problems.append(Problem(SHAPE, path, detail=f"{found} where float64 gives {tuple(twin.shape)}"))
                continue
            if not own.numel():
                continue
            if not twin.is_floating_point():
                seen.elements += own.numel()
                if not torch.equal(own, twin.to(own.dtype)):
                    rounding = rounding or self._rounding(example, wide)
                    seen.problems += _decided(path, own, twin, rounding)
                continue
            finite = twin.isfinite()
            seen.elements += int(finite.sum())
            seen.undefined += int((~finite).sum())
            if bool((~finite & ~own.isfinite()).any()) and (hidden := self._hidden(example, path, own, twin)):
                seen.problems += hidden
                continue
            if self._scores(seen, own, twin, finite):
                continue
            rounding = rounding or self._rounding(example, wide)
            seen.problems += self._differs(path, own, twin, rounding, seen)
        return seen

    def _rounding(self, example: Example, wide: Outputs) -> Rounding:
        return Rounding(self.arms, example, wide.found, self.roundings(example))

    def _hidden(self, example: Example, path: str, own: torch.Tensor, twin: torch.Tensor) -> list[Problem]:
        """Where the model's own casts to 16 bits make the judge's result infinite or NaN as well."""
        tracker = CastTracker()
        judge = self.arms.wide(example, tracker).found.get(path)
        if not tracker.formats or judge is None or judge.shape != own.shape:
            return []
        flat = judge.double().reshape(-1)
        where = (~twin.isfinite() & ~own.isfinite()).reshape(-1) & flat.isfinite()
        if not bool(where.any()):
            return []
        index = int(where.nonzero()[0])
        kind = RANGE if abs(float(flat[index])) >= format_of(own.dtype).overflows_at else NONFINITE
        return [Problem(kind, path, index, float(own.reshape(-1)[index]), float(flat[index]), float(where.sum()))]

    def _scores(self, seen: Evaluation, own: torch.Tensor, twin: torch.Tensor, finite: torch.Tensor) -> bool:
        """Note how near to its limits the output comes; whether two roundings explain every element already."""
        fmt = format_of(self.arms.dtype)
        values, judge = own.double(), twin.double()
        both = own.isfinite() & finite
        size = torch.where(finite, judge, 0.0).abs()
        limit = _LEAST * (fmt.unit_roundoff * size + fmt.smallest_subnormal)
        ratio = float((torch.where(both, values - judge, 0.0).abs() / limit).amax())
        seen.amax = max(seen.amax, float(torch.where(both, values, 0.0).abs().amax()))
        alive = finite & (judge != 0)
        if bool(alive.any()):
            seen.flushed = max(seen.flushed, float((alive & (values == 0)).sum() / alive.sum()))
        if ratio > 1 or bool((~own.isfinite() & finite).any()):
            return False
        seen.ratio = max(seen.ratio, ratio)
        return True

    def _differs(
        self, path: str, own: torch.Tensor, twin: torch.Tensor, rounding: Rounding, seen: Evaluation
    ) -> list[Problem]:
        broken = (~own.isfinite() & twin.isfinite()).reshape(-1)
        if bool(broken.any()):
            flat, judge = own.reshape(-1), twin.double().reshape(-1)
            beyond = format_of(own.dtype).overflows_at
            # At the edge of the range, or of the function's domain, rounding decides on which side a value falls.
            sway = rounding.swayed(path, rounding.steps)
            out = broken & ~(sway.isinf() | ((judge.abs() < beyond) & (judge.abs() + sway >= beyond)))
            kinds = ((NONFINITE, out & (judge.abs() < beyond)), (RANGE, out & (judge.abs() >= beyond)))
            found = []
            for kind, where in kinds:
                if bool(where.any()):
                    index = int(where.nonzero()[0])
                    count = float(where.sum())
                    found.append(Problem(kind, path, index, float(flat[index]), float(judge[index]), count))
            if found:
                return found
        worst = rounding.worst(path, own)
        seen.ratio = max(seen.ratio, worst.ratio)
        if not worst.ratio > 1:
            return []
        low, wide = float(own.reshape(-1)[worst.index]), float(twin.reshape(-1)[worst.index])
        return [Problem(ACCURACY, path, worst.index, low, wide, worst.observed, worst.allowed, worst.roundings)]

    def _look_at_compiled(self, example: Example, low: Outputs, wide: Outputs) -> list[Problem]:
        """Compiled code fails where rounding does not explain it and eager mode is nearer to float64."""
        assert self.compiled is not None
        outputs = self.compiled(example)
        if outputs is None:
            return []
        if outputs.error is not None:
            if self.compiled.cannot_run(outputs.error):
                return []
            return [Problem(COMPILED, detail=f"it raises {brief(outputs.error)}")]
        found = []
        with self.facts.answered():
            problems = self._judge(example, outputs, wide).problems
        for problem in problems:
            eager = low.found.get(problem.output)
            off = 0.0
            if eager is not None and problem.kind == ACCURACY:
                off = abs(float(eager.reshape(-1)[problem.index]) - problem.wide)
            if problem.kind != ACCURACY or problem.observed > off:
                found.append(replace(problem, kind=COMPILED, detail=problem.kind))
        return found

    def _look_at(self, invariance: Invariance, example: Example, wide: Outputs) -> list[Problem]:
        """float64 tells whether the invariance holds; low precision is then judged at the other inputs."""
        changed = invariance.changed(example)
        moved = invariance.changed(example.to(torch.float64, self.arms.device))
        if _overflows(changed, moved) or changed.key() == example.key() or not _as_many_values(example, moved):
            return []
        judge = self.arms.wide(moved)
        if judge.error is not None:
            return [Problem(INVARIANCE, detail=f"{invariance.name}: float64 raises {brief(judge.error)} there")]
        for path, twin in wide.found.items():
            back = invariance.undone(judge.found[path]) if path in judge.found else None
            if back is None or back.shape != twin.shape:
                return [Problem(INVARIANCE, path, detail=f"{invariance.name}: float64 gives another shape there")]
            if broken := self._does_not_hold(invariance.name, path, moved, judge, twin, back):
                return [replace(broken, at=changed)]
        wide = self.arms.wide(changed)
        if wide.error is not None:
            return []
        seen = self._judge(changed, self.arms.low(changed), wide)
        self.held_against[invariance.name] += seen.elements > 0
        return [
            replace(one, kind=INVARIANCE, detail=f"{invariance.name}: {one.kind}", at=changed) for one in seen.problems
        ]

    def _does_not_hold(
        self, name: str, path: str, moved: Example, judge: Outputs, twin: torch.Tensor, back: torch.Tensor
    ) -> Problem | None:
        """Where float64 itself gives something else at the changed inputs."""
        detail = f"{name} does not hold in float64 either"
        if not twin.numel():
            return None
        if not twin.is_floating_point():
            index = int((back != twin).reshape(-1).int().argmax())
            values = float(back.reshape(-1)[index]), float(twin.reshape(-1)[index])
            return None if torch.equal(back, twin) else Problem(INVARIANCE, path, index, *values, detail=detail)
        finite = twin.isfinite()
        off = torch.where(finite & back.isfinite(), back.double() - twin.double(), 0.0).abs()
        allowed = format_of(self.arms.dtype).unit_roundoff * float(torch.where(finite, twin, 0.0).abs().amax())
        if float(off.amax()) > allowed:
            # The changed inputs, and the results there, are themselves rounded in float64.
            fine = format_of("float64").unit_roundoff
            reach = judge.found[path].double().abs().nan_to_num(0.0, 0.0).amax()
            allowed += _LEAST * self.roundings(moved) * fine * float(reach)
            for number in range(_NEAR):
                generator = torch.Generator().manual_seed(number)
                signs = {
                    name: torch.randint(0, 2, t.shape, generator=generator).to(t) * 2 - 1
                    for name, t in moved.floats().items()
                }
                near = moved.replaced({name: t * (1 + 2 * fine * signs[name]) for name, t in moved.floats().items()})
                there = self.arms.wide(near).found.get(path, judge.found[path]).double()
                allowed += float((there - judge.found[path].double()).abs().nan_to_num(0.0, 0.0).amax())
        if bool((finite == back.isfinite()).all()) and float(off.amax()) <= allowed:
            return None
        index = int(off.argmax()) if float(off.amax()) > allowed else int((finite != back.isfinite()).int().argmax())
        values = float(back.reshape(-1)[index]), float(twin.reshape(-1)[index])
        return Problem(INVARIANCE, path, index, *values, float(off.reshape(-1)[index]), allowed, detail=detail)


def _overflows(changed: Example, moved: Example) -> bool:
    """Whether the change makes an infinity of what is finite in float64: 60,000 times 4 is no float16."""
    pairs = zip(changed.floats().values(), moved.floats().values(), strict=False)
    return any(bool((~own.isfinite() & wide.isfinite()).any()) for own, wide in pairs if own.shape == wide.shape)


def _as_many_values(example: Example, moved: Example) -> bool:
    """Whether what differs still differs: 1e-20 + 1 and 3e-20 + 1 are one number of float64, and tell nothing."""
    counts = [[torch.unique(t.double()).numel() for t in one.floats().values()] for one in (example, moved)]
    return all(after >= before for before, after in zip(*counts, strict=False))


def _votes(rounding: Rounding) -> Iterator[dict[str, torch.Tensor]]:
    """The judge at data that moved by a few roundings, within the subnormal range besides, or without subnormals."""
    yield from rounding.moved(rounding.steps, VOTES)
    yield from rounding.moved(rounding.steps, VOTES, floor=rounding.normal)
    yield from rounding.flushed()


def _decided(path: str, own: torch.Tensor, twin: torch.Tensor, rounding: Rounding) -> list[Problem]:
    """Integers and bools that differ, unless they lie between what data decide that moved by a few roundings."""
    least = most = twin
    found = own.to(twin.dtype)
    wrong = found != twin
    for run in _votes(rounding):
        if not bool(wrong.any()):
            break
        if path in run and run[path].shape == twin.shape:
            least, most = torch.minimum(least, run[path]), torch.maximum(most, run[path])
            wrong = (found < least) | (found > most)
    wrong = wrong.reshape(-1)
    if not bool(wrong.any()):
        return []
    index = int(wrong.nonzero()[0])
    low, wide = float(own.reshape(-1)[index]), float(twin.reshape(-1)[index])
    count = float(wrong.sum())
    return [Problem(DECISION, path, index, low, wide, count, 0.0, rounding.roundings)]


def describe_value(value: float) -> str:
    """A number in a message: short, with infinities and NaN by name."""
    return f"{value:.6g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
