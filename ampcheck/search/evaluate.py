"""Judge one example: eager mode under `Shadow`, compiled code and other circumstances beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.parity.arguments import VacuousError
from ampcheck.parity.circumstances import Circumstance
from ampcheck.parity.example import Example
from ampcheck.parity.functions import element_apart, exact_values
from ampcheck.parity.invariances import Invariance
from ampcheck.records.property import COMPILED, INVARIANCE, RAISES, Look, Problem
from ampcheck.records.results import INTEGERS, TIE
from ampcheck.search.compiling import Compiled
from ampcheck.search.runner import Around, Runner
from ampcheck.search.verdict import Judged
from ampcheck.shadow import Shadow
from ampcheck.shadow.compare import compare_results
from ampcheck.torchtools.source import users_place


class Evaluator:
    """Judges examples. counts: by circumstance, the examples that it changed and that were judged."""

    def __init__(
        self, runner: Runner, invariances: Sequence[Circumstance] = (), compiled: Compiled | None = None
    ) -> None:
        self.runner, self.invariances, self.compiled = runner, invariances, compiled
        self.counts: Counter[str] = Counter()

    def look(self, example: Example) -> Look:
        """Judge one example."""
        look, judged = self._judged(example)
        if judged is not None and self.compiled is not None and not look.problems:
            look.problems += self._look_at_compiled(self.compiled, example, judged)
        for circumstance in self.invariances if judged is not None else ():
            if not look.problems:
                look.problems += self._look_at_circumstance(circumstance, example)
        return look

    def _judged(self, example: Example, around: Around | None = None) -> tuple[Look, Judged | None]:
        """Return what the run of an example shows, and the run; None where there is none that could be judged."""
        shadow = Shadow(self.runner.root, freedom=self.compiled is not None)
        run = self.runner.run(example, shadow, around)
        if (error := run.error) is None:
            judged = Judged(example, run, shadow)
            return judged.look, judged
        reason = lacking(error, kernels=True)
        if outside := reason or self.runner.float32_error(example, around):
            return Look(outside=outside, lacking=reason), None
        where = Where("forward", "", "", *users_place(error))
        return Look([Problem(RAISES, detail=brief(error), where=where)]), None

    def _look_at_compiled(self, compiled: Compiled, example: Example, eager: Judged) -> list[Problem]:
        """Compiled code must keep the bounds that eager mode keeps."""
        if (function := compiled.function_for(example)) is None:
            return []
        run, expected_results = self.runner.run(example, around=lambda _: function), eager.run.results
        if run.error is not None:
            return [] if compiled.cannot_run(run.error) else [_worse(f"it raises {brief(run.error)}")]
        compiled.examples += 1
        values = run.values
        for result in compare_results(expected_results, values, eager.run.freedom):
            value, expected = values.get(result.key), expected_results[result.key].value
            if value is None or result.absent or value.dtype is not expected.dtype:
                other = "no output" if value is None else f"an output of {value.dtype} {list(value.shape)}"
                form = f"{expected.dtype} {list(expected.shape)}"
                return [_worse(f"it gives {other} {result.name}, where eager mode gives {form}")]
            compiled.ties += result.verdict == TIE
            if result.dtype in INTEGERS and result.at_fault:
                share = f"{100 * result.apart:.3g}% of output {result.name}".rstrip()
                return [_worse(f"it gives other integers than eager mode, {share}, and no near tie explains it")]
            if result.at_fault and (problem := eager.problem(result.name, value)):
                return [replace(problem, kind=COMPILED, detail=problem.kind, where=Where(phase="compile"))]
        return []

    def _look_at_circumstance(self, circumstance: Circumstance, example: Example) -> list[Problem]:
        """Judge low precision in the circumstance as elsewhere; float64 shows whether the two agree at all."""
        before = example.widened(self.runner.device)
        changed = example
        around: Around | None = circumstance.applied
        if isinstance(circumstance, Invariance):  # what it makes of the inputs is exact in the format
            changed, around, after = circumstance.changed(example), None, circumstance.changed(before)
            if _overflows(changed, after) or changed.key() == example.key() or not _as_many_values(before, after):
                return []
        try:
            look, judged = self._judged(changed, around)
            if judged is None or look.problems:
                return [replace(p, kind=INVARIANCE, detail=f"{circumstance.name}: {p.kind}") for p in look.problems]
            first = self.runner.exact(before, circumstance.reference)
            second = self.runner.exact(before, circumstance.applied)
        except VacuousError:
            return []
        if first is None or second is None:
            return []
        self.counts[circumstance.name] += look.elements > 0
        unit = format_of(self.runner.dtype).unit_roundoff
        for key, expected in first.items():
            value, path = second.get(key), key[1]
            if value is None or value.value.shape != expected.value.shape:
                return [Problem(INVARIANCE, path, detail=f"{circumstance.name}: float64 gives another shape there")]
            if (index := element_apart(expected, value, unit)) is not None:
                detail = f"{circumstance.name} does not hold in float64 either"
                low, exact = (float(exact_values(result)[index]) for result in (value, expected))
                return [Problem(INVARIANCE, path, index, low, exact, detail=detail)]
        return []


def _worse(detail: str) -> Problem:
    return Problem(COMPILED, detail=detail, where=Where(phase="compile"))


def _overflows(changed: Example, after: Example) -> bool:
    """Return whether a change makes an infinity of what is finite in float64: 60,000 times 4 is no float16."""
    pairs = zip(changed.floats().values(), after.floats().values(), strict=False)
    return any(bool((~own.isfinite() & wide.isfinite()).any()) for own, wide in pairs if own.shape == wide.shape)


def _as_many_values(before: Example, after: Example) -> bool:
    """Return whether different values stay different: 1e-20 + 1 and 3e-20 + 1 are one number of float64."""
    counts = [[torch.unique(tensor).numel() for tensor in e.floats().values()] for e in (before, after)]
    return all(later >= earlier for earlier, later in zip(*counts, strict=False))
