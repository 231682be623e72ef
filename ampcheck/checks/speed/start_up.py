"""Requires: A process that starts with warm caches, or that loads artifacts of torch.compiler.save_cache_artifacts,
compiles no graph. Fails for each way to start in which a graph is not in the cache, or no cache is used.

Measured: The subject starts in fresh processes with separate cache folders: empty, then warm from the first one, then
empty with the artifacts loaded. PyTorch's own records show for each graph whether the FX graph cache and the
AOTAutograd cache contained it; seconds are reported and never judged. A graph that is traced again and then found is a
warning.

Causes: TORCHINDUCTOR_FORCE_DISABLE_CACHES or a setting that disables a cache; a model that differs from process to
process in a constant, a name or an order; artifacts of another release, device or setting; a graph that PyTorch refuses
to cache, for the reason it gives.

Fix: Enable the caches, and remove the reported difference in the key. A hit does not remove all costs: on a CPU an
empty folder costs time even if the artifacts contain every graph (measured: 54 s of 121 s remained); keep the whole of
TORCHINDUCTOR_CACHE_DIR from run to run if you can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampcheck.checks.speed import WHERE
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Finding
from ampcheck.core.text import counted, listed
from ampcheck.records.startup import ARTIFACTS, CACHED, COLD, FX, WARM, Launch, Lookup, StartupArm, StartupStats

CHECK = Check("start-up", "speed", __doc__, needs=("StartupStats",), order=802)

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


def check(stats: StartupStats, limits: StartupLimits) -> Iterator[Finding]:
    """A start with warm caches, or with artifacts, compiles no graph again."""
    if (cold := stats.arm(COLD)) is not None:
        yield from (_judged(stats, name, cold) for name in CACHED)


def _judged(stats: StartupStats, name: str, cold: StartupArm) -> Finding:
    """A start with warm caches, or with artifacts, compiles no graph again."""
    subject, arm = stats.subject, stats.arm(name)
    start = "a start with warm caches" if name == WARM else "a start with loaded artifacts"
    if arm is None:
        reason = stats.left_out.get(name, "it was not measured")
        if name == ARTIFACTS and "saved nothing" in reason:
            message = f"{start} was not judged: {reason}{_reasons(cold.launches)}"
            return CHECK.fail(subject, message, where=WHERE, hint=_OFF)
        return CHECK.skip(subject, f"{start} was not judged: {reason}", where=WHERE)
    launches = arm.launches
    if untold := next((launch.untold for launch in launches if launch.untold), ""):
        return CHECK.skip(subject, f"{start} was not judged: {untold}", where=WHERE)
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
        return CHECK.fail(subject, message, where=WHERE, hint=hint)
    if missed or not hits:
        cause = f"{counted(graphs, 'graphs')} asked no cache"
        if missed:
            cause = f"{len(missed)} of {counted(len(fx), 'graphs')} {_was(missed)} not in the cache"
        message = f"{start} must compile nothing again, but {cause}{_reasons(launches)}{_key(launches, cold)}{seconds}"
        hint = _REFUSED if any(lookup.result == "bypass" for lookup in lookups) else _DIFFERS
        hint = _OFF if any(launch.off for launch in launches) else hint
        evidence = Evidence(where=WHERE, observed=len(missed) or graphs, limit=0, unit="graphs", hint=hint)
        return CHECK.fail(subject, message, **evidence)
    if built := max(launch.binaries for launch in launches):
        message = (
            f"{start} must compile nothing again; its {counted(hits, 'lookups')} hit, but a C++ compiler built "
            f"{counted(built, 'files')} of machine code again{seconds}"
        )
        return CHECK.warn(subject, message, where=WHERE, observed=built, limit=0, unit="files", hint=_BUILT)
    if traced:
        message = f"{start} compiled nothing again, but {counted(len(traced), 'graphs')} {_was(traced)} traced again"
        message += _reasons(launches) + seconds
        return CHECK.warn(subject, message, where=WHERE, observed=len(traced), limit=0, unit="graphs")
    message = f"{start} compiled nothing again: {hits} of {counted(len(lookups), 'lookups')} hit{seconds}"
    return CHECK.passed(subject, message, len(lookups), where=WHERE, observed=0, limit=0, unit="graphs")


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
