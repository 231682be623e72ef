"""`assert_property`: search for inputs that break a model, judge and report them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, NoSuchExample

from ampcheck.autocast.asked import cuda_where_asked
from ampcheck.autocast.device import place
from ampcheck.checks import findings
from ampcheck.core.arguments import LOW, DType, parse_dtypes
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Run, Table, merge
from ampcheck.core.settings import resolve_limits
from ampcheck.core.subject import Subject, name_of
from ampcheck.numerics import native_format
from ampcheck.numerics.measure import positive, substituted
from ampcheck.outcome.raising import verify
from ampcheck.parity.circumstances import Circumstance
from ampcheck.parity.example import Example, as_example
from ampcheck.parity.invariances import as_circumstance
from ampcheck.records.property import PropertyStats
from ampcheck.search.compiling import KINDS, Compiled
from ampcheck.search.evaluate import Evaluator
from ampcheck.search.loop import Search, SearchOptions
from ampcheck.search.reproduce import write_test
from ampcheck.search.runner import Runner
from ampcheck.torchtools.restore import restoring


@cuda_where_asked
def assert_property(
    model: Callable[..., Any],
    inputs: st.SearchStrategy[Any],
    *,
    device: str | None = None,
    dtype: DType | Sequence[DType] | None = None,
    compile: bool = True,
    options: SearchOptions | None = None,
    limits: Limits | None = None,
    name: str = "",
    invariances: Sequence[Circumstance] = (),
) -> Run:
    """Search for inputs at which `model` breaks in 16 bits, and minimise them.

    model: a module or any function. inputs: a Hypothesis strategy (`ampcheck.strategies` has fitting ones) for a
    tensor, a tuple of arguments, or `(args, kwargs)`; it is the declared domain. A model with inputs or weights in 16
    bits is judged in that dtype; any other under autocast to each `dtype`, by default float16 and bfloat16.

    For every input, a result that is finite in float64 must be finite and within what rounding explains
    (`ampcheck.shadow.bounds`). compile: compiled code must keep the bounds that eager mode keeps; it is compiled for at
    most four kinds of shapes. invariances: `BatchOrder`, `Scale`, `Shift`, `Padding`, `Declared` that must hold, and
    circumstances of `ampcheck.parity`, such as `Batch`, in which the model must give the same.

    Returns the run. Raises `AssertionError` with every failure, `UsageError` for input that cannot be judged. A test
    that is itself under `@given` needs `suppress_health_check=[HealthCheck.nested_given]`.
    """
    __tracebackhide__ = True
    return verify(
        judge_property(
            model,
            inputs,
            device=device or "cpu",
            dtype=dtype,
            compile=compile,
            options=options,
            limits=limits,
            name=name,
            invariances=invariances,
        )
    )


@restoring
def judge_property(
    model: Callable[..., Any],
    inputs: st.SearchStrategy[Any],
    *,
    device: str = "cpu",
    dtype: DType | Sequence[DType] | None = None,
    compile: bool = True,
    options: SearchOptions | None = None,
    limits: Limits | None = None,
    name: str = "",
    invariances: Sequence[Circumstance] = (),
    progress: Progress = silent,
) -> Run:
    """The run of a search, which raises nothing for a failure. Parameters as of `assert_property`."""
    circumstances = _required(model, inputs, invariances)
    options = options or SearchOptions()
    placement = place(device)
    title = name or name_of(model)
    bounds, runs = resolve_limits(limits), []
    with placement.entered():
        first = _first(inputs)
        subject = Subject((model, first.args, dict(first.kwargs)), name=title)
        wanted, native = _dtypes(subject, dtype)
        for done, low in enumerate(wanted):
            progress(f"{title}: {format_of(low).name}", done, len(wanted))
            runner = Runner(subject, low, device=placement.device, native=native)
            compiled = Compiled(runner) if compile else None
            search = Search(Evaluator(runner, circumstances, compiled))
            with compiled.measured() if compiled is not None else nullcontext():
                search.run(inputs, options)
            stats = _stats(search, options)
            if options.reproduce is not None:
                written = partial(write_test, options.reproduce, model, search.evaluator, seed=options.seed)
                breakings = tuple(map(written, stats.breakings))
                stats = replace(stats, breakings=breakings)
            runs.append(property_run(stats, bounds))
    return replace(merge(runs), environment=environment(placement.device), title=f"search of {title}")


def property_run(stats: PropertyStats, limits: Limits) -> Run:
    """The run of one search."""
    rows = [
        (b.problem.kind, b.example.code(), b.problem.low, b.problem.exact, b.problem.limit, b.found_after, stats.calls)
        for b in stats.breakings
    ]
    columns = ("property", "smallest input", "low precision", "float64", "limit", "found after", "calls")
    tables = (Table(f"What breaks {stats.name}", columns, rows, "property-accuracy"),) if rows else ()
    return Run(
        findings=tuple(findings(stats, limits, None if stats.breakings or stats.elements else ("coverage",))),
        coverage=stats.coverage,
        tables=tables,
    )


def _stats(search: Search, options: SearchOptions) -> PropertyStats:
    stats, evaluator = search.stats, search.evaluator
    runner, compiled = evaluator.runner, evaluator.compiled
    asked, skipped = ["property-finite", "property-accuracy"], {}
    unseen = {
        f"examples that float32 refuses too: {search.outside_reason}": stats.outside,
        "elements that are not finite in float64": search.undefined,
        **runner.dropped,
        **substituted(runner.substituted),
    }
    if compiled is not None:
        asked.append("property-compiled")
        unseen[f"examples of shapes beyond the {KINDS} kinds that are compiled for"] = compiled.left_out
        unseen["outputs of compiled code beyond their bounds that a decision near a tie explains"] = compiled.ties
        if reason := compiled.not_judged():
            skipped["property-compiled"] = reason
    if evaluator.invariances:
        asked.append("property-invariance")
    seen = {
        "examples": stats.examples - stats.outside,
        "steps of gradient ascent": stats.climbs,
        "elements": stats.elements,
    }
    return replace(
        stats,
        name=runner.name,
        format=format_of(runner.dtype).name,
        budget=options.examples,
        compiled_examples=compiled.examples if compiled is not None else 0,
        invariances={invariance.name: evaluator.counts[invariance.name] for invariance in evaluator.invariances},
        domain=_domain(search.ranges, options.domain),
        calls=search.calls,
        breakings=tuple(search.smallest.values()),
        asked=tuple(asked),
        skipped=skipped,
        coverage=Coverage(positive(seen), positive(unseen)),
    )


def _domain(ranges: Mapping[str, tuple[float, float]], domain: tuple[float, float] | None) -> str:
    low = min((bounds[0] for bounds in ranges.values()), default=math.inf)
    high = max((bounds[1] for bounds in ranges.values()), default=-math.inf)
    if domain is not None and len(ranges) == 1:
        low, high = domain
    if not low <= high:
        return "with the inputs drawn"
    return f"within |x| <= {high:g}" if low == -high else f"within {low:g} <= x <= {high:g}"


def _required(model: object, inputs: object, invariances: object) -> list[Circumstance]:
    """The circumstances of a search, whose arguments are what they must be."""
    if not callable(model):
        raise UsageError(f"assert_property needs a module or a function; found {type(model).__name__}")
    if not isinstance(inputs, st.SearchStrategy):
        raise UsageError(
            "inputs must be a Hypothesis strategy, such as ampcheck.strategies.tensors('float16'); "
            f"found {type(inputs).__name__}"
        )
    if not isinstance(invariances, (tuple, list)):
        raise UsageError(f"invariances must be a tuple or list, such as (BatchOrder(),); found {invariances!r}")
    known = [(one, as_circumstance(one)) for one in invariances]
    if wrong := [one for one, circumstance in known if circumstance is None or circumstance.judges]:
        raise UsageError(
            "an invariance must be one of BatchOrder(), Scale(), Shift(), Padding(), Declared(), or a circumstance "
            f"of ampcheck.parity, such as Batch(); found {wrong[0]!r}"
        )
    return [circumstance for _, circumstance in known if circumstance is not None]


def _first(inputs: st.SearchStrategy[Any]) -> Example:
    """The simplest example, which shows what the model is called with."""
    quick = settings(
        max_examples=1, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None
    )
    try:
        return as_example(find(inputs, lambda _: True, settings=quick))
    except (NoSuchExample, HypothesisException) as error:
        raise UsageError(f"inputs must be a strategy that Hypothesis can draw from; {brief(error)}") from error


def _dtypes(subject: Subject, dtype: DType | Sequence[DType] | None) -> tuple[list[torch.dtype], bool]:
    """The dtypes to judge in, and whether the model has 16-bit inputs or weights itself."""
    native = native_format(subject)
    if native is None:
        return [getattr(torch, name) for name in parse_dtypes(LOW if dtype is None else dtype)], False
    names = [] if dtype is None else parse_dtypes(dtype)
    if set(names) - {format_of(native).name}:
        raise UsageError(
            f"{subject.name} has inputs or weights in {format_of(native).name} and is judged in that alone; "
            f"dtype names {', '.join(names)}"
        )
    return [native], True
