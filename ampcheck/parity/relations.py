"""Relates the results of two executions, one by one, and explains those whose exact values differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ampcheck.core.formats import format_of
from ampcheck.facts.memory import dtype_name
from ampcheck.parity.execution import RESULTS, Execution, str_of
from ampcheck.parity.functions import ALIKE, ROUNDED, SAME, UNDETERMINED, is_determined, relate, roundings_between
from ampcheck.records.results import JUDGED_UNIT, Key


@dataclass(slots=True)
class Relations:
    """Relations between the results of two executions.

    differing: by key, by how much two functions part. alike: results that part by less than float32 shows. rounded:
    those that part by roundings of data which one side alone holds. doubts: by key, why a result decides nothing.
    roundings: the largest distance of two results, of the format with this unit roundoff.
    """

    differing: dict[Key, str] = field(default_factory=dict)
    alike: list[Key] = field(default_factory=list)
    rounded: list[Key] = field(default_factory=list)
    doubts: dict[Key, str] = field(default_factory=dict)
    roundings: float = 0.0
    unit: float = 0.0


def rounded_to(unit: float) -> str:
    """The format of a unit roundoff, the coarsest on the way to a value."""
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2".split()
    return next((name for name in names if unit <= format_of(name).unit_roundoff), "fewer bits")


def common_keys(runs: Sequence[Execution]) -> list[Key]:
    """The results that both have, in order; gradients of parameters that have one name and one shape."""
    a, b = (run.results for run in runs)
    of_parameters = {key for key in a if key[0] == "gradient" and key[1].startswith("parameter ")}
    keys = (k for k in a if k in b and not (k in of_parameters and a[k].value.shape != b[k].value.shape))
    return in_order(keys)


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Keys in the order in which results are compared."""
    return sorted(keys, key=lambda key: RESULTS.index(key[0]))


def relate_results(runs: Sequence[Execution], keys: Iterable[Key], coarsest: float = 0.0) -> Relations:
    """Return how these results of two executions relate. coarsest: see `ampcheck.parity.functions.relate`."""
    related = Relations()
    for key in keys:
        a, b = (run.results[key] for run in runs)
        how = relate(a, b, coarsest)
        if how == SAME and (key[0] != "gradient" or is_determined(a)):
            apart = roundings_between(a, b)
            if apart >= related.roundings and a.reference is not None and b.reference is not None:
                related.roundings, related.unit = apart, max(a.reference.unit, b.reference.unit)
        elif how == SAME:
            continue
        elif how == ALIKE:
            related.alike.append(key)
        elif how == ROUNDED:
            related.rounded.append(key)
        elif how == UNDETERMINED:
            related.doubts[key] = "the data determine nothing of it"
        else:
            related.differing[key] = how
    return related


def explained_by_decisions(runs: Sequence[Execution], before: Relations, after: Relations) -> Iterator[str]:
    """A note on results that part no more where exact takes the decisions of these runs."""
    settled = [key for key in before.differing if key not in after.differing and key not in after.rounded]
    if settled and any(freedom is None or freedom.ties or freedom.kinks for freedom in (run.freedom for run in runs)):
        yield f"decisions near a tie or a kink were taken otherwise, and explain the difference in {_listed(settled)}"


def explained_by_digits(related: Relations) -> list[str]:
    """A note on results whose exact values part by less than any result shows."""
    if not related.alike:
        return []
    text = "exact values differ by less than an eighth of a rounding of float32, as constants of fewer digits do, in"
    return [f"{text} {str_of(related.alike[0])}"]


def explained_by_ties(related: Relations, tied: Iterable[Key]) -> Iterator[str]:
    """A note on results in which two functions part since data lie exactly at a tie or a kink."""
    settled = [key for key in tied if related.differing.pop(key, None)]
    if settled:
        yield f"data lie exactly at a tie or a kink, beside which both agree, in {_listed(settled)}"


def _listed(keys: Sequence[Key]) -> str:
    return ", ".join(map(str_of, keys[:3])) + (", ..." if len(keys) > 3 else "")


def explained_by_tables(related: Relations, coarsest: float) -> Iterator[str]:
    """A note on tables in float32 that one side alone holds; of such in 16 bits, a doubt."""
    if not related.rounded:
        return
    result = str_of(related.rounded[0])
    if coarsest <= JUDGED_UNIT:
        yield f"tables in float32 that one side alone holds explain the difference in {result}"
        return
    related.doubts |= dict.fromkeys(
        related.rounded,
        "one side holds weights or tables in 16 bits that the other does not, and rounding them explains the "
        "difference; make both from the same numbers",
    )


def other_formats(runs: Sequence[Execution]) -> Iterator[str]:
    """A note on each output that the two give, or round on the way, in other formats."""
    a, b = (run.results for run in runs)
    for key in common_keys(runs):
        if key[0] != "output":
            continue
        formats = [dtype_name(results[key].value.dtype) for results in (a, b)]
        if formats[0] != formats[1]:
            yield f"{str_of(key)} is {formats[0]} in a and {formats[1]} in b"
        references = [results[key].reference for results in (a, b)]
        rounded = [rounded_to(reference.unit) for reference in references if reference is not None]
        if len(set(rounded)) > 1:
            yield f"{str_of(key)} is rounded to {rounded[0]} on its way in a and to {rounded[1]} in b"


def is_of_other_argument(key: Key, run: Execution) -> bool:
    """Return whether a result is a gradient or a write of an argument that a run does not have by this name."""
    kind, title, _ = key
    name = title.removeprefix("argument ")
    return kind in ("gradient", "written") and name != title and name not in run.arguments


def uncompared(runs: Sequence[Execution]) -> Iterator[str]:
    """A note on gradients of parameters and arguments, and on modules, that one side alone has by their names."""
    own = runs[0].results.keys() ^ runs[1].results.keys()
    parameters = [key for key in own if key[0] == "gradient" and key[1].startswith("parameter ")]
    if parameters:
        yield f"gradients of {len(parameters)} parameters that one side alone names are not compared: see modules="
    for has, lacks in (runs, runs[::-1]):
        if keys := [key for key in in_order(own) if key in has.results and is_of_other_argument(key, lacks)]:
            yield f"not compared, as {lacks.side.name} has no argument of this name: {_listed(keys)} of {has.side.name}"
    for key in sorted(key for key in own if key[0] == "module"):
        side, other = ("a", "b") if key in runs[0].results else ("b", "a")
        yield f"{str_of(key)} has a result in {side} alone: that of {other} was not called, or gives another structure"
