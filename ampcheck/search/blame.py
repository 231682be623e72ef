"""Where a broken example went wrong: the op, its module and its line.

The same example runs in low precision and in the judge, op by op. Casts aside, both run the same ops in the same order
(where autocast or a kernel takes another path, the ops are matched as two texts are); the first at which the two are
apart is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

import torch

from ampcheck.nest import tensors
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.ops import UNWRITTEN, OpWatch
from ampcheck.record import Where
from ampcheck.search.arms import Arms, Example
from ampcheck.search.stats import ACCURACY, COMPILED, NONFINITE, RAISES, Problem
from ampcheck.trace import OpEvent, Trace

_CASTS = frozenset(("_to_copy", "clone", "copy_", "detach", "alias", "lift_fresh"))
_KEPT = 1 << 22  # elements of all results together that are held for comparison
_HALF = 0.5


def locate(arms: Arms, example: Example, problem: Problem) -> Where:
    """The op that made something infinite, or at which the error first stands; the phase alone where none is found."""
    if problem.kind in (RAISES, COMPILED):
        return Where(phase="forward" if problem.kind == RAISES else "compile")
    watch, low, wide = OpWatch(), _Results(), _Results()
    arms.low(example, Trace(arms.root, observers=(watch, low)))
    arms.wide(example, Trace(observers=(wide,)))
    for find in (_overflows, _apart, _flushes):
        where = find(watch.facts(), low, wide, problem)
        if where is not None:
            return where
    return Where(phase="forward")


class _Results:
    """An observer of `ampcheck.trace.Trace`: floating results in float64, by op."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, Where, torch.Tensor]] = []
        self._held = 0

    def before(self, op: Any, args: Any, kwargs: Any) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> None:
        """Keep the first floating result, which is an op's main one."""
        name = op._schema.name.rpartition("::")[2]
        if op.is_view or name in _CASTS or op._schema.name.startswith(UNWRITTEN):
            return
        for _, tensor in tensors(out):
            if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_nested:
                self._held += tensor.numel()
                if self._held <= _KEPT:
                    self.ops.append((name, event.where, tensor.detach().double().clone()))
                return


def _overflows(facts: tuple[OpFacts, ...], low: _Results, wide: _Results, problem: Problem) -> Where | None:
    """The first op that makes something infinite or NaN of finite values, where float64 does not."""
    return next((fact.where for fact in facts if fact.produced and fact.limited is not False), None)


def _flushes(facts: tuple[OpFacts, ...], low: _Results, wide: _Results, problem: Problem) -> Where | None:
    """The first op that flushes to zero what float64 keeps."""
    return next((fact.where for fact in facts if fact.flushed), None)


def _apart(facts: tuple[OpFacts, ...], low: _Results, wide: _Results, problem: Problem) -> Where | None:
    """The first op whose result is not finite in low precision alone, or has half of the output's relative error."""
    test: Callable[[torch.Tensor, torch.Tensor], bool]
    if problem.kind == NONFINITE:

        def test(own: torch.Tensor, twin: torch.Tensor) -> bool:
            return bool((~own.isfinite() & twin.isfinite()).any())

    elif problem.kind == ACCURACY:
        size = max(abs(problem.wide), abs(problem.low))
        whole = problem.observed / size if size else 0.0

        def test(own: torch.Tensor, twin: torch.Tensor) -> bool:
            return whole > 0 and _relative(own, twin) >= _HALF * whole

    else:
        return None
    return next((where for own, twin, where in _matched(low, wide) if test(own, twin)), None)


def _matched(low: _Results, wide: _Results) -> Iterator[tuple[torch.Tensor, torch.Tensor, Where]]:
    """Results of the same op in both runs."""
    names = [name for name, _, _ in low.ops], [name for name, _, _ in wide.ops]
    for block in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
        for step in range(block.size):
            (_, where, own), (_, _, twin) = low.ops[block.a + step], wide.ops[block.b + step]
            if own.shape == twin.shape and own.numel():
                yield own, twin, where


def _relative(own: torch.Tensor, twin: torch.Tensor) -> float:
    """The largest error of an element over the larger of both values; 1 where one of them is zero."""
    both = own.isfinite() & twin.isfinite()
    size = torch.maximum(own.abs(), twin.abs())
    error = torch.where(both & (size > 0), (own - twin).abs() / size, 0.0)
    return float(error.amax())
