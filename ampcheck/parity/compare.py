"""Compare two executions: are they the same function, and does each of them round honestly?

Both run under a shadow. If their exact values are equal, the difference of the two is rounding, and each is judged by
its own bound, as `ampcheck.audit` judges one run. If exact values differ, both run once more with a trail, where exact
takes the decisions: either a decision near a tie was the difference, or they are two functions, and the ops at which
they part are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Where
from ampcheck.core.text import listed
from ampcheck.facts.sides import Change
from ampcheck.parity.arguments import OwnOps
from ampcheck.parity.calls import Side
from ampcheck.parity.execution import Execution, execute, run_plainly, str_of
from ampcheck.parity.functions import have_equal_bits, is_determined, relate, roundings_between
from ampcheck.parity.judgement import compiled_failures, failures_of, is_close, outdone_by_other
from ampcheck.parity.kernels import KernelJudge, compare_kernel
from ampcheck.parity.parting import find_parting, shared_values, walk_back
from ampcheck.parity.recorded import Recorded
from ampcheck.parity.relations import (
    Relations,
    common_keys,
    explained_by_decisions,
    explained_by_digits,
    explained_by_tables,
    explained_by_ties,
    other_formats,
    relate_results,
    rounded_to,
    uncompared,
)
from ampcheck.parity.structure import are_numbers, other_inputs, other_structure, unplaced
from ampcheck.parity.ties import decided_by_ties
from ampcheck.parity.tokens import Tokens, tokens_of
from ampcheck.parity.trail import EVERY_SHAPE, Record, Trail
from ampcheck.parity.twins import beyond_roundings, run_with_twins
from ampcheck.records.parity import AGREE, ANOTHER, COMPILED, UNDECIDED, WRONG, KernelResult, Parity, ResultPair
from ampcheck.records.results import JUDGED_UNIT, Key

RELATIONS = ("rounding", "function", "bitwise")
"""Relations that may be asked of two executions: equal exact values, each within its own bound; equal exact values
alone; equal bits."""

_ALIKE = 2.0**-27
"""The relative distance up to which numbers are alike: an eighth of a rounding of float32."""

Subject: TypeAlias = Side | Recorded


def compare(
    a: Subject,
    b: Subject,
    *,
    relation: str = "rounding",
    limits: Limits | None = None,
    tokens: Tokens | None = None,
) -> Parity:
    """Compare two sides, or records of them. Raises `UsageError` where one of them raises.

    tokens: log-probabilities that are compared one by one as well.
    """
    a, b = _sharing(a, b)
    bitwise = relation == "bitwise"
    runs = [
        side.execution() if isinstance(side, Recorded) else execute(side, trail=Trail(bits=True) if bitwise else None)
        for side in (a, b)
    ]
    off = not torch.is_grad_enabled() and any(isinstance(side, Side) and side.backward for side in (a, b))
    if off or any(run.backward_raised for run in runs):
        _drop_gradients(runs)
    parity = other_structure(runs)
    if parity is None:
        parity = _compare_bits((a, b), runs) if bitwise else _compare_functions((a, b), runs)
    if relation != "bitwise" and parity.outcome in (AGREE, UNDECIDED):
        failures = compiled_failures if relation == "function" else partial(failures_of, limits=limits or Limits())
        parity = _compare_bounds((a, b), runs, failures, parity)
    inputs = other_inputs(runs)
    notes = tuple(note for run in runs for note in run.notes) + tuple(other_formats(runs)) + tuple(uncompared(runs))
    notes += ("gradients are not compared: gradients are off",) if off else ()
    notes += (f"the inputs differ: {listed(inputs)}",) if inputs else ()
    tables = () if tokens is None else tokens_of(runs, tokens)
    notes += tuple(table.note for table in tables)
    count = len(common_keys(runs)) + len(runs[0].plain)
    why = unplaced(parity, runs, recorded=any(isinstance(side, Recorded) for side in (a, b)), inputs=bool(inputs))
    return replace(parity, notes=(*notes, *parity.notes), compared=count, tables=tables, unplaced=why)


def _sharing(a: Subject, b: Subject) -> tuple[Subject, Subject]:
    """Both sides with the parameters that both use, by the names that they have in `a`."""
    if isinstance(a, Recorded) or isinstance(b, Recorded):
        return a, b
    others = {id(parameter) for parameter in b.parameters().values()}
    shared = {name: parameter for name, parameter in a.parameters().items() if id(parameter) in others}
    return replace(a, shared=shared), replace(b, shared=shared)


def _drop_gradients(runs: Sequence[Execution]) -> None:
    """Leave gradients out, which one side could not take."""
    for run in runs:
        run.results = {key: result for key, result in run.results.items() if key[0] != "gradient"}


# The same function? ---------------------------------------------------------------------------------------------------


def _compare_functions(sides: Sequence[Subject], runs: Sequence[Execution]) -> Parity:
    """Return whether two executions are of one function: by their exact values, or where exact takes the decisions."""
    keys = common_keys(runs)
    related = relate_results(runs, keys)
    numbers = _other_numbers(runs)
    opaque = any(run.opaque for run in runs)
    if not (related.differing or opaque or numbers):
        parity = _agree(runs, related, keys)
        return replace(parity, notes=(*explained_by_digits(related), *parity.notes))
    independent, kernels = _run_independently(sides, opaque=[bool(run.opaque) for run in runs])
    judged = tuple(kernels.judged) if kernels is not None else ()
    if wrong := [result for result in judged if result.wrong]:
        return _another_before(wrong[0], independent) or _wrong_kernel(wrong, independent, judged)
    coarsest = _coarsest_of_one(independent, keys)
    again = relate_results(independent, keys, coarsest)
    if numbers and (numbers := _other_numbers(independent)):
        return Parity(ANOTHER, numbers)
    live = [] if opaque else [side for side in sides if isinstance(side, Side)]
    notes = [] if opaque else list(explained_by_decisions(runs, related, again))
    changes: list[Change] = []
    if len(live) > 1 and (again.rounded or (coarsest and again.differing)):
        twins, changes, left = run_with_twins(live, independent, keys)
    if changes:
        independent, coarsest = twins, left
        again = relate_results(independent, keys, coarsest)
        notes = ["weights or tables that one side holds rounded were compared as the other side has them"]
    notes += explained_by_digits(again) or explained_by_digits(related)
    if coarsest > JUDGED_UNIT and again.rounded and len(live) > 1:
        for key in beyond_roundings(live, independent, again.rounded, changes):
            again.rounded.remove(key)
            again.differing[key] = relate(independent[0].results[key], independent[1].results[key])
    notes += explained_by_tables(again, coarsest)
    if again.differing and len(live) > 1:
        tied, beside = decided_by_ties(live, again.differing, changes)
        notes += explained_by_ties(again, tied)
        independent = beside if next(iter(again.differing), ("",))[0] == "gradient" and beside else independent
    if opaque and again.differing and (behind := _behind_kernels(again, independent, kernels)):
        return _wrong_kernel(behind, independent, judged)
    parity = _another(again, independent) if again.differing else _agree(runs, again, keys)
    return replace(parity, kernels=judged, notes=tuple(notes) + parity.notes)


def _another_before(kernel: KernelResult, runs: Sequence[Execution]) -> Parity | None:
    """Two functions that part before a kernel: what it was given is no value of the other run."""
    number = next(i for i, run in enumerate(runs) if run.opaque)
    mine, other = (run.trail for run in (runs[number], runs[1 - number]))
    if mine is None or other is None:
        return None
    made = next((r for r in mine.records if r.where == kernel.where), None)
    given = [p for p in made.parents if mine.records[p].where is not None and mine.records[p].live] if made else []
    known = shared_values([mine.records[parent] for parent in given], other.records)
    lost = next((parent for parent, is_known in zip(given, known, strict=True) if not is_known), None)
    if lost is None:
        return None
    first, common = walk_back(mine.records, other.records, lost)
    assert first is not None
    at = (first.where, None) if number == 0 else (None, first.where)
    text = f"what {kernel.op} is given is no value of the other side; the last value that both have is made by "
    made_by = common.where if common is not None else None
    text += f"{made_by or 'the arguments'}; then {runs[number].side.name} runs {first.where}"
    return Parity(ANOTHER, text, at=at, common=made_by)


def _other_numbers(runs: Sequence[Execution], alike: float = _ALIKE) -> str:
    """Which number of Python the two return otherwise; "" for equal ones. Where exact decides, it is that of exact."""
    a, b = (run.plain for run in runs)
    for path, first in a.items():
        second = b.get(path)
        if not are_numbers(first, second) or repr(first) == repr(second):
            continue
        if not (isinstance(first, float) and isinstance(second, float) and math.isclose(first, second, rel_tol=alike)):
            return f"output {path}".rstrip() + f" is {first!r} in a and {second!r} in b"
    return ""


def _run_independently(
    sides: Sequence[Subject], *, opaque: Sequence[bool]
) -> tuple[list[Execution], KernelJudge | None]:
    """Both sides with a trail, where exact takes the decisions; kernels of one go on from the values of the other."""
    runs: dict[int, Execution] = {}
    judge: KernelJudge | None = None
    for number in sorted((0, 1), key=lambda number: opaque[number]):
        side = sides[number]
        if isinstance(side, Recorded):
            runs[number] = side.execution(own=True)
            continue
        is_reference = not opaque[number] and any(opaque)
        trail = Trail(shapes=EVERY_SHAPE) if is_reference else Trail()
        runs[number] = execute(side, trail=trail, independent=True, revise=judge if opaque[number] else None)
        made = runs[number].trail
        judge = KernelJudge(made.records) if is_reference and made is not None else judge
    return [runs[0], runs[1]], judge


def _coarsest_of_one(runs: Sequence[Execution], keys: Sequence[Key]) -> float:
    """The unit roundoff of data behind these results that one side alone holds."""
    a, b = (run.trail for run in runs)
    if a is None or b is None:
        return 0.0
    first, second = ([run.records[key] for key in keys if key in run.records] for run in runs)
    return max(a.coarsest_not_in(b, first), b.coarsest_not_in(a, second))


def _behind_kernels(related: Relations, runs: Sequence[Execution], kernels: KernelJudge | None) -> list[KernelResult]:
    """The results that differ behind a kernel without a counterpart, which are judged by those of the other side.

    Where both sides have such kernels, the results are doubts. Results that no kernel made stay in `related.differing`.
    """
    ops = ", ".join(sorted({op for run in runs for op in run.opaque}))
    behind = {key: how for key, how in related.differing.items() if any(run.is_behind_opaque(key) for run in runs)}
    before = {key: how for key, how in related.differing.items() if key not in behind}
    if kernels is None or all(run.opaque for run in runs):
        reason = "ops that cannot be followed inside, and no other side that computes the same in PyTorch here"
        related.doubts |= dict.fromkeys(behind, f"{ops}: {reason}")
        related.differing = before
        return []
    if not kernels.unmatched:
        return []
    kernel = next(number for number, run in enumerate(runs) if run.opaque)
    wrong, other = list[KernelResult](), before
    for key, how in behind.items():
        result, exact = runs[kernel].results[key], runs[1 - kernel].results[key].reference
        if exact is None:
            other[key] = how
            continue
        message, error, limit = compare_kernel(result.value, exact, result.roundings)
        if message:
            wrong.append(KernelResult(kernels.unmatched[0], ops, f"{str_of(key)}: {message}", error, limit))
    related.differing = other
    return wrong


# Outcomes -------------------------------------------------------------------------------------------------------------


def _another(related: Relations, runs: Sequence[Execution]) -> Parity:
    """Two functions: where their exact values part, by the first result that differs."""
    key, how = next(iter(related.differing.items()))
    trails = [run.trail for run in runs if run.trail is not None and key in run.records]
    more = f"; {len(related.differing) - 1} further results differ" if len(related.differing) > 1 else ""
    if len(trails) < 2:
        return Parity(ANOTHER, f"{str_of(key)}: {how}{more}", key=str_of(key))
    records = [_without_own_ops(trail.records) for trail in trails]
    parting = find_parting(records, [run.records[key] for run in runs])
    text = f"{str_of(key)}: {how}; {parting.described()}{more}"
    return Parity(ANOTHER, text, key=str_of(key), at=parting.at, common=parting.common[0])


def _without_own_ops(records: Sequence[Record]) -> list[Record]:
    """The records of a run, in which what a circumstance makes of arguments and outputs is made by no op: two functions
    part elsewhere."""
    own = OwnOps.__name__
    return [replace(r, where=None) if r.where is not None and r.where.module == own else r for r in records]


def _agree(runs: Sequence[Execution], related: Relations, keys: Sequence[Key]) -> Parity:
    """The same function, unless nothing was determined."""
    results = runs[0].results
    outputs = [key for key in keys if key[0] not in ("gradient", "module")]
    close = {error.key for run in runs for error in run.errors if is_close(error)}
    open_ones = [key for key in outputs if key not in close and not is_determined(results[key])]
    doubts = related.doubts | dict.fromkeys(open_ones, "zero, or not determined by the data")
    of_outputs = [key for key in doubts if key[0] not in ("gradient", "module")]
    numbers = _has_numbers(runs[0])
    texts = [f"{str_of(key)}: {doubts[key]}" for key in of_outputs or doubts]
    if of_outputs or not (keys or numbers) or (keys and len(doubts) >= len(keys)):
        text = "; ".join(texts[:3]) or "no result was compared"
        return Parity(UNDECIDED, text, roundings=related.roundings)
    if not keys:
        return Parity(AGREE, "they return the same numbers")
    text = f"the same function; {len(keys)} results differ by at most {related.roundings:.2g} roundings"
    text += f" of {rounded_to(related.unit)}" if related.unit else ""
    return Parity(AGREE, text, roundings=related.roundings, notes=tuple(texts))


def _has_numbers(run: Execution) -> bool:
    return any(value is not None for value in run.plain.values())


def _wrong_kernel(
    wrong: Sequence[KernelResult], runs: Sequence[Execution], kernels: tuple[KernelResult, ...]
) -> Parity:
    """A kernel that is beyond its bound, by the exact values of the other side."""
    first = wrong[0]
    sides = tuple(run.side.name for run in runs if run.opaque)
    at = (first.where, None) if runs[0].opaque else (None, first.where)
    text = f"{', '.join(sides)}: {first.op} is beyond the bound of a kernel: {first.message}"
    return Parity(WRONG, text, wrong=sides, at=at, kernels=kernels or tuple(wrong))


def _compare_bounds(
    sides: Sequence[Subject],
    runs: Sequence[Execution],
    failures_of: Callable[[Execution], list[Finding]],
    parity: Parity,
) -> Parity:
    """The same function; whether each side is within the bound of its own rounding, or what it compiles is."""
    findings: dict[str, tuple[Finding, ...]] = {}
    every = failures_of is not compiled_failures
    for side, run in zip(sides, runs, strict=True):
        of_record = side.failures if isinstance(side, Recorded) and every else ()
        findings[side.name] = of_record if isinstance(side, Recorded) else tuple(failures_of(run))
    if every and not any(findings.values()):
        findings |= {side: tuple(outdone) for side, outdone in outdone_by_other(runs)}
    parity = replace(parity, pairs=_pairs(runs))
    wrong = tuple(name for name, failures in findings.items() if failures)
    if not wrong:
        return parity
    texts = (f"{name} is beyond the bound of its own rounding: {findings[name][0].message}" for name in wrong)
    first, second = (failures[0].where if failures else None for failures in findings.values())
    failures = tuple(finding for failures in findings.values() for finding in failures)
    return replace(parity, outcome=WRONG, message="; ".join(texts), wrong=wrong, at=(first, second), failures=failures)


def _pairs(runs: Sequence[Execution]) -> tuple[ResultPair, ...]:
    """Of each common result, how far both sides are from exact, and from each other."""
    a, b = ({error.key: error for error in run.errors} for run in runs)
    keys = [key for key in common_keys(runs) if key in a and key in b]
    return tuple(
        ResultPair(
            str_of(key),
            roundings_between(*(run.results[key] for run in runs)),
            *(a[key].error, a[key].limit),
            *(b[key].error, b[key].limit),
        )
        for key in keys
    )


def _compare_bits(sides: Sequence[Subject], runs: Sequence[Execution]) -> Parity:
    """Equal bits of all results, as the code runs without a shadow, or the first op with other bits."""
    if numbers := _other_numbers(runs, alike=0.0):
        return Parity(ANOTHER, numbers)
    plain = [
        {key: result.value for key, result in run.results.items()}
        if isinstance(side, Recorded)
        else run_plainly(side).values
        for side, run in zip(sides, runs, strict=True)
    ]
    keys = common_keys(runs)
    for key in keys:
        if not all(key in values for values in plain) or not have_equal_bits(*(values[key] for values in plain)):
            at = _first_other_bits(runs)
            text = f"{str_of(key)} has other bits; {_describe_bits(sides, runs, at)}"
            why = COMPILED if any(run.compiled_calls for run in runs) else ""
            return Parity(ANOTHER, text, key=str_of(key), at=at, unplaced=why)
    if not keys and not _has_numbers(runs[0]):
        return Parity(UNDECIDED, "no result was compared")
    return Parity(AGREE, f"{len(keys)} results have equal bits")


def _describe_bits(sides: Sequence[Subject], runs: Sequence[Execution], at: Sequence[Where | None]) -> str:
    """Where bits part, or why no op is named."""
    if any(isinstance(side, Recorded) for side in sides):
        return "a record keeps the bits of results, and of no op"
    texts = [f"they part at {' and '.join(str(place) for place in at if place)}"] if any(at) else []
    for run, place in zip(runs, at, strict=True):
        if place is None:
            reason = "compiled code runs in eager mode while ops are followed" if run.compiled_calls else ""
            texts.append(f"no op of {run.side.name} is named: {reason or 'the other side has each of its values'}")
    return "; ".join(texts)


def _first_other_bits(runs: Sequence[Execution]) -> tuple[Where | None, Where | None]:
    """The first op of each run whose result has bits that the other run does not have; None beside a record."""
    if any(run.trail is None for run in runs):
        return None, None
    records = [_without_own_ops(run.trail.records) for run in runs if run.trail is not None]
    bits: list[Mapping[int, None]] = [dict.fromkeys(record.bits for record in run) for run in records]
    first, second = (
        next((r.where for r in run if r.where is not None and r.bits not in other), None)
        for run, other in zip(records, bits[::-1], strict=True)
    )
    return first, second
