"""Measure how a subject starts and judge it: `assert_startup`, and the run with its tables."""

from __future__ import annotations

from typing import Any

from ampcheck.core.run import Coverage, Run, Scalar, Table, verify
from ampcheck.speed.interval import paired_ratio
from ampcheck.speed.startup.breakeven import break_even
from ampcheck.speed.startup.checks import StartupLimits, check_startup
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.startup.stats import EAGER, StartupArm, StartupStats
from ampcheck.torchtools.restore import restoring


@restoring
def assert_startup(target: str, limits: StartupLimits | None = None, **settings: Any) -> Run:
    """Assert that a subject starts as it should: warm caches and artifacts are used, and the limits hold.

    settings: as of `measure_startup`. Returns the run; raises `AssertionError` with every failure, `UsageError` for
    what cannot be measured.
    """
    __tracebackhide__ = True
    return verify(startup_run(measure_startup(target, **settings), limits))


def startup_run(stats: StartupStats, limits: StartupLimits | None = None) -> Run:
    """The findings with their evidence: what each arm costs, and what it compiled."""
    launches = [launch for arm in stats.arms for launch in arm.launches]
    seen = {
        "launches": len(launches),
        "graphs": sum(len(one.graph.graphs) for one in launches if one.graph is not None),
        "cache lookups": sum(len(one.lookups) for one in launches),
    }
    unseen = {f"{name}: {reason}": 1 for name, reason in stats.left_out.items()}
    return Run(
        environment=stats.environment,
        findings=tuple(check_startup(stats, limits)),
        coverage=Coverage(seen, unseen),
        tables=(_costs(stats), _compiled(stats)),
        title=f"start of {stats.subject}",
    )


def _costs(stats: StartupStats) -> Table:
    columns = (
        "start", "launches", "import, s", "to first step, s", "compiler, s", "second step, s", "steady, s",
        "times faster than eager", "peak, MiB", "cost, s", "has paid after",
    )  # fmt: skip
    return Table(
        "What a start costs",
        columns,
        tuple(_cost(stats, arm) for arm in stats.arms),
        check="start-up",
        note="Seconds are medians over the launches. To first step: building, compilation and the step itself, with "
        "all imports of the compiler. Cost: what the start takes beyond steps in the steady state, less the same of "
        "eager. Peak: tensors of one step beyond what is held when it begins; warm caches and artifacts run the same "
        "code as the cold start, so that the three are measured as one.",
    )


def _cost(stats: StartupStats, arm: StartupArm) -> tuple[Scalar, ...]:
    launches = arm.launches
    told = [launch.compiling for launch in launches if launch.compiling is not None]
    row: tuple[Scalar, ...] = (
        arm.name if arm.name == EAGER else f"{arm.name} ({arm.way})",
        len(launches),
        arm.typical([launch.imported + launch.loaded for launch in launches]),
        arm.typical([launch.first for launch in launches]),
        arm.typical(told) if told else None,
        arm.typical([launch.passes[1] for launch in launches if len(launch.passes) > 1] or [arm.steady]),
        arm.steady,
    )
    if arm.name == EAGER:
        return *row, 1.0, _mib(arm.memory), 0.0, None
    times = stats.times(arm)
    ratio = paired_ratio(*times) if times else None
    shown = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if ratio is not None else None
    even = break_even(stats, arm)
    cost = arm.typical(stats.cost(arm))
    return *row, shown, _mib(arm.memory), cost, str(even) if even is not None else None


def _compiled(stats: StartupStats) -> Table:
    columns = (
        "start", "graphs", "graph breaks", "recompilations", "kernels", "files built", "FX graph hits",
        "FX graph misses", "AOTAutograd hits", "AOTAutograd misses", "bypassed", "artifacts saved", "artifacts loaded",
    )  # fmt: skip
    rows: list[tuple[Scalar, ...]] = []
    for arm in stats.arms:
        if arm.name == EAGER:
            continue
        one = arm.launches[0]
        graphs: list[Scalar] = [None, None, None]
        if one.graph is not None:
            graphs = [len(one.graph.graphs), sum(b.times for b in one.graph.breaks), len(one.graph.recompiles)]
        counts = [one.count(result, cache) for cache in ("FX graph cache", "AOTAutograd cache") for result in _ENDED]
        saved = f"{one.saved} ({one.saved_bytes / 1024:,.0f} KiB)" if one.saved else 0
        rows.append((arm.name, *graphs, one.kernels, one.binaries, *counts, one.count("bypass"), saved, one.taken))
    note = (
        "Of the first launch of each. These are the same in each run; seconds are not. Files built: machine code that "
        "a C++ compiler made; a graph that is found in a cache may still need its kernels."
    )
    return Table("What a start compiles", columns, tuple(rows), check="start-up", note=note)


_ENDED = ("hit", "miss")


def _mib(count: int | None) -> float | None:
    return count / 2**20 if count is not None else None
