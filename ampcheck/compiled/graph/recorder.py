"""Record what happens while compiled code runs: breaks with how often, what ran eager and why."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.compiled.graph.calls import CallProfiler, EagerRun
from ampcheck.compiled.graph.run import Passes
from ampcheck.compiled.graph.startup_hook import EVENTS
from ampcheck.compiled.graph.trace import CompileLog, Failure, defined, frame_name, is_wrapper
from ampcheck.core.environment import variables
from ampcheck.core.errors import brief
from ampcheck.core.run import Coverage, Where
from ampcheck.numerics.measure import positive
from ampcheck.records.graphs import RESET_BEFORE, Artifacts, Code, Fallback, GraphBreak, GraphStats, RunError
from ampcheck.torchtools.dynamo import TraceRecord, compile_trace, counters, resumed_function
from ampcheck.torchtools.source import short_path, users_place

_EXPECTED = ("Unsupported", "UserError", "FailOnRecompileLimitHit", "RecompileError")
"""Exceptions that Dynamo raises where the user wants an error, as with `fullgraph=True`."""


@dataclass(slots=True)
class Children:
    """processes: child processes that used PyTorch; graphs: compiled in all of them together."""

    processes: int = 0
    graphs: int = 0
    artifacts: tuple[Artifacts, ...] = ()


class GraphRecorder:
    """Records the trace of compilations and the calls that run.

    fresh: Dynamo was reset before, so that all code that runs was compiled while recording.
    """

    def __init__(self, *, fresh: bool = True) -> None:
        self.log = CompileLog()
        self.children = Children()
        self.fresh = fresh
        self._calls = CallProfiler(self.log)
        self._profiled = False
        self._graphs = self._skipped = 0

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Record what Dynamo compiles."""

        def listen(record: TraceRecord) -> None:
            self.log(record)
            self._calls(record)

        before = _graphs_and_skips()
        try:
            with compile_trace(listen):
                yield
        finally:
            self._graphs, self._skipped = (now - old for now, old in zip(_graphs_and_skips(), before, strict=True))

    @contextmanager
    def profile(self, profiler: CallProfiler | None = None) -> Iterator[CallProfiler]:
        """Record the code that runs, with a profiler of this recorder's log."""
        self._calls, self._profiled = profiler or CallProfiler(self.log), True
        with self._calls as calls:
            yield calls

    @contextmanager
    def block(self, profiler: CallProfiler | None = None) -> Iterator[None]:
        """Record a block of the user's own code, with the child processes that it starts."""
        with self.trace(), recorded_children() as self.children, self.profile(profiler):
            yield

    def stats(
        self, name: str, passes: Passes, *, device: str = "cpu", warm: bool = True, wants_cudagraphs: str = ""
    ) -> GraphStats:
        """Everything recorded so far."""
        log, calls = self.log, self._calls
        log.end()
        if self._graphs > 0 and not log.frames:
            return GraphStats(
                name, f"compile trace unsupported: PyTorch {torch.__version__} wrote no record of a graph"
            )
        # A Python or a PyTorch in which the hook does not meet Dynamo's code shows nothing of what ran.
        counted = calls.active and (calls.ran > 0 or not log.graphs or bool(calls.eager))
        before = set() if self.fresh else calls.codes - log.seen
        breaks = [*log.breaks.values(), *_breaks_before(before, log, calls)]
        unseen = {
            "calls that could not be counted": int(self._profiled and not counted),
            f"backward, which raised {passes.backward_error}": int(bool(passes.backward_error)),
            f"code after the {type(passes.error).__name__}": int(passes.error is not None),
        }
        seen = {
            "calls": passes.calls,
            "child Pythons": self.children.processes,
            "graphs of child Pythons": self.children.graphs,
        }
        return GraphStats(
            subject=name,
            warm=warm,
            graphs=tuple(log.graphs),
            breaks=tuple(replace(b, times=max(calls.times(b.where.file, b.where.line), 1)) for b in breaks),
            recompiles=tuple(log.recompiles),
            fallbacks=_fallbacks(log, calls.eager if counted else {}, passes.error, self.fresh),
            artifacts=(*_artifacts(log, calls), *self.children.artifacts),
            caches=dict(log.caches),
            skips=dict(log.skips or ({"no reason given": self._skipped} if self._skipped > 0 else {})),
            wants_cudagraphs=wants_cudagraphs,
            device=device,
            ran=calls.ran if counted else None,
            state_changes=passes.state_changes,
            changed_by=passes.changed_by,
            error=_run_error(passes),
            compiled_before=len(before),
            coverage=Coverage(
                {"graphs": len(log.graphs), "compiled runs": calls.ran, **positive(seen)}, positive(unseen)
            ),
        )


def _graphs_and_skips() -> tuple[int, int]:
    return counters("stats")["unique_graphs"], counters("inductor")["cudagraph_skips"]


def _artifacts(log: CompileLog, calls: CallProfiler) -> Iterator[Artifacts]:
    for call in calls.artifacts:
        used = set(log.hits[call.hits :]) & set(call.keys)
        later = len(log.graphs) - call.compiled
        yield Artifacts(call.action, len(call.keys), call.compiled, len(used), later, call.where)


def _run_error(passes: Passes) -> RunError | None:
    if passes.error is None:
        return None
    kind = type(passes.error).__name__
    eager = (brief(passes.eager) if passes.eager is not None else "") if passes.compared else None
    # Compiled code raises from a file that nobody wrote.
    where = Where("compile", "", "", *users_place(passes.eager or passes.error))
    return RunError(brief(passes.error), kind, eager, kind in _EXPECTED, where, lacking(passes.error))


def _breaks_before(before: Iterable[Code], log: CompileLog, calls: CallProfiler) -> Iterator[GraphBreak]:
    """Breaks of code that was compiled before recording began: the function that resumes after the break ran."""
    known = {frame for graph_break in log.breaks.values() for frame in graph_break.frames}
    for code in sorted(before):
        part = resumed_function(code[1])
        outer = part is not None and (code[0], part[1]) in calls.outer_lines
        if part is not None and not outer and (code[0], part[0]) not in known:
            where = Where("compile", file=short_path(code[0]), line=part[1])
            reason = "it was compiled before the block, so that the reason was not seen"
            yield GraphBreak(where, reason, RESET_BEFORE, frames=frozenset([(code[0], part[0])]))


def _fallbacks(
    log: CompileLog, eager: Mapping[int, EagerRun], error: BaseException | None, fresh: bool
) -> tuple[Fallback, ...]:
    """Eager modules and functions grouped by the reason; of a module that runs eager as a whole only itself.

    error: what ended the run. A failure to compile that was raised is no fallback.
    """
    callers = {run.caller for run in eager.values()}
    eager = {key: run for key, run in eager.items() if not _is_empty(run, key in callers, log)}
    causes = {key: _cause(run, log, fresh) for key, run in eager.items()}
    groups: dict[Failure, list[str]] = {}
    for key, run in eager.items():
        outer = causes.get(run.caller) if run.caller is not None else None
        if outer is not None and (
            outer.cause != "graph break" or (run.is_torchs and causes[key].cause in ("skipped", "unseen"))
        ):
            continue
        groups.setdefault(causes[key], []).append(run.name)
    for failure in log.failures:
        # Dynamo wraps some exceptions into one of its own.
        raised = error is not None and type(error).__name__ in (failure.kind, "InternalTorchDynamoError")
        if failure.cause != "graph break" and failure not in groups and not raised:
            groups[failure] = [frame_name(failure.code)] if failure.code is not None else ["a function"]
    return tuple(
        Fallback(tuple(dict.fromkeys(names)), failure.cause, failure.reason, failure.where)
        for failure, names in groups.items()
    )


def _is_empty(run: EagerRun, calls: bool, log: CompileLog) -> bool:
    """Return whether Dynamo compiled a function and there was no tensor operation in it. calls: it runs other
    modules."""
    if run.is_torchs and run.caller is None and not calls:
        return any(map(is_wrapper, log.empty))
    return run.code in log.empty


def _cause(run: EagerRun, log: CompileLog, fresh: bool) -> Failure:
    """Why a function ran eager: a failure of its own, a break that splits it, a switch, or no reason in the trace."""
    if run.stance == "force_eager":
        return Failure(None, "switched off", "torch.compiler.set_stance('force_eager') is on", Where("compile"))
    own = [failure for failure in log.failures if _is_of(failure.code, run.code)]
    hard = [failure for failure in own if failure.cause != "graph break"]
    if hard:
        return hard[-1]
    if own or any(run.code[:2] in graph_break.frames for graph_break in log.breaks.values()):
        return Failure(run.code, "graph break", "a graph break splits it")
    outermost = run.is_torchs and run.caller is None
    if outermost and run.in_place:
        reason = "compile() of a module of PyTorch's own compiles nothing, as Dynamo leaves out the file of its class"
        return Failure(None, "left out", reason, Where("compile"))
    if outermost and any(map(is_wrapper, log.empty)):
        reason = "PyTorch's own modules are compiled through one function, which Dynamo leaves out for good once a "
        return Failure(run.code, "skipped", f"{reason}module without tensor operations (nn.Identity) was compiled")
    if run.is_torchs and log.breaks:  # code of PyTorch's own that runs at a break has no frame to compile
        return Failure(run.code, "graph break", "a graph ends where it is called")
    # A module of PyTorch's own is compiled through a wrapper, whose failure is the module's.
    wrapper = [f for f in log.failures if f.code and is_wrapper(f.code) and f.cause != "graph break"]
    if wrapper and outermost:
        return wrapper[-1]
    if not fresh:
        reason = "the trace of the block has no record of it: Dynamo met it before the block, or leaves it out"
        return Failure(run.code, "unseen", reason, defined(run.code))
    return Failure(run.code, "skipped", "Dynamo left it out and recorded no reason", defined(run.code))


def _is_of(code: Code | None, run: Code) -> bool:
    """Return whether a compiled frame is the function, or a part of it after a graph break."""
    if code is None or code[0] != run[0]:
        return False
    return code == run or code[1].startswith(f"torch_dynamo_resume_in_{run[1]}_at_")


# Child processes, which this process cannot profile ------------------------------------------------------------


@contextmanager
def recorded_children() -> Iterator[Children]:
    """Record what each Python process that is started inside compiles, saves and loads.

    It finds our `sitecustomize` first on `PYTHONPATH`, which then imports its own. A process that is started with `-I`,
    `-E`, `-S` or an environment of its own, and one that is forked, is not recorded.
    """
    children, before = Children(), os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="ampcheck-") as folder:
        events = Path(folder, EVENTS)
        events.touch()
        shutil.copy(Path(__file__).with_name("startup_hook.py"), Path(folder, "sitecustomize.py"))
        try:
            with variables({"PYTHONPATH": os.pathsep.join(part for part in (folder, before) if part)}):
                yield children
        finally:
            _read_events(children, events.read_text(encoding="utf-8"))


def _read_events(children: Children, text: str) -> None:
    by_process: dict[int, list[Mapping[str, Any]]] = {}
    for event in map(json.loads, text.splitlines()):
        by_process.setdefault(event["pid"], []).append(event)
    children.processes = len(by_process)
    artifacts: list[Artifacts] = []
    for events in by_process.values():
        last = events[-1]
        children.graphs += last["graphs"]
        for event in (event for event in events if event["event"] != "end"):
            hits, later = last["hits"] - event["hits"], last["graphs"] - event["graphs"]
            where = defined((event["file"], "", event["line"]))
            artifacts.append(
                Artifacts(event["event"], event["keys"], event["graphs"], hits, later, where, "a child process")
            )
    children.artifacts = tuple(artifacts)
