"""Where a broken example went wrong: the op, its module and its line.

The same example runs in low precision and in the judge, op by op. Casts aside, both run the same ops in the same order
(where autocast or a kernel takes another path, the ops are matched as two texts are). An error counts where it goes on
to the output: from the op that gave the output back to the first that is apart in both runs, through ops that are
apart themselves. A branch whose error is clamped, or added to what drowns it, is not told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch

from ampcheck.core.run import Where
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.ops import UNWRITTEN, OpWatch
from ampcheck.search.arms import Arms, Example
from ampcheck.search.stats import ACCURACY, COMPILED, INVARIANCE, NONFINITE, RAISES, Problem
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.trace import OpEvent, Trace

_CASTS = frozenset(("_to_copy", "clone", "copy_", "detach", "alias", "lift_fresh"))
_KEPT = 1 << 22  # elements of all results together that are held for comparison
_HALF = 0.5
_PAIRS = 1 << 16  # of ops that differ between the runs; to match many equal names as texts takes minutes


def locate(arms: Arms, example: Example, problem: Problem) -> Where:
    """The op that made something infinite, or at which the error first stands; the phase alone where none is found.

    An invariance breaks at other inputs than the example, `problem.at`, by the kind that its detail ends with; without
    them, or where it does not hold in float64 either, no op is to blame.
    """
    kind = problem.kind
    if kind == INVARIANCE:
        at: Example | None = getattr(problem, "at", None)
        kind = problem.detail.rpartition(": ")[2]
        if at is None or kind == problem.detail:
            return Where(phase="forward")
        example = at
    if kind in (RAISES, COMPILED):
        return Where(phase="forward" if kind == RAISES else "compile")
    watch, low, wide = OpWatch(), _Results(), _Results()
    outputs = arms.low(example, Trace(arms.root, observers=(watch, low)))
    arms.wide(example, Trace(observers=(wide,)))
    own = outputs.found.get(problem.output)
    if kind == ACCURACY:
        # What overflows may be harmless here: 1e5 that is infinite is clamped to 1 all the same.
        where = _apart(low, wide, problem, own.shape if own is not None else None) or _overflows(watch.facts())
    else:
        where = _overflows(watch.facts()) or (_unbounded(low, wide) if kind == NONFINITE else None)
    # What a comparison or an index is decided by may have become zero: their results have no error to follow.
    return where or _flushes(watch.facts()) or Where(phase="forward")


@dataclass(frozen=True, slots=True)
class _Result:
    """The main result of an op in float64; sources: the results that it was made of, by their number."""

    name: str
    where: Where
    value: torch.Tensor
    sources: frozenset[int]


class _Results:
    """An observer of `Trace`: floating results in float64, by op, and what each was made of."""

    def __init__(self) -> None:
        self.ops: list[_Result] = []
        self._held = 0
        self._written: dict[int, frozenset[int]] = {}  # by the address of the memory, the results that stand in it

    def before(self, op: object, args: object, kwargs: object) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> None:
        """Keep the first floating result, which is an op's main one."""
        if op.is_view:
            return
        name = op._schema.name.rpartition("::")[2]
        unwritten = op._schema.name.startswith(UNWRITTEN)
        given = [self._written.get(_address(tensor), frozenset()) for _, tensor in tensors((args, kwargs))]
        sources = frozenset[int]() if unwritten else frozenset[int]().union(*given)
        made = sources
        for _, tensor in tensors(out) if not unwritten and name not in _CASTS else ():
            if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_nested:
                self._held += tensor.numel()
                if self._held <= _KEPT:
                    made = frozenset((len(self.ops),))
                    self.ops.append(_Result(name, event.where, tensor.detach().double().clone(), sources))
                break
        for _, tensor in tensors(out):
            if address := _address(tensor):
                whole = tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
                # Memory is used again: what an op did not overwrite a part of, it filled.
                partly = not whole and op._schema.is_mutable
                self._written[address] = made | self._written.get(address, frozenset()) if partly else made


def _address(tensor: torch.Tensor) -> int:
    """Of the memory, which is that of every view; 0 where there is none."""
    with suppress(RuntimeError, NotImplementedError):  # sparse, or without memory of its own
        return tensor.untyped_storage().data_ptr()
    return 0


def _overflows(facts: tuple[OpFacts, ...]) -> Where | None:
    """The first op that makes something infinite or NaN of finite values, where float64 does not."""
    return next((fact.where for fact in facts if fact.produced and fact.limited is not False), None)


def _flushes(facts: tuple[OpFacts, ...]) -> Where | None:
    """The first op that flushes to zero what float64 keeps."""
    return next((fact.where for fact in facts if fact.flushed), None)


def _unbounded(low: _Results, wide: _Results) -> Where | None:
    """The first op whose result is not finite in low precision alone."""
    both = ((low.ops[number], twin) for number, twin in _matched(low, wide).items())
    return next((own.where for own, twin in both if bool((~own.value.isfinite() & twin.isfinite()).any())), None)


def _apart(low: _Results, wide: _Results, problem: Problem, shape: torch.Size | None) -> Where | None:
    """The first op with half of the output's relative error from which that goes on to the output."""
    size = max(abs(problem.wide), abs(problem.low))
    whole = problem.observed / size if size else 0.0
    if not whole > 0:
        return None
    twins = _matched(low, wide)

    def error(number: int) -> float:
        own, twin = low.ops[number].value, twins[number]
        return _relative(own, twin, problem.index if own.shape == shape else None)

    wrong = {number for number in twins if error(number) >= _HALF * whole}
    ends = [n for n in wrong if low.ops[n].value.shape == shape and _near(low.ops[n].value, problem)] or wrong
    reached: set[int] = set()
    waiting = [max(ends)] if ends else []
    while waiting:
        number = waiting.pop()
        # An op without a twin tells nothing: what it was made of is looked at instead.
        if number not in reached and (number in wrong or number not in twins):
            reached.add(number)
            waiting += low.ops[number].sources
    return low.ops[min(reached & wrong)].where if reached else None


def _near(own: torch.Tensor, problem: Problem) -> bool:
    """Whether the element is that of the output, which a cast may have rounded."""
    value = float(own.reshape(-1)[problem.index])
    return abs(value - problem.low) <= _HALF * problem.observed


def _matched(low: _Results, wide: _Results) -> dict[int, torch.Tensor]:
    """Results of the judge by the number of the same op in low precision.

    Equal beginnings and ends are matched at once. Where more than 65,536 pairs are left between them, such as 256 ops
    against 256, only the beginning is: an error at the end may come from what was not compared.
    """
    return {
        a: wide.ops[b].value
        for a, b in _pairs([one.name for one in low.ops], [one.name for one in wide.ops])
        if low.ops[a].value.shape == wide.ops[b].value.shape and low.ops[a].value.numel()
    }


def _pairs(one: list[str], other: list[str]) -> Iterator[tuple[int, int]]:
    """Places of equal names, in order."""
    shorter = min(len(one), len(other))
    first = next((at for at in range(shorter) if one[at] != other[at]), shorter)
    yield from ((at, at) for at in range(first))
    left = range(1, shorter - first + 1)
    last = next((back - 1 for back in left if one[-back] != other[-back]), shorter - first)
    a, b = one[first : len(one) - last], other[first : len(other) - last]
    if len(a) * len(b) > _PAIRS:
        return
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        yield from ((first + block.a + step, first + block.b + step) for step in range(block.size))
    yield from ((len(one) - back, len(other) - back) for back in range(last, 0, -1))


def _relative(own: torch.Tensor, twin: torch.Tensor, index: int | None) -> float:
    """The error of the output's element over the larger of both values; infinite where low precision alone is.

    index: the element, None where the shape is not the output's. The largest error then counts, over the largest
    magnitude: nobody knows whether what is small beside the others comes to the output.
    """
    if index is not None:
        own, twin = own.reshape(-1)[index], twin.reshape(-1)[index]
    if bool((~own.isfinite() & twin.isfinite()).any()):
        return float("inf")
    both = own.isfinite() & twin.isfinite()
    size = torch.where(both, torch.maximum(own.abs(), twin.abs()), 0.0).amax()
    return float(torch.where(both, (own - twin).abs(), 0.0).amax() / size) if bool(size > 0) else 0.0
