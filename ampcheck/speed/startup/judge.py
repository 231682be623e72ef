"""Measure and judge how a subject starts; its run with tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from ampcheck.catalog.speed import COMPILE_TIME, PEAK_MEMORY, START_UP
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.compile import eager_fallback, graph_break, recompile
from ampcheck.core.arguments import parse_number
from ampcheck.core.check import Evidence
from ampcheck.core.limits import GraphLimits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table, Verdict
from ampcheck.core.text import counted, listed
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.startup.stats import (
    AOT,
    ARTIFACTS,
    CACHED,
    COLD,
    EAGER,
    ENOUGH,
    FX,
    WARM,
    Launch,
    Lookup,
    StartupArm,
    StartupStats,
)
from ampcheck.speed.verdict import WHERE, paired_ratio
from ampcheck.torchtools.restore import restoring

SLACK = 2**20
"""Bytes that a step may need beyond the limit of memory."""

_NAMED = 4

_OFF = "leave the caches on: TORCHINDUCTOR_FORCE_DISABLE_CACHES and the settings named here switch them off"
_BUILT = (
    "artifacts contain graphs and Triton's kernels, and no machine code that a C++ compiler built for a CPU: keep the "
    "folder TORCHINDUCTOR_CACHE_DIR between jobs instead"
)
_REFUSED = "PyTorch refuses to cache such a graph, for the reason it gives: remove what it names from the model"
_DIFFERS = (
    "make the model the same in each process: no object whose text or order differs from run to run in its code, "
    "constants and settings; the same PyTorch, device and settings when it is saved and loaded"
)
_MEMORY = (
    "look for activations that the compiled graph saves and eager frees: torch._functorch.config."
    "activation_memory_budget below 1 recomputes more; CUDA graphs keep a pool of their own"
)
_FASTER = (
    "compile repeated blocks instead of the whole (module.compile() on each), keep the cache folder or ship artifacts "
    "(torch.compiler.load_cache_artifacts), and leave max-autotune out where calls are few"
)


@dataclass(frozen=True, slots=True)
class StartupLimits:
    """Requirements of a start; None requires nothing.

    compile: seconds that compilation with empty caches may cost. calls: after how many it has paid at the latest.
    memory: a compiled step's peak at most so many times the eager one's, with 1 MiB of slack; bytes: at most so many.
    breaks, recompiles: as of `GraphLimits`.
    """

    compile: float | None = None
    calls: float | None = None
    memory: float | None = 1.1
    bytes: float | None = None
    breaks: int = 0
    recompiles: int = 0

    def __post_init__(self) -> None:
        for name in ("compile", "calls", "memory", "bytes"):
            if (limit := getattr(self, name)) is not None:
                parse_number(limit, f"{name} of StartupLimits")


def check_startup(stats: StartupStats, limits: StartupLimits | None = None) -> list[Finding]:
    """Caches, the graphs of the cold start, peak memory, and the time of compilation if it is limited."""
    limits, cold = limits or StartupLimits(), stats.arm(COLD)
    if cold is None or not cold.launches:
        message = "a start must be measured to be judged, and there is none with empty caches"
        return [COVERAGE.fail(stats.subject, message, where=WHERE)]
    findings = [_check_caches(stats, name, cold) for name in CACHED]
    if (graph := cold.launches[0].graph) is not None:
        graph = replace(graph, subject=stats.subject)
        of_graphs = GraphLimits(max_breaks=limits.breaks, max_recompiles=limits.recompiles)
        for check in (graph_break, recompile, eager_fallback):
            findings += check.check(graph, of_graphs)
    findings += _check_memory(stats, cold, limits)
    if limits.compile is not None:
        findings.append(_check_cost(stats, cold, limits.compile))
    if limits.calls is not None:
        findings.append(_check_break_even(stats, cold, limits.calls))
    return findings


# Caches ----------------------------------------------------------------------------------------------------------


def _check_caches(stats: StartupStats, name: str, cold: StartupArm) -> Finding:
    """A start with warm caches, or with artifacts, compiles no graph again."""
    subject, arm = stats.subject, stats.arm(name)
    start = "a start with warm caches" if name == WARM else "a start with loaded artifacts"
    if arm is None:
        reason = stats.left_out.get(name, "it was not measured")
        if name == ARTIFACTS and "saved nothing" in reason:
            message = f"{start} was not judged: {reason}{_reasons(cold.launches)}"
            return START_UP.fail(subject, message, where=WHERE, hint=_OFF)
        return START_UP.skip(subject, f"{start} was not judged: {reason}", where=WHERE)
    launches = arm.launches
    if untold := next((launch.untold for launch in launches if launch.untold), ""):
        return START_UP.skip(subject, f"{start} was not judged: {untold}", where=WHERE)
    lookups = [lookup for launch in launches for lookup in launch.lookups]
    graphs = sum(len(launch.graph.graphs) for launch in launches if launch.graph is not None)
    fx = [lookup for lookup in lookups if lookup.cache == FX]
    missed = [lookup for lookup in fx if lookup.result != "hit"]
    traced = [lookup for lookup in lookups if lookup.result != "hit"]
    hits = len(lookups) - len(traced)
    seconds = f"; first step after {arm.first:.3g} s, with empty caches {cold.first:.3g} s"
    seconds += f" ({counted(len(launches), 'launches')})"
    if not graphs:
        message = f"{start} must use what was compiled before, but nothing was compiled in it"
        hint = "see eager-fallback and graph-break: it ran eager"
        return START_UP.fail(subject, message, where=WHERE, hint=hint)
    if missed or not hits:
        cause = f"{counted(graphs, 'graphs')} asked no cache"
        if missed:
            cause = f"{len(missed)} of {counted(len(fx), 'graphs')} {_was(missed)} not in the cache"
        message = f"{start} must compile nothing again, but {cause}{_reasons(launches)}{_key(launches, cold)}{seconds}"
        hint = _REFUSED if any(lookup.result == "bypass" for lookup in lookups) else _DIFFERS
        hint = _OFF if any(launch.off for launch in launches) else hint
        evidence = Evidence(where=WHERE, observed=len(missed) or graphs, limit=0, unit="graphs", hint=hint)
        return START_UP.fail(subject, message, **evidence)
    if built := max(launch.binaries for launch in launches):
        message = (
            f"{start} must compile nothing again; its {counted(hits, 'lookups')} hit, but a C++ compiler built "
            f"{counted(built, 'files')} of machine code again{seconds}"
        )
        return START_UP.warn(subject, message, where=WHERE, observed=built, limit=0, unit="files", hint=_BUILT)
    if traced:
        message = f"{start} compiled nothing again, but {counted(len(traced), 'graphs')} {_was(traced)} traced again"
        message += _reasons(launches) + seconds
        return START_UP.warn(subject, message, where=WHERE, observed=len(traced), limit=0, unit="graphs")
    message = f"{start} compiled nothing again: {hits} of {counted(len(lookups), 'lookups')} hit{seconds}"
    return START_UP.passed(subject, message, len(lookups), where=WHERE, observed=0, limit=0, unit="graphs")


def _was(items: list[Lookup]) -> str:
    return "was" if len(items) == 1 else "were"


def _reasons(launches: Iterable[Launch]) -> str:
    """Settings that switch caches off, and PyTorch's reasons."""
    launches = tuple(launches)
    off = dict.fromkeys(name for launch in launches for name in launch.off)
    reasons = dict.fromkeys(lookup.reason for launch in launches for lookup in launch.lookups if lookup.reason)
    return "".join(f": {listed(names, _NAMED)}" for names in (off, reasons) if names)


def _key(launches: Iterable[Launch], cold: StartupArm) -> str:
    """The parts of the keys that differ between a lookup that missed and the cold start."""
    written = [lookup for lookup in cold.launches[0].lookups if lookup.cache == FX]
    different: dict[str, None] = {}
    for launch in launches:
        lookups = [lookup for lookup in launch.lookups if lookup.cache == FX]
        for now, before in zip(lookups, written, strict=False):
            for part in dict.fromkeys((*before.parts, *now.parts)) if now.result == "miss" else ():
                values = before.parts.get(part, "none"), now.parts.get(part, "none")
                if values[0] != values[1]:
                    different[f"{part} ({values[0]}, now {values[1]})"] = None
    return f"; the key differs in {listed(different, _NAMED)}" if different else ""


# Memory and seconds ----------------------------------------------------------------------------------------------


def _check_memory(stats: StartupStats, arm: StartupArm, limits: StartupLimits) -> list[Finding]:
    """A compiled step needs at most `memory` times the memory of an eager one, and at most `bytes`."""
    if limits.memory is None and limits.bytes is None:
        return []
    eager, peak = stats.eager.timed.memory, arm.timed.memory
    if peak is None or (eager is None and limits.bytes is None):
        reasons = [launch.memory_untold for known in (arm, stats.eager) for launch in known.launches]
        reason = next(filter(None, reasons), "it was not measured")
        return [PEAK_MEMORY.skip(stats.subject, f"the peak memory of a step is not known: {reason}", where=WHERE)]
    bounds = []
    if limits.memory is not None and eager is not None:
        ratio = f", {peak / eager:.3g} times as much" if eager else ""
        required = f"{limits.memory:g} times the memory of an eager one ({_mib(eager)}), and 1 MiB"
        bounds.append((eager * limits.memory + SLACK, required, ratio))
    if limits.bytes is not None:
        bounds.append((limits.bytes, _mib(limits.bytes), ""))
    findings = []
    for limit, required, ratio in bounds:
        message = f"a compiled step may need {required}; it needs {_mib(peak)}{ratio}"
        verdict = Verdict.PASS if peak <= limit else Verdict.FAIL
        evidence = Evidence(where=WHERE, observed=peak, limit=limit, hint=_MEMORY)
        findings.append(PEAK_MEMORY.judged(verdict, stats.subject, message, len(arm.launches), **evidence))
    return findings


def _check_cost(stats: StartupStats, arm: StartupArm, limit: float) -> Finding:
    """Compilation costs at most `limit` seconds."""
    costs, (low, high) = stats.cost(arm), stats.cost_range(arm)
    few, cost = len(costs) < ENOUGH, median(costs)
    message = f"compilation may cost {limit:g} s; in {counted(len(costs), 'cold launches')} it cost {cost:.3g} s"
    message += f" ({low:.3g} to {high:.3g})" if high > low else ""
    verdict = Verdict.PASS if high <= limit else Verdict.FAIL if low > limit and not few else Verdict.UNDECIDED
    if verdict is Verdict.UNDECIDED and few:
        message += f"; fewer than {ENOUGH} launches decide nothing so near, or beyond"
    hint = f"measure {ENOUGH} or more cold launches (cold={ENOUGH})" if few else _FASTER
    evidence = Evidence(where=WHERE, observed=cost, limit=limit, unit="s", hint=hint)
    return COMPILE_TIME.judged(verdict, stats.subject, message, len(costs), **evidence)


def _check_break_even(stats: StartupStats, arm: StartupArm, limit: float) -> Finding:
    """Compilation has paid after at most `limit` calls."""
    paid, launches = stats.break_even(arm), len(arm.launches)
    if paid is None:
        message = "after how many calls compilation has paid is not known: its steady state was not timed with eager"
        return COMPILE_TIME.skip(stats.subject, message, where=WHERE)
    verdict = Verdict.PASS if paid.high <= limit else Verdict.FAIL if paid.low > limit else Verdict.UNDECIDED
    if verdict is Verdict.FAIL and not paid.never and launches < ENOUGH:
        verdict = Verdict.UNDECIDED
    result = "it never has" if paid.never else f"{paid}" if paid.undecided else f"it has after {paid}"
    message = f"compilation must have paid after {limit:,g} calls; {result}: "
    message += f"it costs {paid.cost:.3g} s and a call saves {paid.saving:.3g} s"
    evidence = Evidence(where=WHERE, observed=paid.calls, limit=limit, unit="calls", hint=_FASTER)
    return COMPILE_TIME.judged(verdict, stats.subject, message, launches, **evidence)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.4g} MiB"


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
    times, paid = stats.times(arm), stats.break_even(arm)
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
