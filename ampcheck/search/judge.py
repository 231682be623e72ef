"""What a test calls: search, judge, tell."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ampcheck.autocast.device import place
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import load_settings
from ampcheck.core.run import Coverage, Run, Table, merge, verify
from ampcheck.core.subject import Subject, name_of
from ampcheck.numerics import arm_name, native_format
from ampcheck.numerics.compiled import measure_graphs
from ampcheck.search.arms import Arms, Example, as_example
from ampcheck.search.blame import locate
from ampcheck.search.checks import check_property
from ampcheck.search.compiling import KINDS, Compiled
from ampcheck.search.evaluate import Looker
from ampcheck.search.headroom import plain
from ampcheck.search.invariances import Invariance
from ampcheck.search.loop import Hunt, hunt
from ampcheck.search.reproduce import write_test
from ampcheck.search.stats import Breaking, Peak, PropertyStats
from ampcheck.strategies import as_code
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.unsupported import cannot_run

if TYPE_CHECKING:
    from hypothesis import strategies as st
    from hypothesis.database import ExampleDatabase

DTYPES = ("float16", "bfloat16")


@restoring
def assert_amp_property(
    model: Callable[..., Any],
    *,
    inputs: st.SearchStrategy[Any],
    dtype: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    device: str = "cpu",
    domain: tuple[float, float] | None = None,
    compile: bool = False,
    invariances: Sequence[Invariance] = (),
    examples: int = 200,
    seconds: float = 60.0,
    seed: int = 0,
    database: str | os.PathLike[str] | ExampleDatabase | None = None,
    reproduce: str | os.PathLike[str] | None = None,
    name: str = "",
) -> Run:
    """Search for inputs at which `model` breaks in 16 bits, and make what is found small.

    model: a module or any function. inputs: a Hypothesis strategy (`ampcheck.strategies` has fitting ones) for a
    tensor, a tuple of arguments, or `(args, kwargs)`; it is the declared domain. Inputs or weights in 16 bits are
    judged as they are, in their dtype; others under autocast to each `dtype`, by default float16 and bfloat16.

    Required of every input: finite in float64 means finite here; the result lies within what rounding explains
    (`ampcheck.search.rounding`); `compile`: compiled code is no worse than eager mode, compiled once and for at most
    four kinds of shapes; `invariances`: `BatchOrder`, `Scale`, `Shift`, `Padding`, `Declared` hold.

    domain: bounds of the floating inputs, within which gradient ascent looks for larger values. It is a promise of its
    own: a lone input leaves the range of the strategy for it; of several, each stays in the range drawn for it as well.
    examples, seconds: the budget of each dtype; to make smaller what was found may take half of the seconds more.
    seed: the same seed gives the same search, as long as the seconds suffice. database: a folder in which Hypothesis
    keeps what failed. reproduce: a folder in which a test of its own is written for each failure.

    Returns the run. Raises `AssertionError` with every failure, `UsageError` for input that cannot be judged. Inside a
    test that is itself under `@given`, Hypothesis asks for `suppress_health_check=[HealthCheck.nested_given]` there.
    """
    __tracebackhide__ = True
    _require(model, inputs, domain, examples, seconds)
    _require_more(seed, invariances, reproduce)
    placement = place(device)
    title = name or name_of(model)
    with placement.entered():
        first = _first(inputs)
        subject = Subject((model, first.args, dict(first.kwargs)), name=title)
        wanted, native = _dtypes(subject, dtype)
        runs = []
        for low in wanted:
            arms = Arms(subject, low, device=placement.device, native=native)
            compiled = Compiled(arms) if compile else None
            looker = Looker(arms, invariances, compiled)
            with measure_graphs() if compile else nullcontext() as graphs:
                found = hunt(
                    looker,
                    inputs,
                    examples=examples,
                    seconds=seconds,
                    seed_=seed,
                    database=database,
                    domain=domain,
                )
            stats = _stats(looker, found, title, examples, domain)
            if compiled is not None and not compiled.examples:
                stats = replace(stats, skipped={"property-compiled": "no example ran compiled", **stats.skipped})
            if graphs is not None:
                stats = replace(stats, graphs=graphs.count)
                if not graphs.count and "property-compiled" not in stats.skipped:
                    reason = graphs.unsupported or "torch.compile made no graph"
                    if arms.draws:
                        reason = "the model draws random numbers; what makes them the same in each run is not compiled"
                    stats = replace(stats, skipped={**stats.skipped, "property-compiled": reason})
            if reproduce is not None:
                written = tuple(
                    write_test(reproduce, model, looker, one, *found.smallest[one.problem.kind], seed)
                    for one in stats.breakings
                )
                stats = replace(stats, breakings=written)
            runs.append(property_run(stats))
    run = replace(merge(runs), environment=environment(placement.device), title=f"search of {title}")
    return verify(run)


def property_run(stats: PropertyStats) -> Run:
    """The run of one search."""
    findings = check_property(stats, load_settings().limits.headroom)
    rows = [
        (one.problem.kind, one.code, one.problem.low, one.problem.wide, one.problem.allowed, one.found_after, one.calls)
        for one in stats.breakings
    ]
    columns = ("property", "smallest input", "low precision", "float64", "allowed error", "found after", "calls")
    tables = (Table(f"What breaks {stats.subject} [{stats.arm}]", columns, rows, "property-accuracy"),) if rows else ()
    return Run(findings=tuple(findings), coverage=stats.coverage, tables=tables)


def _stats(looker: Looker, found: Hunt, name: str, budget: int, domain: tuple[float, float] | None) -> PropertyStats:
    arms, compiled = looker.arms, looker.compiled
    asked, skipped = ["property-finite", "property-accuracy"], {}
    unseen = {
        f"examples that float32 or the judge refused: {found.outside_reason}": found.outside,
        "elements that are not finite in float64": found.undefined,
    }
    unseen |= arms.dropped
    unseen |= {
        f"{op} has no 16-bit kernel on this CPU: run in float32 and rounded": n for op, n in arms.substituted.items()
    }
    if compiled is not None:
        asked.append("property-compiled")
        unseen[f"examples of shapes beyond the {KINDS} kinds that are compiled for"] = compiled.left_out
        if compiled.missing:
            skipped["property-compiled"] = f"not judged: {cannot_run(compiled.missing)}"
    if looker.invariances:
        asked.append("property-invariance")
    seen = {
        "examples": found.examples - found.outside,
        "steps of gradient ascent": found.climbs,
        "elements": found.elements,
    }
    breakings = tuple(
        Breaking(
            problem,
            as_code(plain(one)),
            found.found_after[kind],
            found.calls,
            locate(arms, one, problem),
            climbed=kind in found.climbed,
        )
        for kind, (one, problem) in found.smallest.items()
    )
    return PropertyStats(
        subject=name,
        arm=arm_name(arms.dtype, arms.native, compiled=False),
        format=format_of(arms.dtype).name,
        device=arms.device,
        reference=arms.how.partition(",")[0],
        examples=found.examples,
        budget=budget,
        seconds=found.seconds,
        stopped=found.stopped,
        outside=found.outside,
        elements=found.elements,
        undefined=found.undefined,
        ratio=found.ratio,
        flushed=found.flushed,
        climbs=found.climbs,
        compiled_examples=compiled.examples if compiled is not None else 0,
        invariances={one.name: looker.held_against[one.name] for one in looker.invariances},
        domain=_domain(found, domain),
        peak=found.headroom.largest() if found.headroom is not None else Peak(),
        overflow=found.headroom.overflow if found.headroom is not None else None,
        lacking=found.lacking,
        cut=found.cut,
        unsteady=looker.unsteady or "",
        breakings=breakings,
        asked=tuple(asked),
        skipped=skipped,
        outside_reason=found.outside_reason,
        coverage=Coverage({k: v for k, v in seen.items() if v}, {k: v for k, v in unseen.items() if v}),
    )


def _domain(found: Hunt, domain: tuple[float, float] | None) -> str:
    low = min((bounds[0] for bounds in found.ranges.values()), default=math.inf)
    high = max((bounds[1] for bounds in found.ranges.values()), default=-math.inf)
    if domain is not None and len(found.ranges) == 1:
        low, high = domain
    if not low <= high:
        return "with the inputs drawn"
    return f"within |x| <= {high:g}" if low == -high else f"within {low:g} <= x <= {high:g}"


def _require(model: Any, inputs: Any, domain: tuple[float, float] | None, examples: int, seconds: float) -> None:
    from hypothesis import strategies as st

    if not callable(model):
        raise UsageError(f"assert_amp_property needs a module or a function; found {type(model).__name__}")
    if not isinstance(inputs, st.SearchStrategy):
        raise UsageError(
            "inputs must be a Hypothesis strategy, such as ampcheck.strategies.tensors('float16'); "
            f"found {type(inputs).__name__}"
        )
    if domain is not None and not _is_range(domain):
        raise UsageError(f"domain is (low, high), two finite numbers with low < high; found {domain!r}")
    counted = isinstance(examples, int) and not isinstance(examples, bool) and examples >= 1
    if not counted or not (isinstance(seconds, (int, float)) and seconds > 0):
        raise UsageError(f"a search needs at least one example and some seconds; found {examples!r} and {seconds!r}")


def _is_range(domain: Any) -> bool:
    if not isinstance(domain, (tuple, list)) or len(domain) != 2:
        return False
    numbers = all(isinstance(one, (int, float)) and math.isfinite(one) for one in domain)
    return numbers and bool(domain[0] < domain[1])


def _require_more(seed: Any, invariances: Any, reproduce: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"seed must be an integer; found {seed!r}")
    if not isinstance(invariances, (tuple, list)):
        raise UsageError(f"invariances must be a tuple or list, such as (BatchOrder(),); found {invariances!r}")
    for one in invariances:
        called = callable(getattr(one, "changed", None)) and callable(getattr(one, "undone", None))
        if isinstance(one, type) or not called or not hasattr(one, "name"):
            raise UsageError(
                f"an invariance must be one of BatchOrder(), Scale(), Shift(), Padding(), Declared(); found {one!r}"
            )
    if reproduce is None:
        return
    if not isinstance(reproduce, (str, os.PathLike)):
        raise UsageError(f"reproduce must be the path of a folder; found {reproduce!r}")
    if os.path.exists(reproduce) and not os.path.isdir(reproduce):
        raise UsageError(f"reproduce must be a folder; {os.fspath(reproduce)} is a file")


def _first(inputs: st.SearchStrategy[Any]) -> Example:
    """The simplest example, which tells what the model is called with."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis.errors import HypothesisException, NoSuchExample

    quick = settings(
        max_examples=1, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None
    )
    try:
        return as_example(find(inputs, lambda _: True, settings=quick))
    except (NoSuchExample, HypothesisException) as error:
        raise UsageError(f"inputs must be a strategy that Hypothesis can draw from; {brief(error)}") from error


def _dtypes(
    subject: Subject, dtype: str | torch.dtype | Sequence[str | torch.dtype] | None
) -> tuple[list[torch.dtype], bool]:
    """What to judge in, and whether the model is kept in it already."""
    native = native_format(subject)
    named = [] if dtype is None else [dtype] if isinstance(dtype, (str, torch.dtype)) else list(dtype)
    names = [format_of(one).name for one in named] or ([] if native is not None else list(DTYPES))
    if unknown := [one for one in names if one not in DTYPES]:
        raise UsageError(f"a search judges {' and '.join(DTYPES)}; found {unknown[0]}")
    if native is None:
        return [getattr(torch, one) for one in dict.fromkeys(names)], False
    if set(names) - {format_of(native).name}:
        raise UsageError(
            f"{subject.name} has inputs or weights in {format_of(native).name} and is judged in that alone; "
            f"dtype asks for {', '.join(names)}"
        )
    return [native], True
