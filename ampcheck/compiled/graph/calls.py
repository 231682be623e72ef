"""Which code really runs while compiled code runs, by the code objects that Python's profiling hook reports."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TypeAlias

import torch

from ampcheck.compiled.graph.trace import CompileLog
from ampcheck.core.run import Where
from ampcheck.records.graphs import Code
from ampcheck.torchtools.dynamo import TraceRecord, is_compiled_code, resumed_function, stance
from ampcheck.torchtools.interception import (
    CompiledCall,
    in_compiled_region,
    is_wrapper_of_compile,
    leave_out,
    set_eval_frame,
)
from ampcheck.torchtools.source import is_users, short_path, users_line

_ARTIFACTS = {
    function.__code__: action
    for action in ("save", "load")
    if (function := getattr(torch.compiler, f"{action}_cache_artifacts", None)) is not None  # 2.7
}

Called: TypeAlias = Callable[[CompiledCall], Callable[[object], None] | None]


@dataclass(frozen=True, slots=True)
class EagerRun:
    """A module or function that ran as plain Python inside the compiled region.

    caller: the `id` of the eager module or function that called it, None where compiled code did. in_place: whether
    `module.compile()` was called on it. stance: that of `torch.compiler.set_stance`.
    """

    name: str
    code: Code
    caller: int | None
    is_torchs: bool
    in_place: bool = False
    stance: str = "default"


@dataclass(frozen=True, slots=True)
class ArtifactCall:
    """A call that saved or loaded artifacts: their keys, and how many graphs and cache hits there were by then."""

    action: str
    keys: tuple[str, ...]
    compiled: int
    hits: int
    where: Where


class CallProfiler:
    """Records the calls of the thread that entered it, except while Dynamo compiles.

    names: module paths by `id`. functions: those that were passed to `torch.compile`. codes: functions of which code
    ran that Dynamo wrote. outer_lines: lines at which a function broke because one that it calls did. watched: modules
    by `id`; passed_by: where the user's code first ran each of them outside of any compiled region. called: gets each
    call of what `torch.compile` returned, before it runs, and returns what gets its result. Another profiler stays
    installed; then `active` is False.
    """

    def __init__(
        self,
        log: CompileLog,
        names: Mapping[int, str] | None = None,
        functions: Collection[Code] = (),
        watched: Mapping[int, torch.nn.Module] | None = None,
        called: Called | None = None,
    ) -> None:
        self.ran = 0
        self.eager: dict[int, EagerRun] = {}
        self.artifacts: list[ArtifactCall] = []
        self.codes: set[Code] = set()
        self.outer_lines: set[tuple[str, int]] = set()
        self.passed_by: dict[int, Where] = {}
        self.active = False
        self._log = log
        self._names = names or {}
        self._functions = frozenset(functions)
        self._watched = {} if watched is None else watched
        self._called = called
        self._open: dict[FrameType, Callable[[object], None]] = {}
        self._kinds: dict[int, tuple[str, CodeType]] = {}  # the code objects stay alive, so that each `id` is unique
        self._resumed: Counter[tuple[str, int]] = Counter()
        self._most: Counter[tuple[str, int]] = Counter()
        self._thread = 0
        self._alive: list[object] = []

    def __enter__(self) -> CallProfiler:
        self._thread = threading.get_ident()
        if sys.getprofile() is None:
            self.active = True
            sys.setprofile(self._on)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.active:
            sys.setprofile(None)
        self._thread = 0
        self.next_call()

    def next_call(self) -> None:
        """Another call of the subject begins: breaks are counted within one."""
        self._most |= Counter({(short_path(file), line): n for (file, line), n in self._resumed.items()})
        self._resumed.clear()

    def times(self, file: str, line: int | None) -> int:
        """Return how often code resumed after a break at this line, in the call that did so most; `file` is a short
        path."""
        return self._most[file, line or 0]

    def __call__(self, record: TraceRecord) -> None:
        """Pause recording during compilation: Dynamo's own calls are many."""
        if not self.active or threading.get_ident() != self._thread:
            return
        if record.name == "dynamo_start":
            sys.setprofile(None)
        elif record.name == "compilation_metrics":
            sys.setprofile(self._on)

    def _on(self, frame: FrameType, event: str, value: object) -> None:
        if event != "call" and event != "return":  # this runs at every call of C
            return
        known = self._kinds.get(id(frame.f_code))
        if known is not None and not known[0]:
            return
        compiler = set_eval_frame(None)
        try:
            self._record(frame, event, value, known[0] if known is not None else self._classify(frame))
        finally:
            set_eval_frame(compiler)

    def _record(self, frame: FrameType, event: str, value: object, kind: str) -> None:
        code = frame.f_code
        if not kind:
            return
        if event == "return":
            if kind in ("save", "load"):
                self._record_artifacts(kind, value, frame)
            elif (returned := self._open.pop(frame, None)) is not None:
                returned(value)
        elif kind in ("forward", "function"):
            self._record_eager(frame, kind)
        elif kind == "wrapper":
            call = CompiledCall.of(frame)
            if self._called is not None and call is not None and (returned := self._called(call)) is not None:
                self._open[frame] = returned
        elif kind in ("compiled", "resumed"):
            self.ran += kind == "compiled"
            if (part := resumed_function(code.co_name)) is not None:
                self._resumed[code.co_filename, part[1]] += 1

    def _classify(self, frame: FrameType) -> str:
        """The kind of a code object that runs for the first time."""
        code, kind = frame.f_code, ""
        identity = (code.co_filename, code.co_name, code.co_firstlineno)
        resumed = resumed_function(code.co_name) is not None
        if is_compiled_code(code):
            kind = "compiled"
        elif resumed:
            kind = "resumed"
        elif self._called is not None and is_wrapper_of_compile(code):
            kind = "wrapper"
        elif code in _ARTIFACTS:
            kind = _ARTIFACTS[code]
        elif code.co_name == "forward" and code.co_argcount and not code.co_filename.startswith("<"):
            kind = "forward"
        elif identity in self._functions:
            kind = "function"
        if kind in ("compiled", "resumed"):
            self.codes.add(identity)
            if resumed:
                self._record_outer_lines(frame)
        self._kinds[id(code)] = kind, code
        return kind

    def _kind(self, frame: FrameType) -> str:
        return self._kinds.get(id(frame.f_code), ("",))[0]

    def _record_outer_lines(self, frame: FrameType) -> None:
        """Record the lines of the functions around a break: each resumes in a function of Dynamo's because of it.

        A function that broke before is on the stack with each of its parts; only the innermost is at its line.
        """
        last = _function(frame)
        outer = frame.f_back
        while outer is not None:
            if self._kind(outer) in ("compiled", "resumed") and _function(outer) != last:
                last = _function(outer)
                self.outer_lines.add((outer.f_code.co_filename, outer.f_lineno))
            outer = outer.f_back

    def _record_eager(self, frame: FrameType, kind: str) -> None:
        owner, code = _owner(frame, kind), frame.f_code
        if kind == "forward" and not isinstance(owner, torch.nn.Module):
            return
        if id(owner) in self.eager:
            return
        if not in_compiled_region(frame.f_back):
            if id(owner) in self._watched and id(owner) not in self.passed_by:
                self.passed_by[id(owner)] = Where("compile", "", "", *users_line(frame.f_back))
            return
        self._alive.append(owner)
        name = self._names.get(id(owner), type(owner).__name__) if kind == "forward" else code.co_name
        identity = (code.co_filename, code.co_name, code.co_firstlineno)
        in_place = getattr(owner, "_compiled_call_impl", None) is not None
        caller, is_torchs = self._caller(frame.f_back), not is_users(code.co_filename)
        self.eager[id(owner)] = EagerRun(name, identity, caller, is_torchs, in_place, stance())

    def _caller(self, frame: FrameType | None) -> int | None:
        while frame is not None:
            kind = self._kind(frame)
            if kind in ("forward", "function") and id(_owner(frame, kind)) in self.eager:
                return id(_owner(frame, kind))
            frame = frame.f_back
        return None

    def _record_artifacts(self, action: str, value: object, frame: FrameType) -> None:
        info = value[1] if isinstance(value, tuple) else value
        groups = getattr(info, "artifacts", None) or {}
        keys = tuple(str(key) for group in groups.values() for key in group)
        where = Where("compile", "", "", *users_line(frame.f_back))
        self.artifacts.append(ArtifactCall(action, keys, len(self._log.graphs), len(self._log.hits), where))


# In older releases, 2.9 among them, Dynamo compiles the frames of a profiling hook too: its breaks would be the user's.
leave_out(CallProfiler._on.__code__)


def _function(frame: FrameType) -> tuple[str, str]:
    """The user's function that a frame runs, whole or a part of it after a break."""
    name = frame.f_code.co_name
    part = resumed_function(name)
    return frame.f_code.co_filename, part[0] if part is not None else name


def _owner(frame: FrameType, kind: str) -> object:
    """The module whose `forward` runs in a frame; of a function its code."""
    return frame.f_locals.get(frame.f_code.co_varnames[0]) if kind == "forward" else frame.f_code
