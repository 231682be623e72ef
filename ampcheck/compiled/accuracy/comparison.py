"""Which results of an eager and a compiled run are compared: outputs, gradients, and what the calls change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampcheck.core.run import Where
from ampcheck.core.subject import Subject
from ampcheck.numerics.record import NUMPY, Execution
from ampcheck.numerics.run import RunPlan
from ampcheck.records.accuracy import OTHER_STREAMS
from ampcheck.records.results import CHANGES, FLOAT32, MOVE, Key, ResultError
from ampcheck.shadow import Reference
from ampcheck.shadow.compare import Result, compare_results

_DECIDED_BY_ROUNDING = 0.5
"""The relative error of an element of a gradient in eager mode from which an optimizer may step either way."""

_OF_NUMPY = (
    ": eager mode draws them from NumPy, for which Dynamo draws from PyTorch, so that np.random.seed has no effect in "
    "compiled code; draw with torch.rand, or set torch._dynamo.config.use_numpy_random_stream = True"
)


@dataclass(slots=True)
class EagerRun:
    """The shadowed eager run of a subject, with which other runs are compared.

    incomparable: why none can be. options: of `torch.compile`. casts: see `compare_results`. masked: see `run_subject`.
    beside: it is that of an audit, whose findings are judged, too.
    """

    subject: Subject
    plan: RunPlan
    dtype: torch.dtype
    options: Mapping[str, Any]
    outcome: Execution
    incomparable: str = ""
    casts: bool = False
    masked: Collection[Key] = ()
    beside: bool = False


def compare_runs(eager: EagerRun, other: Execution) -> tuple[tuple[ResultError, ...], Counter[str]]:
    """The errors of a run beside the shadowed eager run of the same plan, and what is left out: reason and count.

    Of a run that raised, the results before the exception are compared.
    """
    first = eager.outcome
    left_out = Counter((first.dropped | other.dropped).values())
    results, values = dict(first.results), other.values
    if first.error is not None or other.error is not None:
        results = {key: r for key, r in results.items() if key in values and key[0] not in CHANGES}
    else:
        _add_unchanged(first, other, results, values)
    for key in other.dropped:
        results.pop(key, None)
    if eager.plan.optimizer is not None:
        left_out += _leave_out_noise(first, results, values)
    return compare_results(results, values, first.freedom, casts=eager.casts), left_out


def lowered_ops(eager: Mapping[Where, bool], compiled: Iterable[Where]) -> tuple[Where, ...]:
    """The ops that compute in 16 bits in the graphs, at a line where eager mode runs them in float32 alone.

    eager: of each op, whether it took or gave values of 16 bits. Its modules distinguish the ops of one line, where the
    graph names the same ones.
    """
    lines: dict[Where, bool] = {}
    modules = {where.module for where in eager} - {""}
    for where, narrow in eager.items():
        line = replace(where, module="")
        lines[line] = narrow or lines.get(line, False)
    places = [where if where.module in modules else replace(where, module="") for where in compiled if where.line]
    return tuple(dict.fromkeys(w for w in places if not (eager if w.module else lines).get(w, True)))


def other_streams(eager: Execution, compiled: Execution) -> str:
    """Why the runs drew different random numbers; "" where all streams of both ended alike."""
    if not eager.random or compiled.streams == eager.streams or compiled.error is not None:
        return ""
    drawn, left = eager.streams[NUMPY] != eager.begun[NUMPY], compiled.streams[NUMPY] == compiled.begun[NUMPY]
    return f"{OTHER_STREAMS}{_OF_NUMPY if drawn and left else ''}"


def _add_unchanged(
    eager: Execution, other: Execution, results: dict[Key, Result], values: dict[Key, torch.Tensor]
) -> None:
    """Add a change of zero to the run that left a value as it was and the other changed."""
    for key in [key for key in (*results, *values) if key[0] in CHANGES]:
        if key in results and key not in values and key not in other.dropped:
            values[key] = torch.zeros_like(results[key].value)
        if key in values and key not in results and key not in eager.dropped:
            zero, value = torch.zeros_like(values[key]), values[key]
            floating = value.is_floating_point() or value.is_complex()
            exactly = Reference(zero, zero.to(torch.complex64 if value.is_complex() else torch.float32), FLOAT32)
            results[key] = Result(zero, exactly if floating else None)


def _leave_out_noise(eager: Execution, results: dict[Key, Result], values: dict[Key, torch.Tensor]) -> Counter[str]:
    """Leave out the elements of weights whose gradient is zero but for rounding; count them.

    An update may be as far off as its gradient in eager mode, element by element: an optimizer that divides by the
    gradient's size makes a full step of such elements. The gradient of the other run is no measure: it may be wrong.
    """
    errors, left_out = _gradient_errors(eager), Counter[str]()
    for key in [key for key in results if key[0] == "update" and key[1] in errors and key in values]:
        off, reference = errors[key[1]], results[key].reference
        if reference is None or values[key].shape != reference.exact.shape:
            continue
        judged = off < _DECIDED_BY_ROUNDING
        if not bool(judged.any()):
            left_out["updates of weights whose gradient is zero but for rounding"] += 1
            del results[key]
            continue
        left_out["elements of updates whose gradient is zero but for rounding"] += int((~judged).sum())
        values[key] = torch.where(judged, values[key], reference.exact)
        moved = reference.moved + reference.exact * off.clamp_max(_DECIDED_BY_ROUNDING) * MOVE / reference.unit
        results[key] = replace(results[key], reference=replace(reference, moved=moved))
    return +left_out


def _gradient_errors(eager: Execution) -> dict[str, torch.Tensor]:
    """The largest relative error of the elements of the gradients of each parameter, in all steps of eager mode."""
    largest: dict[str, torch.Tensor] = {}
    for (kind, name, _), result in eager.results.items():
        if kind != "gradient" or result.reference is None:
            continue
        exact = result.reference.exact
        error = (result.value.double() - exact).abs()
        error = torch.maximum(error, error.square().mean().sqrt()) / exact.abs()
        error = error.nan_to_num(torch.inf)
        largest[name] = torch.maximum(largest[name], error) if name in largest else error
    return largest
