"""What is noted while compiled code runs, brought together: breaks with how often, who ran eager and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.compiled.graph.calls import ArtifactCall, CallWatch, EagerRun
from ampcheck.compiled.graph.children import Children
from ampcheck.compiled.graph.records import SEE_IT, Artifacts, Code, Fallback, GraphBreak, GraphStats, Stopped
from ampcheck.compiled.graph.run import Ended
from ampcheck.compiled.graph.trace import Failure, Notes, Reading, frame_name, is_wrapper, resumed_in
from ampcheck.core.errors import brief
from ampcheck.core.run import Coverage, Where
from ampcheck.torchtools.dynamo import Told, compile_trace, counters
from ampcheck.torchtools.source import is_users, short_path, users_place

_ASKED = ("Unsupported", "UserError", "FailOnRecompileLimitHit", "RecompileError")
"""Exceptions that Dynamo raises where the user asked for an error, as with `fullgraph=True`."""


@dataclass(slots=True)
class Noting:
    """What listens while something runs, and what it has heard.

    fresh: Dynamo was reset before, so that nothing runs of whose compilation nothing was heard.
    """

    notes: Notes = field(default_factory=Notes)
    calls: CallWatch | None = None
    children: Children = field(default_factory=Children)
    fresh: bool = True
    _graphs: int = 0
    _skipped: int = 0

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Listen to what Dynamo tells."""

        def hear(told: Told) -> None:
            self.notes(told)
            if self.calls is not None:
                self.calls.hear(told)

        self._graphs, self._skipped = _graphs_and_skips()
        try:
            with compile_trace(hear):
                yield
        finally:
            graphs, skipped = _graphs_and_skips()
            self._graphs, self._skipped = graphs - self._graphs, skipped - self._skipped

    @contextmanager
    def calls_counted(self, names: Mapping[int, str], functions: Any) -> Iterator[Callable[[], None]]:
        """Look at what runs."""
        self.calls = CallWatch(self.notes, names, functions)
        with self.calls as calls:
            yield calls.next_call

    def stats(self, name: str, ended: Ended, *, device: str = "cpu", warm: bool = True, asks: str = "") -> GraphStats:
        """Everything that was heard and seen."""
        reading, calls = self.notes.read(), self.calls
        if self._graphs > 0 and not reading.frames:
            return GraphStats(name, untold=f"PyTorch {torch.__version__} compiles without telling it as is known here")
        # A Python or a PyTorch in which the hook does not meet Dynamo's code says nothing of what ran.
        seen = calls is not None and calls.counted and (calls.ran > 0 or not reading.graphs or bool(calls.eager))
        before = set() if self.fresh or calls is None else calls.codes - reading.met
        reading.breaks |= {
            (file, line, name): one for (file, name, line), one in _breaks_before(before, reading, calls)
        }
        artifacts = [_artifacts(call, reading) for call in (calls.artifacts if calls else ())]
        skips = reading.skips or ({"no reason given": self._skipped} if self._skipped > 0 else {})
        unseen = _positive({"calls that could not be counted": int(calls is not None and not seen)})
        if ended.no_backward:
            unseen[f"backward, which raised {ended.no_backward}"] = 1
        if ended.error is not None:
            unseen[f"what comes after the {type(ended.error).__name__}"] = 1
        return GraphStats(
            subject=name,
            warm=warm,
            graphs=tuple(reading.graphs),
            breaks=tuple(_timed(found, calls) for found in reading.breaks.values()),
            recompiles=tuple(reading.recompiles),
            fallbacks=_fallbacks(reading, calls.eager if calls is not None and seen else {}, ended.error, self.fresh),
            artifacts=(*artifacts, *self.children.artifacts),
            caches=dict(reading.caches),
            skips=dict(skips),
            wants_cudagraphs=asks,
            device=device,
            ran=calls.ran if calls is not None and seen else None,
            switches=ended.switches,
            switched_by=ended.by,
            stopped=_stopped(ended),
            children=self.children.processes,
            before=len(before),
            coverage=Coverage(
                {
                    "graphs": len(reading.graphs),
                    "compiled runs": calls.ran if calls is not None else 0,
                    **_positive({"calls": ended.calls}),
                    **_positive({"child Pythons": self.children.processes}),
                    **_positive({"graphs of child Pythons": self.children.graphs}),
                },
                unseen,
            ),
        )


def _graphs_and_skips() -> tuple[int, int]:
    return counters("stats")["unique_graphs"], counters("inductor")["cudagraph_skips"]


def _positive(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _timed(found: GraphBreak, calls: CallWatch | None) -> GraphBreak:
    times = calls.times(found.where.file, found.where.line) if calls is not None else 0
    return replace(found, times=max(times, 1))


def _artifacts(call: ArtifactCall, reading: Reading) -> Artifacts:
    used = set(reading.hits[call.hits :]) & set(call.keys)
    later = len(reading.graphs) - call.compiled
    return Artifacts(call.action, len(call.keys), call.compiled, len(used), later, call.where)


def _stopped(ended: Ended) -> Stopped | None:
    if ended.error is None:
        return None
    kind = type(ended.error).__name__
    file, line = users_place(ended.eager or ended.error)  # compiled code raises from a file that nobody wrote
    eager = (brief(ended.eager) if ended.eager is not None else "") if ended.compared else None
    where = Where("compile", file=file, line=line)
    return Stopped(brief(ended.error), kind, eager, kind in _ASKED, where, lacking(ended.error))


def _breaks_before(
    before: Iterable[Code], reading: Reading, calls: CallWatch | None
) -> Iterator[tuple[Code, GraphBreak]]:
    """Breaks of code that was compiled before anybody listened: the function behind the break ran."""
    told = {frame for found in reading.breaks.values() for frame in found.frames}
    for code in sorted(before):
        place = resumed_in(code[1])
        carried = place is not None and calls is not None and (code[0], place[1]) in calls.carried
        if place is not None and not carried and (code[0], place[0]) not in told:
            where = Where("compile", file=short_path(code[0]), line=place[1])
            reason = "it was compiled before the block, so that the reason was not seen"
            yield code, GraphBreak(where, reason, SEE_IT, frames=frozenset([(code[0], place[0])]))


def _fallbacks(
    reading: Reading, eager: Mapping[int, EagerRun], error: BaseException | None, fresh: bool
) -> tuple[Fallback, ...]:
    """Who ran eager, grouped by the reason; below what runs eager as a whole nothing is named.

    error: what ended the run. A failure to compile that was raised is no fallback.
    """
    calling = {run.above for run in eager.values()}
    eager = {key: run for key, run in eager.items() if not _is_empty(run, key in calling, reading)}
    causes = {key: _cause(run, reading, fresh) for key, run in eager.items()}
    groups: dict[Failure, list[str]] = {}
    for key, run in eager.items():
        above = causes.get(run.above) if run.above is not None else None
        if above is not None and (
            above.cause != "graph break" or (run.is_torchs and causes[key].cause in ("skipped", "unseen"))
        ):
            continue
        groups.setdefault(causes[key], []).append(run.name)
    for failure in reading.failures:
        if failure.cause != "graph break" and failure not in groups and not _was_raised(failure, error):
            groups[failure] = [frame_name(failure.code)] if failure.code is not None else ["a function"]
    return tuple(
        Fallback(tuple(dict.fromkeys(names)), failure.cause, failure.reason, failure.where)
        for failure, names in groups.items()
    )


def _was_raised(failure: Failure, error: BaseException | None) -> bool:
    """Whether a failure to compile is what ended the run; Dynamo wraps some exceptions into one of its own."""
    return error is not None and type(error).__name__ in (failure.kind, "InternalTorchDynamoError")


def _is_empty(run: EagerRun, calls: bool, reading: Reading) -> bool:
    """Whether Dynamo looked at a function and found no tensor operation in it. calls: it runs other modules."""
    if run.is_torchs and run.above is None and not calls:
        return any(is_wrapper(code) for code in reading.empty)
    return run.code in reading.empty


def _cause(run: EagerRun, reading: Reading, fresh: bool) -> Failure:
    """Why a function ran eager: a failure of its own, a break that cuts it, or none that Dynamo told."""
    own = [failure for failure in reading.failures if _is_of(failure.code, run.code)]
    hard = [failure for failure in own if failure.cause != "graph break"]
    if hard:
        return hard[-1]
    if own or any(run.code[:2] in found.frames for found in reading.breaks.values()):
        return Failure(run.code, "graph break", "a graph break cuts it")
    if run.is_torchs and run.above is None and any(is_wrapper(code) for code in reading.empty):
        reason = "PyTorch's own modules are compiled through one function, which Dynamo leaves out for good once a "
        return Failure(run.code, "skipped", f"{reason}module without tensor operations (nn.Identity) was compiled")
    if run.is_torchs and reading.breaks:  # what PyTorch's own code is called for at a break has no frame to compile
        return Failure(run.code, "graph break", "a graph ends where it is called")
    # A module of PyTorch's own is compiled through a wrapper, whose failure is the module's.
    wrapper = [f for f in reading.failures if f.code and is_wrapper(f.code) and f.cause != "graph break"]
    if wrapper and run.is_torchs and run.above is None:
        return wrapper[-1]
    file, _, line = run.code
    where = Where("compile", file=short_path(file), line=line) if is_users(file) else Where("compile")
    if not fresh:
        reason = "nothing was told of it inside the block: Dynamo met it before the block, or leaves it out"
        return Failure(run.code, "unseen", reason, where)
    return Failure(run.code, "skipped", "Dynamo left it out and told no reason", where)


def _is_of(code: Code | None, run: Code) -> bool:
    """Whether a compiled frame is the function, or a part of it behind a graph break."""
    if code is None or code[0] != run[0]:
        return False
    return code == run or code[1].startswith(f"torch_dynamo_resume_in_{run[1]}_at_")
