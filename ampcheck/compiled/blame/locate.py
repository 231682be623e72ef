"""Where an eager low-precision run leaves float64: every op beside the same op of the reference, in the order it ran.

The comparison is of accumulated errors: the n-th result of an op, on one source line in one call of a module, beside
the n-th of the reference there. `ampcheck.numerics.ops` judges each op on its own inputs; together they tell the op
that loses the values from those that carry the loss on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from ampcheck.autocast.emulate import active
from ampcheck.autocast.missing import MissingKernels
from ampcheck.core.run import Finding, Where
from ampcheck.core.subject import Subject
from ampcheck.numerics.arms import KEPT_BYTES, run_arm
from ampcheck.numerics.distance import relative_error
from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.numerics.measure import Eager
from ampcheck.numerics.reference import SAMPLES, Reference
from ampcheck.numerics.stats import NumericsStats, TensorError
from ampcheck.torchtools.copying import prepare
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.trace import OpEvent, Trace

Place: TypeAlias = tuple[str, str, int, str, str, "int | None"]
"""Phase, module, call, op, file and line: where the same op runs in every precision."""


@dataclass(frozen=True, slots=True)
class Step:
    """One op of the low-precision run beside its twin in the reference.

    index: its place in the order of the run. error, sensitivity, float32, nonfinite: as in `TensorError`.
    """

    where: Where
    index: int
    dtype: str
    numel: int
    error: float
    nonfinite: int
    sensitivity: float = 0.0
    float32: float = 0.0
    compared: int = 1

    def as_error(self) -> TensorError:
        """This step as the record whose limit `NumericsStats` knows."""
        return TensorError(
            kind="module",
            name=self.where.module,
            dtype=self.dtype,
            error=self.error,
            sensitivity=self.sensitivity,
            share=0.0,
            nonfinite=self.nonfinite,
            compared=self.compared,
            float32=self.float32,
            order=self.index,
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """Every op of a run that has a twin, in order; unseen: why others have none, with how many."""

    steps: tuple[Step, ...]
    unseen: dict[str, int] = field(default_factory=dict)


class _Values:
    """An observer of `ampcheck.torchtools.trace.Trace` that keeps the floating results of every op, or compares them.

    beside: what keeps the results that these are compared with; without it they are kept.
    scale: of the loss; gradients are compared without it.
    """

    def __init__(self, beside: _Values | None = None, scale: float = 1.0) -> None:
        self.kept: dict[tuple[Place, int], list[torch.Tensor]] = {}
        self.counts: Counter[Place] = Counter()
        self.steps: dict[tuple[Place, int], Step] = {}
        self.dropped = 0
        self._size = 0
        self._beside = beside
        self._scale = scale

    def before(self, op: object, args: object, kwargs: object) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> None:
        """Keep or compare what this op gave."""
        if op.is_view:
            return
        results = [t for _, t in tensors(out) if _comparable(t)]
        if not results:
            return
        place = (event.phase, event.module, event.call, event.op, event.file, event.line)
        key = (place, self.counts[place])
        self.counts[place] += 1
        if self._beside is None:
            self._keep(key, results)
            return
        twins = self._beside.kept.get(key, [])
        if [t.shape for t in twins] == [r.shape for r in results]:
            self.steps[key] = _beside(event, results, twins, self._scale)

    def _keep(self, key: tuple[Place, int], results: list[torch.Tensor]) -> None:
        size = sum(r.numel() * r.element_size() for r in results)
        if self._size + size > KEPT_BYTES:
            self.dropped += 1
            return
        self._size += size
        self.kept[key] = [r.detach().clone() for r in results]

    def paired(self) -> dict[tuple[Place, int], Step]:
        """The steps of places that ran equally often in both runs: elsewhere the n-th is not the same op."""
        beside = self._beside
        assert beside is not None
        return {key: step for key, step in self.steps.items() if beside.counts[key[0]] == self.counts[key[0]]}


def measure_steps(
    subject: Subject,
    reference: Reference,
    eager: Eager,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    native: bool = False,
) -> Steps:
    """Run the reference and the low-precision run again, op beside op, as `eager` was measured."""
    forced = eager.decisions if eager.stats.followed else None
    wide = _Values()
    reference.observed(wide, forced=forced)
    if reference.how == "float32":
        return Steps((), {"ops without a reference in float64": sum(wide.counts.values())})
    swayed = [_Values(wide) for _ in range(SAMPLES)]
    for seed, values in enumerate(swayed, start=1):
        reference.observed(values, dtype, eager.rounded, seed=seed, forced=forced)
    hair = _Values(wide)
    reference.observed(hair, torch.float32, eager.rounded, forced=forced)
    low = _low_run(subject, reference, eager, wide, dtype, device, native)
    paired = low.paired()
    steps = []
    for key, step in paired.items():
        sway = max((values.steps[key].error for values in swayed if key in values.steps), default=0.0)
        doubt = hair.steps[key].error if key in hair.steps else 0.0
        steps.append(replace(step, sensitivity=sway, float32=doubt))
    unpaired = sum(low.counts.values()) - len(steps)
    unseen = {
        "ops that float64 does not run at the same place equally often (such as autocast's casts)": unpaired,
        "ops beyond the memory that one run keeps": wide.dropped,
    }
    return Steps(tuple(sorted(steps, key=lambda s: s.index)), {why: n for why, n in unseen.items() if n})


def _low_run(
    subject: Subject,
    reference: Reference,
    eager: Eager,
    wide: _Values,
    dtype: torch.dtype,
    device: str,
    native: bool,
) -> _Values:
    prepared = prepare(subject, device=device)
    values = _Values(wide, eager.stats.scale)
    emulated = [MissingKernels()] if active() is not None else []
    run_arm(
        prepared,
        device=device,
        dtype=None if native else dtype,
        loss=subject.loss,
        around=[*emulated, EqualRandom(), Trace(prepared.root, observers=(values,))],
        scale=eager.stats.scale,
        keep_modules=False,
        finite_loss=reference.finite_loss,
    )
    return values


def _beside(event: OpEvent, results: Sequence[torch.Tensor], twins: Sequence[torch.Tensor], scale: float) -> Step:
    """What one op gave beside what it gives in the reference; of several results the worst."""
    errors = []
    for result, twin in zip(results, twins, strict=True):
        wide = twin.double()
        error = relative_error(result, wide)
        if scale != 1:  # gradients are scaled, and the first of them, which forward makes; saved values are not
            error = min(error, relative_error(result.double() / scale, wide))
        errors.append(error)
    return Step(
        where=event.where,
        index=event.index,
        dtype=str(results[0].dtype).removeprefix("torch."),
        numel=sum(r.numel() for r in results),
        error=max(errors),
        nonfinite=sum(int((~r.isfinite() & t.isfinite()).sum()) for r, t in zip(results, twins, strict=True)),
        compared=sum(int((r.isfinite() & t.isfinite()).sum()) for r, t in zip(results, twins, strict=True)),
    )


def _comparable(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0


def steps_beyond(stats: NumericsStats, steps: Sequence[Step], factor: float) -> list[Step]:
    """The steps whose error rounding does not explain, by the limit that module outputs have, in order."""
    return [step for step in steps if stats.beyond(step.as_error(), factor)]


def first_cause(stats: NumericsStats, failures: Sequence[Finding], beyond: Sequence[Step]) -> Where:
    """The first op that fails: one that a failure names, or the first beyond its bound, whichever ran first.

    Where only gradients fail, what happened in forward did not reach an output, and backward is looked at before it.
    """
    if stats.raised is not None:
        return stats.raised.where
    index = {fact.where: fact.index for fact in reversed(stats.ops)} | {f.where: f.index for f in reversed(stats.flips)}
    named = [(index[f.where], f.where) for f in failures if f.where in index]
    candidates = named + [(step.index, step.where) for step in beyond]
    if candidates and all(f.where.phase == "backward" for f in failures):
        candidates = [c for c in candidates if c[1].phase == "backward"] or candidates
    if candidates:
        return min(candidates, key=lambda c: c[0])[1]
    return next((f.where for f in failures), Where())
