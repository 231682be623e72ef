"""The search: Hypothesis draws, aims and minimises; gradient ascent climbs inside the declared domain."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, target
from hypothesis import errors as hypothesis_errors
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from ampcheck.core.errors import UsageError, brief
from ampcheck.search.arms import Example, as_example
from ampcheck.search.ascent import climb, smaller
from ampcheck.search.evaluate import Evaluation, Evaluator
from ampcheck.search.headroom import Headroom
from ampcheck.search.stats import Problem
from ampcheck.strategies import as_code
from ampcheck.torchtools.pytree import tensors

_MINIMISING = 0.5
"""Part of the seconds that minimising may take beyond the search itself."""

_STARTS = 3
_ATTEMPTS = 4
_SMALL = 2
_SHRINKS = 500  # calls that making one failure small may take; Hypothesis itself stops at as many steps


@dataclass(slots=True)
class SearchResult:
    """What a search gave: by kind of problem the smallest example, and how much was looked at."""

    examples: int = 0
    calls: int = 0
    outside: int = 0
    outside_reason: str = ""
    elements: int = 0
    undefined: int = 0
    ratio: float = 0.0
    flushed: float = 0.0
    climbs: int = 0
    seconds: float = 0.0
    stopped: str = ""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    lacking: str = ""
    cut: bool = False
    climbed: set[str] = field(default_factory=set)
    largest: tuple[float, Example | None] = (0.0, None)
    headroom: Headroom | None = None
    smallest: dict[str, tuple[Example, Problem]] = field(default_factory=dict)
    found_after: dict[str, int] = field(default_factory=dict)


class _Broken(Exception):  # noqa: N818  # Hypothesis keeps failures apart by the type of their exception
    """An example that breaks a property."""


class _Spent(BaseException):
    """The budget is spent: Hypothesis must not go on, which it does after any exception of the common kind."""


@cache
def _broken(kind: str) -> type[_Broken]:
    return type(f"_Broken_{kind}", (_Broken,), {})


def search_inputs(
    evaluator: Evaluator,
    inputs: st.SearchStrategy[Any],
    *,
    examples: int,
    seconds: float,
    seed_: int,
    database: str | os.PathLike[str] | ExampleDatabase | None,
    domain: tuple[float, float] | None,
) -> SearchResult:
    """Evaluate up to `examples` different inputs in up to `seconds`, and make what breaks smaller.

    Where that is large still, or where Hypothesis drew the same inputs again, the search is begun anew with other
    seeds, which may come upon something simpler.
    """
    found = SearchResult(headroom=Headroom(evaluator.arms))
    start = time.perf_counter()
    known: dict[Any, Evaluation] = {}
    shares: dict[Any, float] = {}
    starts: list[Example] = []
    until, latest = start + seconds, start + (1 + _MINIMISING) * seconds
    for attempt in range(_ATTEMPTS):
        smallest: dict[str, tuple[Example, Problem]] = {}
        most, before = found.calls + examples + _SHRINKS, found.examples

        def visit(drawn: object, smallest: dict[str, Any] = smallest, most: int = most) -> None:
            nonlocal until, latest
            late = bool(found.calls) and time.perf_counter() > until
            if late or (found.found_after and found.calls > most):
                found.cut = found.cut or bool(found.found_after)
                found.stopped = "" if found.found_after else f"the {seconds:g} seconds were spent"
                raise _Spent
            example = as_example(drawn)
            key = example.key()
            if key not in known:
                if found.examples >= examples and not found.found_after:
                    raise _Spent
                known[key] = look = _look(evaluator, found, example)
                if not found.calls:  # the first call imports, compiles and fills caches: no part of the budget
                    until = time.perf_counter() + seconds
                    latest = until + _MINIMISING * seconds
                found.calls += 1
                _note(found, example, look)
                shares[key] = _inside(found, example, look)
                if len(starts) < _STARTS:
                    starts.append(example)
            seen = known[key]
            if seen.problems:
                problem = seen.problems[0]
                if problem.kind not in found.found_after:
                    found.found_after[problem.kind] = found.examples
                    until = min(max(until, time.perf_counter() + _MINIMISING * seconds), latest)
                smallest[problem.kind] = example, problem
                raise _broken(problem.kind)(problem.kind)
            if not seen.outside:
                target(_bounded_log(seen.ratio), label="error, in roundings, as a power of two")
                target(_bounded_log(seen.amax), label="largest magnitude, as a power of two")
                target(seen.flushed, label="share of the outputs that became zero")
                target(_bounded_log(shares.get(key, 0.0)), label="share of a format inside, as a power of two")

        _search(inputs, visit, examples, seed_ + attempt, database if not attempt else None)
        for kind, one in smallest.items():
            if kind not in found.smallest or _size(one[0]) < _size(found.smallest[kind][0]):
                found.smallest[kind] = one
        if time.perf_counter() > until:
            break
        if found.smallest and min(_size(one)[0] for one, _ in found.smallest.values()) <= _SMALL:
            break
        if not found.smallest and not before < found.examples < examples:
            break
    if domain is not None and not found.smallest:
        _climb(evaluator, found, starts, domain, until, latest)
    if evaluator.unsteady:  # what was seen before that is no evidence either
        found.smallest, found.elements, found.outside_reason = {}, 0, evaluator.unsteady
    found.seconds = time.perf_counter() - start
    return found


def _search(
    inputs: st.SearchStrategy[Any],
    visit: Callable[[Any], None],
    examples: int,
    number: int,
    database: str | os.PathLike[str] | ExampleDatabase | None,
) -> None:
    """Let Hypothesis draw, aim and minimise. What breaks is kept by `visit`."""
    phases = [Phase.generate, Phase.target, Phase.shrink]
    profile = settings(
        max_examples=examples,
        deadline=None,
        database=_database(database),
        phases=[Phase.reuse, *phases] if database is not None else phases,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=True,
        print_blob=False,
    )
    try:
        profile(seed(number)(given(test_input=inputs)(_named(visit))))()
    except (_Broken, _Spent):
        return
    except hypothesis_errors.Flaky as error:  # a broken example that its own budget cut short when replayed
        if not isinstance(error.__context__, _Broken) and not _all_broken(error):
            return
    except hypothesis_errors.HypothesisException as error:
        raise UsageError(f"inputs must be a strategy that Hypothesis can draw from; {brief(error)}") from error
    except BaseException as error:
        if not _all_broken(error):
            raise


def _named(visit: Callable[[Any], None]) -> Callable[..., None]:
    """`visit` as Hypothesis calls a test."""

    def test(test_input: object) -> None:
        visit(test_input)

    return test


def _size(example: Example) -> tuple[int, int]:
    """How large an example is to a reader: elements, then the length of its text."""
    held = (example.args, dict(example.kwargs))
    return sum(tensor.numel() for _, tensor in tensors(held)), len(as_code(held))


def _look(evaluator: Evaluator, found: SearchResult, example: Example) -> Evaluation:
    """Judge one example, and remember the kernel that this machine lacks."""
    look = evaluator.look(example)
    found.lacking = found.lacking or look.lacking
    return look


def _note(found: SearchResult, example: Example, seen: Evaluation, *, climbed: bool = False) -> None:
    """Add one look; what is drawn while an example is made smaller counts as a call and not as an example."""
    if not found.found_after:
        if climbed:
            found.climbs += not seen.outside
        else:
            found.examples += 1
            found.outside += bool(seen.outside)
            found.outside_reason = found.outside_reason or seen.outside
        found.elements += seen.elements
        found.undefined += seen.undefined
        if not seen.problems:
            found.ratio = max(found.ratio, seen.ratio)
        for path, tensor in example.floats().items():
            finite = tensor.detach()[tensor.isfinite()].double()
            if finite.numel() and not climbed:
                low, high = found.ranges.get(path, (math.inf, -math.inf))
                found.ranges[path] = min(low, float(finite.amin())), max(high, float(finite.amax()))
    found.flushed = max(found.flushed, seen.flushed)
    if not seen.problems and not seen.outside and (found.largest[1] is None or seen.amax > found.largest[0]):
        found.largest = seen.amax, example


def _inside(found: SearchResult, example: Example, seen: Evaluation) -> float:
    """The largest share of its format that a value inside the run takes, where nothing is broken so far."""
    if found.headroom is None or seen.problems or seen.outside or found.found_after:
        return 0.0
    return found.headroom.look(example)


def _domains(found: SearchResult, example: Example, domain: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """The bounds of each floating input: the domain; of several inputs none leaves the range that was drawn for it.

    Among several, one may be a probability and another a logit, which one pair of numbers cannot say.
    """
    names = list(example.floats())
    if len(names) == 1:
        return {names[0]: domain}
    drawn = {name: found.ranges.get(name, domain) for name in names}
    both = {name: (max(domain[0], low), min(domain[1], high)) for name, (low, high) in drawn.items()}
    return {name: bounds if bounds[0] <= bounds[1] else drawn[name] for name, bounds in both.items()}


def _climb(
    evaluator: Evaluator,
    found: SearchResult,
    starts: Sequence[Example],
    domain: tuple[float, float],
    until: float,
    latest: float,
) -> None:
    """Gradient ascent on the largest value: from the example with the largest inside, the largest output, the first."""
    inside = found.headroom.peak[1] if found.headroom is not None else None
    best = [one for one in (inside, found.largest[1]) if one is not None]
    tried: set[Any] = set()
    for example in (*best, *starts):
        key = example.key()
        if key in tried:
            continue
        tried.add(key)
        domains = _domains(found, example, domain)
        for reached in climb(evaluator.arms, example, domains, lambda: time.perf_counter() > until):
            seen = _look(evaluator, found, reached)
            found.calls += 1
            _note(found, reached, seen, climbed=True)
            _inside(found, reached, seen)
            if seen.problems:
                kind = seen.problems[0].kind
                found.found_after[kind] = found.examples
                found.climbed.add(kind)

                def fails(one: Example, kind: str = kind) -> bool:
                    if time.perf_counter() > latest:
                        return False
                    found.calls += 1
                    now = _look(evaluator, found, one).problems
                    return bool(now) and now[0].kind == kind

                least = smaller(reached, fails)
                problems = [one for one in evaluator.look(least).problems if one.kind == kind]
                found.smallest[kind] = (least, problems[0]) if problems else (reached, seen.problems[0])
                return


def _all_broken(error: BaseException) -> bool:
    """Whether a group of exceptions (3.11, or its backport) holds nothing but ours."""
    parts = getattr(error, "exceptions", None)
    return isinstance(error, _Broken) if parts is None else all(map(_all_broken, parts))


def _database(given_: str | os.PathLike[str] | ExampleDatabase | None) -> ExampleDatabase | None:
    if given_ is None or isinstance(given_, ExampleDatabase):
        return given_
    return DirectoryBasedExampleDatabase(given_)


def _bounded_log(value: float) -> float:
    return math.log2(min(max(value, 2.0**-200), 2.0**200)) if value == value else 0.0
