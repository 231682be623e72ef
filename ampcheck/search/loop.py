"""The search: Hypothesis draws, aims and minimises; gradient ascent climbs inside the declared domain."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, target
from hypothesis import errors as hypothesis_errors
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from ampcheck.core.arguments import is_number, parse_integer, parse_number
from ampcheck.core.errors import UsageError, brief
from ampcheck.parity.example import Example, as_example
from ampcheck.records.property import Breaking, Look, Problem, PropertyStats
from ampcheck.search.ascent import climb, minimise
from ampcheck.search.evaluate import Evaluator

_MINIMISING = 0.5
"""Part of the seconds that minimising may take beyond the search itself."""

_ATTEMPTS = 4
"""Searches with other seeds, for a simpler example than the first found, or where the same were drawn again."""

_SMALL = 2
_SHRINKS = 500
_STARTS = 3

Database = str | os.PathLike[str] | ExampleDatabase | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of the search of `assert_property`.

    examples, seconds: the budget of each dtype; minimising what breaks may take half of the seconds more. seed: the
    same seed gives the same search, as long as the seconds suffice. domain: bounds of the floating inputs, within which
    gradient ascent searches for larger values: a lone input leaves the range of its strategy for it, each of several
    stays in its own range as well. database: a folder in which Hypothesis stores failing examples. reproduce: a folder
    to which a test is written for each failure. Raises `UsageError` for values out of range.
    """

    examples: int = 200
    seconds: float = 60.0
    seed: int = 0
    domain: tuple[float, float] | None = None
    database: Database = None
    reproduce: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        parse_integer(self.examples, "examples")
        parse_number(self.seconds, "seconds")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UsageError(f"seed must be an integer; found {self.seed!r}")
        if self.domain is not None and not _is_range(self.domain):
            raise UsageError(f"domain must be (low, high), two finite numbers with low < high; found {self.domain!r}")
        if self.reproduce is not None and not isinstance(self.reproduce, (str, os.PathLike)):
            raise UsageError(f"reproduce must be the path of a folder; found {self.reproduce!r}")
        if self.reproduce is not None and os.path.exists(self.reproduce) and not os.path.isdir(self.reproduce):
            raise UsageError(f"reproduce must be a folder; {os.fspath(self.reproduce)} is a file")


class _Broken(Exception):  # noqa: N818  # Hypothesis keeps failures apart by the type of their exception
    """An example that breaks a property."""


class _Spent(BaseException):
    """The budget is spent. Hypothesis would go on after any `Exception`."""


@cache
def _broken(kind: str) -> type[_Broken]:
    return type(f"_Broken_{kind}", (_Broken,), {})


@dataclass(slots=True)
class Search:
    """One search, and what it found.

    stats: what was examined while nothing was found; calls: how often the model ran; outside_reason: why float32
    refuses the first of the examples that it does; undefined: elements that are not finite in exact; ranges: by input
    what was drawn for it.
    """

    evaluator: Evaluator
    stats: PropertyStats = field(default_factory=lambda: PropertyStats("", ""))
    calls: int = 0
    outside_reason: str = ""
    undefined: int = 0
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    smallest: dict[str, Breaking] = field(default_factory=dict)
    _known: dict[Any, Look] = field(default_factory=dict)
    _starts: list[Example] = field(default_factory=list)
    _until: float = math.inf
    _latest: float = math.inf

    def run(self, inputs: st.SearchStrategy[Any], options: SearchOptions) -> None:
        """Judge up to `examples` different inputs in up to `seconds`, and minimise what breaks."""
        for attempt in range(_ATTEMPTS):
            before, kept = self.stats.examples, dict(self.smallest)
            most = self.calls + options.examples + _SHRINKS

            def visit(drawn: Any, most: int = most) -> None:
                self._visit(as_example(drawn), options, most)

            database = options.database if not attempt else None
            _draw(inputs, visit, replace(options, seed=options.seed + attempt, database=database))
            for kind, earlier in kept.items():
                if _size(earlier.example) <= _size(self.smallest[kind].example):
                    self.smallest[kind] = earlier
            if time.perf_counter() > self._until:
                break
            if self.smallest and min(s.example.numel for s in self.smallest.values()) <= _SMALL:
                break
            if not self.smallest and not before < self.stats.examples < options.examples:
                break
        if options.domain is not None and not self.smallest:
            self._climb(options.domain)

    def _visit(self, example: Example, options: SearchOptions, most: int) -> None:
        """Judge an example that Hypothesis drew, and raise what it breaks."""
        late = bool(self.calls) and time.perf_counter() > self._until
        if late or (self.smallest and self.calls > most):
            stopped = "" if self.smallest else f"the {options.seconds:g} seconds were spent"
            self.stats = replace(self.stats, cut=self.stats.cut or bool(self.smallest), stopped=stopped)
            raise _Spent
        key = example.key()
        if key not in self._known:
            if self.stats.examples >= options.examples and not self.smallest:
                raise _Spent
            self._known[key] = self._look(example)
            if self.calls == 1:  # the first call imports, compiles and fills caches: no part of the budget
                self._until = time.perf_counter() + options.seconds
                self._latest = self._until + _MINIMISING * options.seconds
            if len(self._starts) < _STARTS:
                self._starts.append(example)
        look = self._known[key]
        if look.problems:
            problem = look.problems[0]
            first = self.smallest.get(problem.kind)
            if first is None:
                self._until = min(max(self._until, time.perf_counter() + _MINIMISING * options.seconds), self._latest)
            after = first.found_after if first else self.stats.examples
            self.smallest[problem.kind] = Breaking(example, problem, after)
            raise _broken(problem.kind)(problem.kind)
        if not look.outside:
            target(_bounded_log(look.ratio), label="error over its limit, as a power of two")
            target(_bounded_log(look.peak.share), label="share of the format inside, as a power of two")

    def _look(self, example: Example, *, climbed: bool = False) -> Look:
        """Judge an example. Examples drawn while a failure is minimised count as calls alone."""
        look, stats = self.evaluator.look(example), self.stats
        self.calls += 1
        stats = replace(stats, lacking=stats.lacking or look.lacking)
        if self.smallest:
            self.stats = stats
            return look
        if climbed:
            stats = replace(stats, climbs=stats.climbs + (not look.outside))
        else:
            stats = replace(stats, examples=stats.examples + 1, outside=stats.outside + bool(look.outside))
            self.outside_reason = self.outside_reason or look.outside
            self._note_range(example)
        stats = replace(stats, elements=stats.elements + look.elements)
        self.undefined += look.undefined
        if not look.problems:
            stats = replace(stats, ratio=max(stats.ratio, look.ratio))
            if look.peak.share > stats.peak.share or (look.peak.format and not stats.peak.format):
                stats = replace(stats, peak=replace(look.peak, code=example.code()))
                self._starts = [example, *self._starts[-_STARTS + 1 :]]
            if look.overflow is not None and stats.overflow is None:
                stats = replace(stats, overflow=replace(look.overflow, code=example.code()))
        self.stats = stats
        return look

    def _note_range(self, example: Example) -> None:
        for path, tensor in example.floats().items():
            wide = tensor.detach().double()
            finite = wide[wide.isfinite()]
            if finite.numel():
                low, high = self.ranges.get(path, (math.inf, -math.inf))
                self.ranges[path] = min(low, float(finite.amin())), max(high, float(finite.amax()))

    def _climb(self, domain: tuple[float, float]) -> None:
        """Gradient ascent on the largest value, from the example with the largest so far and from the first ones."""
        for start in list(self._starts):
            domains = self._domains(start, domain)
            for example in climb(self.evaluator.runner, start, domains, lambda: time.perf_counter() > self._until):
                look = self._look(example, climbed=True)
                if look.problems:
                    self._minimise(example, look.problems[0])
                    return

    def _minimise(self, example: Example, problem: Problem) -> None:
        smallest = self.smallest[problem.kind] = Breaking(example, problem, self.stats.examples, climbed=True)

        def fails(candidate: Example) -> bool:
            if time.perf_counter() > self._latest:
                return False
            problems = self._look(candidate).problems
            if not problems or problems[0].kind != problem.kind:
                return False
            smallest.example, smallest.problem = candidate, problems[0]
            return True

        minimise(example, fails)

    def _domains(self, example: Example, domain: tuple[float, float]) -> dict[str, tuple[float, float]]:
        """The bounds of each floating input: the domain; of several inputs none leaves the range that was drawn for it.

        Among several, one may be a probability and another a logit, which one pair of numbers cannot say.
        """
        names = list(example.floats())
        if len(names) == 1:
            return {names[0]: domain}
        drawn = {name: self.ranges.get(name, domain) for name in names}
        both = {name: (max(domain[0], low), min(domain[1], high)) for name, (low, high) in drawn.items()}
        return {name: bounds if bounds[0] <= bounds[1] else drawn[name] for name, bounds in both.items()}


def _draw(inputs: st.SearchStrategy[Any], visit: Callable[[Any], None], options: SearchOptions) -> None:
    """Let Hypothesis draw, aim and minimise. What breaks is kept by `visit`."""
    phases, database = [Phase.generate, Phase.target, Phase.shrink], options.database
    if database is not None and not isinstance(database, ExampleDatabase):
        database = DirectoryBasedExampleDatabase(database)
    profile = settings(
        max_examples=options.examples,
        deadline=None,
        database=database,
        phases=[Phase.reuse, *phases] if database is not None else phases,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=True,
        print_blob=False,
    )

    def test(test_input: object) -> None:
        visit(test_input)

    try:
        profile(seed(options.seed)(given(test_input=inputs)(test)))()
    except (_Broken, _Spent):
        return
    except hypothesis_errors.Flaky as error:  # a failure that the budget cut short when it was replayed
        if not isinstance(error.__context__, _Broken) and not _all_broken(error):
            return
    except hypothesis_errors.HypothesisException as error:
        raise UsageError(f"inputs must be a strategy that Hypothesis can draw from; {brief(error)}") from error
    except BaseException as error:
        if not _all_broken(error):
            raise


def _all_broken(error: BaseException) -> bool:
    """Return whether a group of exceptions (3.11, or its backport) contains nothing but ours."""
    parts = getattr(error, "exceptions", None)
    return isinstance(error, _Broken) if parts is None else all(map(_all_broken, parts))


def _size(example: Example) -> tuple[int, int]:
    """Return how large an example is to a reader: elements, then the length of its text."""
    return example.numel, len(example.code())


def _bounded_log(value: float) -> float:
    return math.log2(min(max(value, 2.0**-200), 2.0**200)) if value == value else 0.0


def _is_range(domain: object) -> bool:
    if not isinstance(domain, (tuple, list)) or len(domain) != 2:
        return False
    numbers = all(is_number(bound) and math.isfinite(bound) for bound in domain)
    return numbers and bool(domain[0] < domain[1])
