"""Judge one example: one run under `Shadow` gives the verdict, the op at fault and a score."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.search.compiling import Compiled
from ampcheck.search.example import Example
from ampcheck.search.invariances import Invariance
from ampcheck.search.runner import Result, Runner
from ampcheck.search.stats import (
    ACCURACY,
    COMPILED,
    DECISION,
    INVARIANCE,
    NONFINITE,
    RAISES,
    RANGE,
    Look,
    Peak,
    Problem,
)
from ampcheck.shadow import Examination, Fault, Reference, Shadow, faults
from ampcheck.shadow.bounds import FLOOR, SLACK, examine, group_dims, slack_of
from ampcheck.shadow.companions import MOVE
from ampcheck.torchtools.source import users_place

_ABSOLUTE = 2.0
"""Smallest subnormals that a result may be off: of its own rounding, and of what it was made of."""

References = dict[str, "Reference | torch.Tensor"]
"""By path of the output its companions; of integers and bools the values of the run."""


class Evaluator:
    """Judges examples. counts: by invariance, the examples that it changed and that were judged."""

    def __init__(
        self, runner: Runner, invariances: Sequence[Invariance] = (), compiled: Compiled | None = None
    ) -> None:
        self.runner, self.invariances, self.compiled = runner, invariances, compiled
        self.counts: Counter[str] = Counter()

    def look(self, example: Example) -> Look:
        """Judge one example."""
        look, references = self._judged(example)
        if self.compiled is not None and not look.problems and not look.outside:
            look.problems += self._look_at_compiled(self.compiled, example, references)
        for invariance in self.invariances if not look.outside else ():
            if not look.problems:
                look.problems += self._look_at_invariance(invariance, example)
        return look

    def _judged(self, example: Example) -> tuple[Look, References]:
        shadow = Shadow(self.runner.root)
        with self.runner.run(example, shadow) as result:
            if result.error is None:
                return self._examined(shadow, result)
        assert result.error is not None
        reason = lacking(result.error, kernels=True)
        outside = reason or self.runner.float32_error(example)
        if outside:
            return Look(outside=outside, lacking=reason), {}
        file, line = users_place(result.error)
        where = Where("forward", file=file, line=line)
        return Look([Problem(RAISES, detail=brief(result.error), where=where)]), {}

    def _examined(self, shadow: Shadow, result: Result) -> tuple[Look, References]:
        look, references = Look(), References()
        floats = {path: t for path, t in result.outputs.items() if t.is_floating_point() or t.is_complex()}
        shadow.reach(floats)
        found = [fault for fault in shadow.faults if fault.kind != faults.COLLISION]
        for path, tensor in result.outputs.items():
            look.elements += tensor.numel()
            if path not in floats:
                references[path] = tensor.clone()
            elif tensor.numel():
                references[path] = reference = shadow.reference(tensor)
                look.problems += _compared(look, path, tensor, reference, found)
        if not look.problems:
            look.problems += _decided(found)
        _note_range(look, shadow, found)
        return look, references

    def _look_at_compiled(self, compiled: Compiled, example: Example, references: References) -> list[Problem]:
        """Compiled code must be within the bounds that eager mode keeps."""
        function = compiled.function_for(example)
        if function is None:
            return []
        with self.runner.run(example, function=function) as result:
            if result.error is not None:
                if compiled.cannot_run(result.error):
                    return []
                return [_compiled_problem(f"it raises {brief(result.error)}")]
            compiled.examples += 1
            problems: list[Problem] = []
            for path, reference in references.items():
                value = result.outputs.get(path)
                expected = reference if isinstance(reference, torch.Tensor) else reference.exact
                if value is None or value.shape != expected.shape:
                    shape = "missing" if value is None else f"of shape {tuple(value.shape)}"
                    eager = f"{tuple(expected.shape)} in eager mode"
                    problems.append(_compiled_problem(f"it gives another output: {path or 'it'} is {shape}, {eager}"))
                elif isinstance(reference, torch.Tensor):
                    compiled.integers += not torch.equal(value, reference)
                else:
                    found = _compared(Look(), path, value.detach(), reference, ())
                    problems += [replace(p, kind=COMPILED, detail=p.kind, where=Where("compile")) for p in found]
        return problems

    def _look_at_invariance(self, invariance: Invariance, example: Example) -> list[Problem]:
        """Judge low precision at the changed inputs as at any others; float64 shows whether the invariance holds."""
        changed = invariance.changed(example)
        before = example.widened(self.runner.device)
        after = invariance.changed(before)
        if _overflows(changed, after) or changed.key() == example.key() or not _as_many_values(before, after):
            return []
        look, _ = self._judged(changed)
        if look.outside:
            return []
        if look.problems:
            return [replace(p, kind=INVARIANCE, detail=f"{invariance.name}: {p.kind}") for p in look.problems]
        first, second = self.runner.exact(before), self.runner.exact(after)
        near = self.runner.exact(after.mapped(_nudged)) if second is not None else None
        if first is None or second is None:
            return []
        self.counts[invariance.name] += look.elements > 0
        for path, expected in first.items():
            value = invariance.undone(second[path]) if path in second else None
            if value is None or value.shape != expected.shape:
                return [_broken(f"{invariance.name}: float64 gives another shape there", path)]
            moved = invariance.undone(near[path]) if near is not None and path in near else value
            if problem := self._differs(invariance.name, path, expected, value, moved):
                return [problem]
        return []

    def _differs(
        self, name: str, path: str, expected: torch.Tensor, value: torch.Tensor, moved: torch.Tensor
    ) -> Problem | None:
        """Where float64 itself gives another value at the changed inputs."""
        if not expected.numel():
            return None
        expected, value, moved = (t.double().reshape(-1) for t in (expected, value, moved))
        finite = expected.isfinite()
        difference = torch.where(finite & value.isfinite(), value - expected, 0.0).abs()
        size = float(torch.where(finite, expected, 0.0).abs().amax())
        # The changed inputs, and what they give, are rounded in float64.
        own = float((moved - value).abs().nan_to_num(0.0, 0.0).amax()) if moved.shape == value.shape else 0.0
        limit = format_of(self.runner.dtype).unit_roundoff * size + SLACK * own
        wrong = (difference > limit) | (finite != value.isfinite())
        if not bool(wrong.any()):
            return None
        index = int(torch.where(wrong, difference, -1.0).argmax())
        return _broken(
            f"{name} does not hold in float64 either", path, index, float(value[index]), float(expected[index])
        )


def _compared(
    look: Look, path: str, tensor: torch.Tensor, reference: Reference, found: Sequence[Fault]
) -> list[Problem]:
    """The problem of one output, if it has one; what was judged is added to `look`."""
    seen = reference.examine(tensor)
    undefined = seen.exact_nan + seen.exact_inf
    look.elements -= undefined
    look.undefined += undefined
    unit = max(reference.unit, format_of(_real(tensor).dtype).unit_roundoff)
    if not seen.beyond:
        limit = slack_of(tensor.numel() // max(1, seen.groups)) * seen.spread + SLACK * FLOOR * unit
        look.ratio = max(look.ratio, seen.error / limit if math.isfinite(seen.error) else 0.0)
        return []
    value, exact, moved = _real(tensor).double(), _real(reference.exact), _real(reference.moved).double()
    form = format_of(_real(tensor).dtype)
    # Next to the end of the range rounding decides on which side a value falls; below it on which subnormal.
    honest = SLACK * ((moved - exact).abs() * (unit / MOVE) + FLOOR * unit * exact.abs())
    size = exact.abs()
    edge = ~value.isfinite() & (size < form.overflows_at) & (size + honest >= form.overflows_at)
    near = edge | ((value - exact).abs() <= _ABSOLUTE * form.smallest_subnormal)
    value = torch.where(near, exact, value)
    seen = examine(value, exact, moved, unit, form=form, whole=False)
    if not seen.beyond:
        return []
    return [_problem(path, value, exact, seen, form.overflows_at, found)]


def _problem(
    path: str, value: torch.Tensor, exact: torch.Tensor, seen: Examination, end: float, found: Sequence[Fault]
) -> Problem:
    if seen.lost:
        lost = (~value.isfinite() & exact.isfinite()).reshape(-1)
        inside = lost & (exact.reshape(-1).abs() < end)
        kind = NONFINITE if bool(inside.any()) else RANGE
        index = int((inside if kind == NONFINITE else lost).nonzero()[0])
        observed, limit = float(seen.lost), 0.0
    else:
        kind, observed, limit = ACCURACY, seen.error, seen.limit
        difference = (value - exact).nan_to_num(0.0, 0.0, 0.0).abs()
        size = torch.linalg.vector_norm(exact.nan_to_num(0.0, 0.0, 0.0), dim=group_dims(exact.shape), keepdim=True)
        index = int((difference / size.clamp_min(1e-300)).argmax())
    own, true = float(value.reshape(-1)[index]), float(exact.reshape(-1)[index])
    return Problem(kind, path, index, own, true, observed, limit, where=_blamed(path, kind, found))


def _blamed(path: str, kind: str, found: Sequence[Fault]) -> Where:
    """The first op whose fault is left in an output; of what is not finite, the first that overflows."""
    reaching = [fault for fault in found if path in fault.reaches]
    if kind in (NONFINITE, RANGE):
        reaching = [f for f in reaching if f.examination.lost] or reaching or [f for f in found if f.examination.lost]
    return reaching[0].where if reaching else Where(phase="forward")


def _decided(found: Sequence[Fault]) -> list[Problem]:
    """Decisions that exact takes otherwise, and numbers that left the run with an error."""
    for fault in found:
        seen = fault.examination
        if fault.kind == faults.DECISION or any(name.startswith("a decision of") for name in fault.reaches):
            return [Problem(DECISION, observed=seen.error, limit=seen.limit, detail=_reach(fault), where=fault.where)]
        if any(name.startswith("a number that left") for name in fault.reaches):
            kind = NONFINITE if seen.lost else ACCURACY
            return [Problem(kind, observed=seen.error, limit=seen.limit, detail=_reach(fault), where=fault.where)]
    return []


def _reach(fault: Fault) -> str:
    return next(iter(fault.reaches), f"a decision of {fault.where.op}")


def _note_range(look: Look, shadow: Shadow, found: Sequence[Fault]) -> None:
    """How near the values inside come to the end of their formats, and whether one went beyond to no effect."""
    assert shadow.judge is not None
    for (where, name), (largest, source) in shadow.judge.largest.items():
        most = format_of(name).max
        masked = largest == most <= source  # the lowest value of a mask, and what is added to it
        if look.peak.share < largest / most <= 1.0 and not masked:
            look.peak = Peak(largest / most, largest, where, name)
    lost = next((f for f in found if f.kind == faults.OVERFLOW and not f.reaches), None)
    if lost is not None and not look.problems:
        look.overflow = Peak(math.inf, math.inf, lost.where, lost.dtype)


def _compiled_problem(detail: str) -> Problem:
    return Problem(COMPILED, detail=detail, where=Where(phase="compile"))


def _broken(detail: str, path: str, index: int = 0, value: float = 0.0, expected: float = 0.0) -> Problem:
    return Problem(INVARIANCE, path, index, value, expected, detail=detail)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _nudged(tensor: torch.Tensor) -> torch.Tensor:
    """Moved by two roundings of float64, with signs that alternate at random."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor) * 2 - 1
    return tensor * (1 + 2.0**-52 * signs)


def _overflows(changed: Example, after: Example) -> bool:
    """Whether a change makes an infinity of what is finite in float64: 60,000 times 4 is no float16."""
    pairs = zip(changed.floats().values(), after.floats().values(), strict=False)
    return any(bool((~own.isfinite() & wide.isfinite()).any()) for own, wide in pairs if own.shape == wide.shape)


def _as_many_values(before: Example, after: Example) -> bool:
    """Whether different values stay different: 1e-20 + 1 and 3e-20 + 1 are one number of float64."""
    counts = [[torch.unique(tensor).numel() for tensor in e.floats().values()] for e in (before, after)]
    return all(later >= earlier for earlier, later in zip(*counts, strict=False))
