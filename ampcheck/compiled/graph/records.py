"""What a compiled run leaves behind, as plain data: graphs, breaks, recompiles, what ran eager, caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.run import Coverage, Where

Code = tuple[str, str, int]
"""A function of the user's: file, name, first line."""

SEE_IT = "call torch.compiler.reset() before the block, or warm up inside it, to see the reason"
"""What to do where something was compiled before anybody listened."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One compilation of one frame. `late`: after the warm-up. seconds: of Dynamo and all that it called."""

    frame: str
    code: Code
    ops: int
    seconds: float
    late: bool = False


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place at which a graph ends before its function does.

    times: how often in the call that meets it most; 1 where calls could not be counted. frames: the functions that the
    break cuts in two, from outside in.
    """

    where: Where
    reason: str
    hint: str
    times: int = 1
    frames: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Recompile:
    """A frame that was compiled again, and the guard that failed.

    kind: what the guard watches, such as `grad mode` or `shape`. guard: as PyTorch words it. repeated: every value that
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
    """What was to run compiled and ran eager.

    names: module paths, or the function. cause: `recompile limit`, `backend error`, `graph break`, `skipped`, or
    `unseen` where Dynamo may have met it before anybody listened.
    """

    names: tuple[str, ...]
    cause: str
    reason: str
    where: Where = field(default_factory=Where)


@dataclass(frozen=True, slots=True)
class Artifacts:
    """One call of `torch.compiler.save_cache_artifacts` or `load_cache_artifacts`.

    keys: how many artifacts; 0 where it returned None. compiled: graphs that its process had compiled before. hits: how
    many of the loaded artifacts were used afterwards. later: graphs that were compiled afterwards.
    """

    action: str
    keys: int
    compiled: int
    hits: int = 0
    later: int = 0
    where: Where = field(default_factory=Where)
    process: str = "this process"


@dataclass(frozen=True, slots=True)
class Stopped:
    """An exception that ended the compiled run.

    eager: what the same run raised in eager mode; "" where it ran through; None where the user's own code was watched,
    which does not run twice. asked: raised by `fullgraph=True` at a graph break, or by a limit that is to be an error.
    machine: what this machine lacks, where that is the reason (`ampcheck.autocast.missing.lacking`).
    """

    message: str
    kind: str
    eager: str | None = ""
    asked: bool = False
    where: Where = field(default_factory=Where)
    machine: str = ""


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Everything that was noted while a subject ran compiled.

    untold: why this PyTorch does not tell what it compiles; then nothing else is known. warm: whether the subject ran
    through a warm-up first. ran: runs of code that Dynamo wrote; None where runs could not be counted. switches:
    autocast state that the compiled call changed and the eager call did not, before and after; switched_by: the
    backend, where it is not the subject's own. skips: reasons for which CUDA graphs were not used. wants_cudagraphs:
    the mode or option that asks for them. elsewhere: what `explain` and `fullgraph=True` say of the breaks. modes:
    compilations per mode, where asked for. children: Python processes that were started and told. before: functions
    that ran compiled and had been compiled before anybody listened, so that their breaks and reasons were not told.
    """

    subject: str
    untold: str = ""
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
    switches: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    switched_by: str = ""
    stopped: Stopped | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    children: int = 0
    before: int = 0
    coverage: Coverage = field(default_factory=Coverage)
