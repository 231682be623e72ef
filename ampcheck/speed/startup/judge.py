"""Measure and judge how a subject starts; its run with tables."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from ampcheck.checks import findings
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.speed import WHERE
from ampcheck.core.limits import GraphLimits, StartupLimits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table
from ampcheck.records.startup import (
    AOT,
    COLD,
    EAGER,
    FX,
    CompileCost,
    StartupArm,
    StartupStats,
)
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.startup.stats import paid_after
from ampcheck.speed.verdict import paired_ratio
from ampcheck.torchtools.restore import restoring


def check_startup(stats: StartupStats, limits: StartupLimits | None = None) -> list[Finding]:
    """Caches, the graphs of the cold start, peak memory, and the time of compilation if it is limited."""
    limits, cold = limits or StartupLimits(), stats.arm(COLD)
    if cold is None or not cold.launches:
        message = "a start must be measured to be judged, and there is none with empty caches"
        return [COVERAGE.fail(stats.subject, message, where=WHERE)]
    judged = findings(stats, limits)
    if (graph := cold.launches[0].graph) is not None:
        graph = replace(graph, subject=stats.subject)
        of_graphs = GraphLimits(max_breaks=limits.breaks, max_recompiles=limits.recompiles)
        judged += findings(graph, of_graphs, ("graph-break", "recompile", "eager-fallback"))
    cost = CompileCost(stats.subject, stats.cost(cold), stats.cost_range(cold), paid_after(stats, cold))
    return [*judged, *findings(cost, limits)]


@restoring
def judge_startup(
    target: str,
    options: SpeedOptions | None = None,
    *,
    limits: StartupLimits | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Run:
    """The run of a start, which raises nothing for a failure. Parameters as of `measure_startup`."""
    return startup_run(measure_startup(target, options, device=device, progress=progress), limits)


def startup_run(stats: StartupStats, limits: StartupLimits | None = None) -> Run:
    """The findings with their evidence: the cost of each arm, and what it compiled."""
    launches = [launch for arm in stats.arms for launch in arm.launches]
    seen = {
        "launches": len(launches),
        "graphs": sum(len(launch.graph.graphs) for launch in launches if launch.graph is not None),
        "cache lookups": sum(len(launch.lookups) for launch in launches),
    }
    return Run(
        environment=stats.environment,
        findings=tuple(check_startup(stats, limits)),
        coverage=Coverage(seen, {f"{name}: {reason}": 1 for name, reason in stats.left_out.items()}),
        tables=(_costs(stats), _compiled(stats)),
        title=f"start of {stats.subject}",
    )


def _costs(stats: StartupStats) -> Table:
    columns = (
        "start", "launches", "import, s", "to first step, s", "compiler, s", "second step, s", "steady, s",
        "times faster than eager", "peak, MiB", "cost, s", "has paid after",
    )  # fmt: skip
    note = (
        "Seconds are medians over the launches. To first step: building, compilation and the step itself, with all "
        "imports of the compiler. Cost: what the start takes beyond steps in the steady state, less the same of eager. "
        "Peak: tensors of one step beyond those at its beginning; warm caches and artifacts run the same code as the "
        "cold start, so that the three are measured once."
    )
    rows = tuple(_cost(stats, arm) for arm in stats.arms)
    return Table("Cost of a start", columns, rows, check="start-up", note=note)


def _cost(stats: StartupStats, arm: StartupArm) -> tuple[Scalar, ...]:
    compiling = [launch.compiling for launch in arm.launches if launch.compiling is not None]
    row: tuple[Scalar, ...] = (
        arm.name if arm.name == EAGER else f"{arm.name} ({arm.config})",
        len(arm.launches),
        median(launch.imported + launch.loaded for launch in arm.launches),
        arm.first,
        median(compiling) if compiling else None,
        median([launch.passes[1] for launch in arm.launches if len(launch.passes) > 1] or [arm.timed.steady]),
        arm.timed.steady,
    )
    memory = arm.timed.memory
    peak = memory / 2**20 if memory is not None else None
    if arm.name == EAGER:
        return *row, 1.0, peak, 0.0, None
    times, paid = stats.times(arm), paid_after(stats, arm)
    ratio = str(paired_ratio(*times)) if times else None
    return *row, ratio, peak, median(stats.cost(arm)), str(paid) if paid is not None else None


def _compiled(stats: StartupStats) -> Table:
    columns = (
        "start", "graphs", "graph breaks", "recompilations", "kernels", "files built", "FX graph hits",
        "FX graph misses", "AOTAutograd hits", "AOTAutograd misses", "bypassed", "artifacts saved", "artifacts loaded",
    )  # fmt: skip
    rows: list[tuple[Scalar, ...]] = []
    for arm in stats.arms:
        if arm.name == EAGER:
            continue
        launch = arm.launches[0]
        graphs: list[Scalar] = [None, None, None]
        if (graph := launch.graph) is not None:
            graphs = [len(graph.graphs), sum(each.times for each in graph.breaks), len(graph.recompiles)]
        lookups = [launch.count(result, cache) for cache in (FX, AOT) for result in ("hit", "miss")]
        saved = f"{launch.saved} ({launch.saved_bytes / 1024:,.0f} KiB)" if launch.saved else 0
        counts = (*graphs, launch.kernels, launch.binaries, *lookups, launch.count("bypass"))
        rows.append((arm.name, *counts, saved, launch.taken))
    note = (
        "Of the first launch of each. These are the same in each run; seconds are not. Files built: machine code that "
        "a C++ compiler built; a graph that is found in a cache may still need its kernels."
    )
    return Table("Compilation of a start", columns, tuple(rows), check="start-up", note=note)
