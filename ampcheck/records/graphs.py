"""The record of a compiled run, as plain data: graphs, breaks, recompilations, eager fallbacks, caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.run import Coverage, Where

Code = tuple[str, str, int]
"""A function of the user's: file, name, first line."""

RESET_BEFORE = "call torch.compiler.reset() before the block, or warm up inside it, to see the reason"
"""The hint for code that was compiled before recording began."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One compilation of one frame. late: after the warm-up. seconds: of Dynamo and the backend."""

    frame: str
    ops: int
    seconds: float
    late: bool = False


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line at which a graph ends before its function does.

    times: how often in the call that meets it most; 1 where calls could not be counted. frames: the functions that the
    break splits, outermost first.
    """

    where: Where
    reason: str
    hint: str
    times: int = 1
    frames: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Recompile:
    """A frame that was compiled again, and the guard that failed.

    kind: what the guard checks, such as `grad mode` or `shape`. guard: in PyTorch's words. repeated: every value that
    differs had differed before, so that it is specialised again and again. late: after the warm-up.
    """

    frame: str
    where: Where
    kind: str
    guard: str
    repeated: bool = False
    late: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Modules (by path) or a function inside the compiled region that ran eager.

    cause: `recompile limit`, `backend error`, `graph break`, `skipped`, or `unseen` where Dynamo may have compiled it
    before recording began; `switched off` by the user's stance; `left out`: a class of PyTorch's own that was compiled
    in place. `passed by`: it is compiled, and only the original ran; `not used`: so in the steps that
    ran, others may call it.
    """

    names: tuple[str, ...]
    cause: str
    reason: str
    where: Where = field(default_factory=Where)


@dataclass(frozen=True, slots=True)
class Artifacts:
    """One call of `torch.compiler.save_cache_artifacts` or `load_cache_artifacts`.

    keys: how many artifacts; 0 where it returned None. compiled: graphs that its process had compiled before; later:
    afterwards. hits: how many of the loaded artifacts were used.
    """

    action: str
    keys: int
    compiled: int
    hits: int = 0
    later: int = 0
    where: Where = field(default_factory=Where)
    process: str = "this process"


@dataclass(frozen=True, slots=True)
class RunError:
    """An exception that ended the compiled run.

    eager: the exception of the same run in eager mode; "" where it completes; None where it was not run, since the
    user's own loop runs once. expected: raised by `fullgraph=True` at a graph break, or by a limit that is to raise.
    machine: what this machine lacks, where that is the reason (`ampcheck.autocast.missing.lacking`).
    """

    message: str
    kind: str
    eager: str | None = ""
    expected: bool = False
    where: Where = field(default_factory=Where)
    machine: str = ""


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Everything recorded while a subject ran compiled.

    unsupported: why this PyTorch's trace cannot be read; then nothing else is known. warm: whether a warm-up came
    first. ran: runs of Dynamo's code; None where they could not be counted. state_changes: autocast state, before and
    after, that the compiled call changed and the eager call did not; changed_by: the backend, where it is not the
    subject's own. skips: reasons for which CUDA graphs were left out. wants_cudagraphs: the mode or option that asks
    for them. modes: compilations per mode, where counted. compiled_before: functions that were compiled before
    recording began, so that their breaks are unknown.
    lost: results and weights that ended as infinities or NaN, and are finite in eager mode.
    """

    subject: str
    unsupported: str = ""
    warm: bool = True
    graphs: tuple[Graph, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    artifacts: tuple[Artifacts, ...] = ()
    caches: Mapping[str, int] = field(default_factory=dict)
    skips: Mapping[str, int] = field(default_factory=dict)
    wants_cudagraphs: str = ""
    device: str = "cpu"
    ran: int | None = None
    state_changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    changed_by: str = ""
    error: RunError | None = None
    modes: Mapping[str, int] = field(default_factory=dict)
    compiled_before: int = 0
    lost: tuple[str, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
