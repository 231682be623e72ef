"""What really runs while compiled code runs: told by the code objects that Python's own profiling hook names."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from ampcheck.compiled.graph.records import Code
from ampcheck.compiled.graph.trace import Notes, resumed_in
from ampcheck.core.run import Where
from ampcheck.torchtools.dynamo import Told, asked_for, is_compiled_code, resumed_at
from ampcheck.torchtools.source import is_users, short_path, users_line

_ARTIFACTS = {
    action: function.__code__
    for action in ("save", "load")
    if (function := getattr(torch.compiler, f"{action}_cache_artifacts", None)) is not None  # 2.7
}


@dataclass(frozen=True, slots=True)
class EagerRun:
    """A module, or a function, that ran as plain Python inside the compiled region. above: what called it, if eager."""

    name: str
    code: Code
    above: int | None
    is_torchs: bool


@dataclass(frozen=True, slots=True)
class ArtifactCall:
    """A call that saved or loaded: the keys that it named, and what had been compiled and used by then."""

    action: str
    keys: tuple[str, ...]
    compiled: int
    hits: int
    where: Where


class CallWatch:
    """Entered, every call of this thread is looked at, except while Dynamo compiles.

    names: module paths by `id`. functions: those that were handed to `torch.compile`. codes: functions of which code
    ran that Dynamo wrote. carried: lines at which a function broke because one that it calls did. Where another
    profiler is at work it keeps its place, and `counted` is False.
    """

    def __init__(self, notes: Notes, names: Mapping[int, str], functions: Collection[Code] = ()) -> None:
        self.ran = 0
        self.eager: dict[int, EagerRun] = {}
        self.artifacts: list[ArtifactCall] = []
        self.codes: set[Code] = set()
        self.carried: set[tuple[str, int]] = set()
        self.counted = False
        self._notes = notes
        self._names = names
        self._functions = frozenset(functions)
        self._sorts: dict[int, tuple[str, CodeType]] = {}
        self._resumed: Counter[tuple[str, int]] = Counter()
        self._most: Counter[tuple[str, int]] = Counter()
        self._thread = 0
        self._kept: list[Any] = []

    def __enter__(self) -> CallWatch:
        self._thread = threading.get_ident()
        if sys.getprofile() is None:
            self.counted = True
            sys.setprofile(self._on)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.counted:
            sys.setprofile(None)
        self._thread = 0
        self.next_call()

    def next_call(self) -> None:
        """Another call of the subject begins: breaks are counted within one."""
        self._most |= Counter({(short_path(file), line): n for (file, line), n in self._resumed.items()})
        self._resumed.clear()

    def times(self, file: str, line: int | None) -> int:
        """How often code went on behind a break at this line, in the call that did so most; `file` is a short path."""
        return self._most[file, line or 0]

    def hear(self, told: Told) -> None:
        """Stand back while Dynamo compiles: its own calls are many and say nothing."""
        if not self.counted or threading.get_ident() != self._thread:
            return
        if told.name == "dynamo_start":
            sys.setprofile(None)
        elif told.name == "compilation_metrics":
            sys.setprofile(self._on)

    def _on(self, frame: FrameType, event: str, value: Any) -> None:
        if event != "call" and event != "return":  # this runs at every call of C
            return
        code = frame.f_code
        sort = self._sorts.get(id(code)) or self._sort(frame)
        if not sort[0]:
            return
        if event == "return":
            if sort[0] in _ARTIFACTS:
                self._artifacts(sort[0], value, frame)
        elif sort[0] == "compiled":
            self.ran += 1
            if (line := resumed_at(code)) is not None:
                self._resumed[code.co_filename, line] += 1
        elif sort[0] == "resumed":
            self._resumed[code.co_filename, resumed_at(code) or 0] += 1
        elif sort[0] in ("forward", "function"):
            self._ran_eager(frame, sort[0])

    def _sort(self, frame: FrameType) -> tuple[str, CodeType]:
        """What a code object is that runs for the first time; it is kept, so that its `id` stays its own."""
        code, sort = frame.f_code, ""
        saved = (name for name, known in _ARTIFACTS.items() if known is code)
        if is_compiled_code(code):
            sort = "compiled"
        elif resumed_at(code) is not None:
            sort = "resumed"
        elif action := next(saved, ""):
            sort = action
        elif code.co_name == "forward" and code.co_argcount and not code.co_filename.startswith("<"):
            sort = "forward"
        elif (code.co_filename, code.co_name, code.co_firstlineno) in self._functions:
            sort = "function"
        if sort in ("compiled", "resumed"):
            self.codes.add((code.co_filename, code.co_name, code.co_firstlineno))
            if resumed_at(code) is not None:
                self._carry(frame)
        self._sorts[id(code)] = found = (sort, code)
        return found

    def _carry(self, frame: FrameType) -> None:
        """Note where the functions around a break stand: each goes on in a function of Dynamo's for this break's sake.

        A function that has broken before stands on the stack with each of its parts; only the innermost is here now.
        """
        last = _function(frame)
        back = frame.f_back
        while back is not None:
            if self._sorts.get(id(back.f_code), ("",))[0] in ("compiled", "resumed") and _function(back) != last:
                last = _function(back)
                self.carried.add((back.f_code.co_filename, back.f_lineno))
            back = back.f_back

    def _ran_eager(self, frame: FrameType, sort: str) -> None:
        code = frame.f_code
        owner = _owner(frame, sort)
        if sort == "forward" and not isinstance(owner, torch.nn.Module):
            return
        key = id(owner)
        if key in self.eager or not asked_for(frame.f_back):
            return
        self._kept.append(owner)
        name = self._names.get(key, type(owner).__name__) if sort == "forward" else code.co_name
        identity = (code.co_filename, code.co_name, code.co_firstlineno)
        self.eager[key] = EagerRun(name, identity, self._above(frame.f_back), not is_users(code.co_filename))

    def _above(self, frame: FrameType | None) -> int | None:
        while frame is not None:
            sort = self._sorts.get(id(frame.f_code), ("",))[0]
            if sort in ("forward", "function") and id(_owner(frame, sort)) in self.eager:
                return id(_owner(frame, sort))
            frame = frame.f_back
        return None

    def _artifacts(self, action: str, value: Any, frame: FrameType) -> None:
        info = value[1] if action == "save" and value is not None else value
        groups = getattr(info, "artifacts", None) or {}
        keys = tuple(str(key) for group in groups.values() for key in group)
        file, line = users_line(frame.f_back)
        reading = self._notes.read()
        where = Where("compile", file=file, line=line)
        self.artifacts.append(ArtifactCall(action, keys, len(reading.graphs), len(reading.hits), where))


def _function(frame: FrameType) -> tuple[str, str]:
    """The user's function that a frame runs, or a part of behind a break."""
    name = frame.f_code.co_name
    part = resumed_in(name)
    return frame.f_code.co_filename, part[0] if part is not None else name


def _owner(frame: FrameType, sort: str) -> Any:
    """The module whose `forward` runs in a frame; of a function its code."""
    return frame.f_locals.get(frame.f_code.co_varnames[0]) if sort == "forward" else frame.f_code
