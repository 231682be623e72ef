"""Judge how a subject starts: first what is the same in each run, caches and graphs, then seconds. No torch runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ampcheck.compiled.graph.checks import check_breaks, check_fallbacks, check_recompiles
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.speed.startup.breakeven import break_even
from ampcheck.speed.startup.stats import (
    ARTIFACTS,
    CACHED,
    COLD,
    ENOUGH,
    WARM,
    Launch,
    Lookup,
    StartupArm,
    StartupStats,
)

STARTUP_CHECKS = ("start-up", "compile-time", "peak-memory")
"""The slugs of a start, besides those of its graphs."""

FX = "FX graph cache"

SLACK = 2**20
"""Bytes that are nobody's concern."""

_NAMED = 4
_SHIPPED = "torch.compiler.load_cache_artifacts"


@dataclass(frozen=True, slots=True)
class StartupLimits:
    """What is required of a start.

    compile: seconds that compilation with empty caches may cost. calls: after how many it has paid at the latest.
    memory: a compiled step's peak at most so many times the eager one's, with 1 MiB of slack; bytes: at most so many.
    breaks, recompiles: as of `assert_graph`. None asks nothing.
    """

    compile: float | None = None
    calls: float | None = None
    memory: float | None = 1.1
    bytes: float | None = None
    breaks: int = 0
    recompiles: int = 0

    def __post_init__(self) -> None:
        for name in ("compile", "calls", "memory", "bytes"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, (int, float)) and given > 0):
                raise UsageError(f"the limit {name} of a start is a number above 0, or None; found {given!r}")


def check_startup(stats: StartupStats, limits: StartupLimits | None = None) -> list[Finding]:
    """Every verdict: `start-up`, the graphs of the cold start, `peak-memory`, and `compile-time` if limited."""
    limits = limits or StartupLimits()
    cold = stats.arm(COLD)
    if cold is None or not cold.launches:
        told = "a start must be measured to be judged, and there is none with empty caches"
        return [Finding("coverage", Verdict.FAIL, stats.subject, told, Where("speed"))]
    findings = [check_caches(stats, name) for name in CACHED]
    if (graph := cold.launches[0].graph) is not None:
        graph = replace(graph, subject=stats.subject)
        findings += check_breaks(graph, limits.breaks)
        findings += [*check_recompiles(graph, limits.recompiles), *check_fallbacks(graph)]
    findings += check_memory(stats, cold, limits)
    return findings + check_compile_time(stats, cold, limits)


# Caches ----------------------------------------------------------------------------------------------------------


def check_caches(stats: StartupStats, name: str) -> Finding:
    """A start with warm caches, or with artifacts, compiles nothing anew."""
    slug = "start-up"
    arm, cold = stats.arm(name), stats.arm(COLD)
    what = "a start with warm caches" if name == WARM else "a start with loaded artifacts"
    if arm is None:
        reason = stats.left_out.get(name, "it was not measured")
        lost = name == ARTIFACTS and cold is not None and "saved nothing" in reason
        reason += _because(cold.launches) if lost and cold is not None else ""
        verdict = Verdict.FAIL if lost else Verdict.SKIP
        return _finding(slug, verdict, stats, f"{what} was not judged: {reason}", hint=_OFF if lost else "")
    launches = arm.launches
    if told := next((launch.untold for launch in launches if launch.untold), ""):
        return _finding(slug, Verdict.SKIP, stats, f"{what} was not judged: {told}")
    looked = [one for launch in launches for one in launch.lookups]
    graphs = sum(len(launch.graph.graphs) for launch in launches if launch.graph is not None)
    anew = [one for one in looked if one.cache == FX and one.result != "hit"]
    hits = sum(one.result == "hit" for one in looked)
    seconds = f"; first step after {_typical(arm):.3g} s"
    seconds += f", with empty caches {_typical(cold):.3g} s" if cold is not None else ""
    seconds += f" ({_number(len(launches), 'launch')})"
    if not graphs:
        told = f"{what} must use what was compiled before, but nothing was compiled in it"
        return _finding(slug, Verdict.FAIL, stats, told, hint="see eager-fallback and graph-break: it ran eager")
    if anew or not hits:
        asked = _number(sum(one.cache == FX for one in looked), "graph")
        told = f"{len(anew)} of {asked} {_was(len(anew))} not in the cache" if anew else ""
        unasked = f"{_number(graphs, 'graph')} asked no cache"
        told = f"{what} must compile nothing anew, but {told or unasked}"
        told += _because(launches) + _different(launches, cold) + seconds
        return _finding(slug, Verdict.FAIL, stats, told, hint=_hint(launches), observed=len(anew) or graphs, limit=0)
    if built := max(launch.binaries for launch in launches):
        told = f"{what} must compile nothing anew; its {_number(hits, 'lookup')} hit, but a C++ compiler "
        told += f"built {_number(built, 'file')} of machine code anew" + seconds
        return _finding(slug, Verdict.WARN, stats, told, hint=_BUILT, observed=built, limit=0, unit="files")
    traced = [one for one in looked if one.result != "hit"]
    if traced:
        told = f"{what} compiled nothing anew, but {_number(len(traced), 'graph')} {_was(len(traced))} traced again"
        told += _because(launches) + seconds
        return _finding(slug, Verdict.WARN, stats, told, observed=len(traced), limit=0)
    told = f"{what} compiled nothing anew: {hits} of {_number(len(looked), 'lookup')} hit{seconds}"
    return _finding(slug, Verdict.PASS, stats, told, observed=0, limit=0, seen=len(looked))


_OFF = "leave the caches on: TORCHINDUCTOR_FORCE_DISABLE_CACHES and the settings named here switch them off"


_BUILT = (
    "artifacts hold graphs and Triton's kernels, and not what a C++ compiler made for a CPU: keep the folder "
    "TORCHINDUCTOR_CACHE_DIR between jobs instead"
)


def _hint(launches: Iterable[Launch]) -> str:
    if any(launch.off for launch in launches):
        return _OFF
    if any(one.result == "bypass" for launch in launches for one in launch.lookups):
        return "PyTorch refuses to cache such a graph, for the reason it gives: take what it names out of the model"
    return (
        "make the model the same in each process: no object whose text or order differs from run to run in its code, "
        "constants and settings; the same PyTorch, device and settings when it is saved and loaded"
    )


def _because(launches: Iterable[Launch]) -> str:
    """PyTorch's reasons, and switches that are off."""
    launches = tuple(launches)
    off = dict.fromkeys(name for launch in launches for name in launch.off)
    reasons = dict.fromkeys(one.reason for launch in launches for one in launch.lookups if one.reason)
    return (f": {_listed(off)}" if off else "") + (f": {_listed(reasons)}" if reasons else "")


def _different(launches: Iterable[Launch], cold: StartupArm | None) -> str:
    """In what the keys that were not found differ from those that the cold start wrote."""
    known = [one for one in cold.launches[0].lookups if one.cache == FX] if cold is not None else []
    found: dict[str, None] = {}
    for launch in launches:
        asked = [one for one in launch.lookups if one.cache == FX]
        for one, wrote in zip(asked, known, strict=False):
            if one.result == "miss":
                found |= dict.fromkeys(_parts(one, wrote))
    return f"; the key differs in {_listed(found)}" if found else ""


def _parts(one: Lookup, other: Lookup) -> list[str]:
    names = dict.fromkeys((*other.parts, *one.parts))
    return [
        f"{name} ({other.parts.get(name, 'none')}, now {one.parts.get(name, 'none')})"
        for name in names
        if one.parts.get(name) != other.parts.get(name)
    ]


# Memory and seconds ----------------------------------------------------------------------------------------------


def check_memory(stats: StartupStats, arm: StartupArm, limits: StartupLimits) -> list[Finding]:
    """A compiled step needs no more memory than the eager one, or than a number of bytes."""
    slug = "peak-memory"
    if limits.memory is None and limits.bytes is None:
        return []
    eager, peak = stats.eager.memory, arm.memory
    if peak is None or (eager is None and limits.bytes is None):
        reasons = [launch.memory_untold for one in (arm, stats.eager) for launch in one.launches]
        reason = next((reason for reason in reasons if reason), "it was not measured")
        return [_finding(slug, Verdict.SKIP, stats, f"the peak memory of a step is not known: {reason}")]
    findings = []
    if limits.memory is not None and eager is not None:
        limit = eager * limits.memory + SLACK
        told = (
            f"a compiled step may need {limits.memory:g} times the memory of an eager one ({_mib(eager)}), and 1 MiB; "
        )
        told += f"it needs {_mib(peak)}" + (f", {peak / eager:.3g} times as much" if eager else "")
        findings.append(_bounded(slug, stats, told, peak, limit, len(arm.launches)))
    if limits.bytes is not None:
        told = f"a compiled step may need {_mib(limits.bytes)}; it needs {_mib(peak)}"
        findings.append(_bounded(slug, stats, told, peak, limits.bytes, len(arm.launches)))
    return findings


_MEMORY = (
    "look for activations that the compiled graph saves and eager frees: torch._functorch.config."
    "activation_memory_budget below 1 recomputes more; CUDA graphs keep a pool of their own"
)


def check_compile_time(stats: StartupStats, arm: StartupArm, limits: StartupLimits) -> list[Finding]:
    """Compilation costs no more seconds than allowed, and has paid after no more calls than allowed."""
    slug = "compile-time"
    findings: list[Finding] = []
    costs = stats.cost(arm)
    if limits.compile is not None:
        few = len(costs) < ENOUGH
        low, high = stats.cost_range(arm)
        told = f"compilation may cost {limits.compile:g} s; in {_number(len(costs), 'cold launch')} it cost "
        told += f"{arm.typical(costs):.3g} s" + (f" ({low:.3g} to {high:.3g})" if high > low else "")
        verdict = Verdict.PASS if high <= limits.compile else Verdict.UNDECIDED
        if low > limits.compile and not few:
            verdict = Verdict.FAIL
        if verdict is Verdict.UNDECIDED and few:
            told += f"; fewer than {ENOUGH} launches decide nothing so near, or beyond"
        hint = f"measure {ENOUGH} or more cold launches (cold={ENOUGH})" if few else _FASTER
        hint = "" if verdict is Verdict.PASS else hint
        figures = {"observed": arm.typical(costs), "limit": limits.compile}
        findings.append(_finding(slug, verdict, stats, told, hint=hint, seen=len(costs), **figures, unit="s"))
    if limits.calls is not None:
        even = break_even(stats, arm)
        if even is None:
            told = "after how many calls compilation has paid is not known: its steady state was not timed beside eager"
            return [*findings, _finding(slug, Verdict.SKIP, stats, told)]
        verdict = Verdict.PASS if even.high <= limits.calls else Verdict.UNDECIDED
        verdict = Verdict.FAIL if even.low > limits.calls else verdict
        if verdict is Verdict.FAIL and not even.never and len(costs) < ENOUGH:
            verdict = Verdict.UNDECIDED
        told = f"compilation must have paid after {limits.calls:,g} calls; it has after {even}: "
        told = told.replace("it has after never", "it never has").replace("it has after undecided", "undecided")
        told += f"it costs {even.cost:.3g} s and a call saves {even.saving:.3g} s"
        hint = "" if verdict is Verdict.PASS else _FASTER
        findings.append(
            _finding(
                slug,
                verdict,
                stats,
                told,
                hint=hint,
                observed=even.calls,
                limit=limits.calls,
                unit="calls",
                seen=len(costs),
            )
        )
    return findings


_FASTER = (
    "compile repeated blocks instead of the whole (module.compile() on each), keep the cache folder or ship artifacts "
    f"({_SHIPPED}), and leave max-autotune out where calls are few"
)


def _bounded(slug: str, stats: StartupStats, told: str, observed: float, limit: float, seen: int) -> Finding:
    fits = observed <= limit
    verdict = Verdict.PASS if fits else Verdict.FAIL
    given = {"observed": float(observed), "limit": float(limit)}
    return _finding(slug, verdict, stats, told, hint="" if fits else _MEMORY, unit="bytes", seen=seen, **given)


def _finding(
    slug: str,
    verdict: Verdict,
    stats: StartupStats,
    message: str,
    *,
    hint: str = "",
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "graphs",
    seen: int = 0,
) -> Finding:
    """seen: the launches, or lookups in caches, that a pass rests on."""
    unit = unit if observed is not None else ""
    if verdict is Verdict.PASS:
        place = Where("speed")
        return passed(
            slug, stats.subject, message, seen, where=place, observed=observed, limit=limit, unit=unit, hint=hint
        )
    return Finding(slug, verdict, stats.subject, message, Where("speed"), observed, limit, unit, hint)


def _typical(arm: StartupArm) -> float:
    return arm.typical([launch.first for launch in arm.launches])


def _mib(count: float) -> str:
    return f"{count / 2**20:,.4g} MiB"


def _number(count: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _listed(names: Iterable[str] | Mapping[str, None]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
