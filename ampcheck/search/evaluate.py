"""Judge one example: eager mode under `Shadow`, compiled code and declared invariances beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.records.property import COMPILED, INVARIANCE, RAISES, Look, Problem
from ampcheck.records.results import INTEGERS, SLACK, TIE
from ampcheck.search.compiling import Compiled
from ampcheck.search.example import Example
from ampcheck.search.invariances import Invariance
from ampcheck.search.runner import Runner
from ampcheck.search.verdict import Judged
from ampcheck.shadow import Shadow
from ampcheck.shadow.compare import compare_results
from ampcheck.torchtools.source import users_place


class Evaluator:
    """Judges examples. counts: by invariance, the examples that it changed and that were judged."""

    def __init__(
        self, runner: Runner, invariances: Sequence[Invariance] = (), compiled: Compiled | None = None
    ) -> None:
        self.runner, self.invariances, self.compiled = runner, invariances, compiled
        self.counts: Counter[str] = Counter()

    def look(self, example: Example) -> Look:
        """Judge one example."""
        judged = self._judged(example)
        if isinstance(judged, Look):
            return judged
        look = judged.look
        if self.compiled is not None and not look.problems:
            look.problems += self._look_at_compiled(self.compiled, example, judged)
        for invariance in self.invariances:
            if not look.problems:
                look.problems += self._look_at_invariance(invariance, example)
        return look

    def _judged(self, example: Example) -> Judged | Look:
        """The run that was judged, or why there is none."""
        shadow = Shadow(self.runner.root, freedom=self.compiled is not None)
        with self.runner.run(example, shadow) as result:
            if result.error is None:
                return Judged(example, shadow, result)
        reason = lacking(result.error, kernels=True)
        if outside := reason or self.runner.float32_error(example):
            return Look(outside=outside, lacking=reason)
        file, line = users_place(result.error)
        return Look([Problem(RAISES, detail=brief(result.error), where=Where("forward", file=file, line=line))])

    def _look_at_compiled(self, compiled: Compiled, example: Example, eager: Judged) -> list[Problem]:
        """Compiled code must keep the bounds that eager mode keeps."""
        function = compiled.function_for(example)
        if function is None:
            return []
        with self.runner.run(example, function=function) as result:
            if result.error is not None:
                return [] if compiled.cannot_run(result.error) else [_worse(f"it raises {brief(result.error)}")]
            compiled.examples += 1
            values = {("output", path, 0): value for path, value in result.outputs.items()}
            for error in compare_results(eager.results, values, eager.freedom):
                value, expected = result.outputs.get(error.name), eager.results[error.key].value
                if value is None or error.absent or value.dtype is not expected.dtype:
                    other = "no output" if value is None else f"an output of {value.dtype} {list(value.shape)}"
                    form = f"{expected.dtype} {list(expected.shape)}"
                    return [_worse(f"it gives {other} {error.name}, where eager mode gives {form}")]
                compiled.ties += error.verdict == TIE
                if error.dtype in INTEGERS and error.at_fault:
                    share = f"{100 * error.apart:.3g}% of output {error.name}".rstrip()
                    return [_worse(f"it gives other integers than eager mode, {share}, and no near tie explains it")]
                if error.at_fault and (problem := eager.problem(error.name, value)):
                    return [replace(problem, kind=COMPILED, detail=problem.kind, where=Where(phase="compile"))]
        return []

    def _look_at_invariance(self, invariance: Invariance, example: Example) -> list[Problem]:
        """Judge low precision at the changed inputs as at any others; float64 shows whether the invariance holds."""
        changed = invariance.changed(example)
        before = example.widened(self.runner.device)
        after = invariance.changed(before)
        if _overflows(changed, after) or changed.key() == example.key() or not _as_many_values(before, after):
            return []
        judged = self._judged(changed)
        look = judged if isinstance(judged, Look) else judged.look
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


def _worse(detail: str) -> Problem:
    return Problem(COMPILED, detail=detail, where=Where(phase="compile"))


def _broken(detail: str, path: str, index: int = 0, value: float = 0.0, expected: float = 0.0) -> Problem:
    return Problem(INVARIANCE, path, index, value, expected, detail=detail)


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
