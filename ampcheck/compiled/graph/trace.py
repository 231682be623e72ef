"""PyTorch's records of its compilations, read: graphs, breaks, recompiles, failures, caches. No torch runs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from ampcheck.compiled.graph.guards import closest, hint, read_guards
from ampcheck.compiled.graph.records import Code, Graph, GraphBreak, Recompile
from ampcheck.core.run import Where
from ampcheck.torchtools.dynamo import Told
from ampcheck.torchtools.source import is_users, short_path, users_line

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+), in (\S+)', re.MULTILINE)
_PLACE = re.compile(r"Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_BOUNDARY = (os.path.join("torch", "_dynamo", "eval_frame.py"), os.path.join("torch", "nn", "modules", "module.py"))
_ASIDE = re.compile(r"\s*(For more information|Graph break in user code at|from user code|https?:)", re.IGNORECASE)
_GENERIC = ("This graph break", "Dynamo has detected", "It may be possible", "Please report", "Note: Python")
_LIMIT = "Dynamo recompile limit exceeded"
_SOFT = ("Unsupported", "UserError", "StepUnsupported")
_CACHES = {"fx_graph_cache": "FX graph cache", "aotautograd_cache": "AOTAutograd cache"}
FIRST, WARM, LATE = "first call", "warm-up", "late"
_TEXT = 240
"""Letters of a reason that are shown."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A frame that was not compiled.

    cause: `recompile limit`, `backend error` or `graph break`; kind: the class of the exception.
    """

    code: Code | None
    cause: str
    reason: str
    where: Where = field(default_factory=Where)
    kind: str = ""


@dataclass(slots=True)
class Notes:
    """Listens to the trace. stage: `FIRST` during the first call, `WARM` until the warm-up is over, then `LATE`."""

    stage: str = FIRST
    _calls: int = 0
    _told: list[tuple[str, Told, Where]] = field(default_factory=list)

    def __call__(self, told: Told) -> None:
        """Keep a record; of a recompilation also the user's line that called the compiled code."""
        place = Where("compile")
        if told.name == "recompile_reasons":
            file, line = users_line(_torchs(sys._getframe()))
            place = Where("compile", file=file, line=line)
        self._told.append((self.stage, told, place))

    def next_call(self) -> None:
        """Another call of the warm-up begins."""
        self._calls += 1
        self.stage = FIRST if self._calls == 1 else WARM

    @property
    def compiled(self) -> int:
        """How many graphs were compiled so far."""
        return len(self.read().graphs)

    def read(self) -> Reading:
        """What the records say."""
        reading = Reading()
        for stage, told, place in self._told:
            reading.add(told, stage, place)
        return reading


@dataclass(slots=True)
class Reading:
    """What the records say, in their order.

    hits: keys of cached artifacts that were used. frames: how many compilations; empty: functions without a graph; met:
    all functions that Dynamo looked at.
    """

    graphs: list[Graph] = field(default_factory=list)
    breaks: dict[tuple[str, int, str], GraphBreak] = field(default_factory=dict)
    recompiles: list[Recompile] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    caches: Counter[str] = field(default_factory=Counter)
    hits: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    frames: int = 0
    empty: set[Code] = field(default_factory=set)
    met: set[Code] = field(default_factory=set)
    _codes: dict[str, Code] = field(default_factory=dict)
    _reasons: dict[str, tuple[str, Where]] = field(default_factory=dict)
    _broken: set[str] = field(default_factory=set)
    _known: dict[Code, set[tuple[str, ...]]] = field(default_factory=dict)

    def add(self, told: Told, stage: str, place: Where) -> None:
        """Take in one record, made at `place` of the user's code."""
        cache, _, result = told.name.rpartition("_")
        if told.name == "dynamo_graph_break_reason":
            self._broken.add(told.compile_id)
            self._break(read_break(told.text))
        elif told.name == "recompile_reasons":
            self._reasons[told.compile_id] = told.text, place
        elif told.name == "compilation_metrics":
            self._compiled(told, stage)
        elif cache in _CACHES:
            ending = {"hit": "hits", "miss": "misses", "bypass": "bypassed"}[result]
            self.caches[f"{_CACHES[cache]} {ending}"] += 1
            if result == "hit":
                self.hits += _key(told.text)
        if skip := told.fields.get("cudagraph_skip_reason"):
            self.skips[str(skip)] += 1

    def _compiled(self, told: Told, stage: str) -> None:
        fields = told.fields
        frame, _, _ = told.compile_id.partition("/")
        reason = str(fields.get("fail_reason") or "")
        self.frames += 1
        if reason.startswith(_LIMIT):
            last = self._guards(told)
            text = f"the limit of recompilations was reached; the last guard that failed: {last}" if last else reason
            code = self._codes.get(frame)
            self.failures.append(Failure(code, "recompile limit", text, _place_of(code) if code else Where("compile")))
            return
        if fields.get("co_name") is None:
            return
        code = (str(fields["co_filename"]), str(fields["co_name"]), int(fields["co_firstlineno"]))
        self._codes[frame] = code
        self.met.add(code)
        if fields.get("fail_type"):
            self._failed(told, code, reason)
        elif fields.get("has_guarded_code"):
            ops = int(fields.get("graph_op_count") or 0)
            seconds = int(fields.get("duration_us") or fields.get("dynamo_cumulative_compile_time_us") or 0) / 1e6
            if ops:
                self.graphs.append(Graph(frame_name(code), code, ops, seconds, stage == LATE))
            else:
                self.empty.add(code)
            self._recompiled(told, code, stage)
        else:
            self.empty.add(code)

    def _failed(self, told: Told, code: Code, reason: str) -> None:
        file, line = told.fields.get("fail_user_frame_filename"), told.fields.get("fail_user_frame_lineno")
        where = Where("compile", file=short_path(str(file)), line=line) if file and is_users(str(file)) else Where()
        where = where if where.file else _place_of(code)
        soft = told.fields["fail_type"] in _SOFT
        if soft and told.compile_id not in self._broken:
            title, advice = _titled(reason)
            self._break(GraphBreak(where, title, advice, frames=frozenset([code[:2]])))
        cause = "graph break" if soft else "backend error"
        self.failures.append(Failure(code, cause, _short(reason), where, told.fields["fail_type"]))

    def _recompiled(self, told: Told, code: Code, stage: str) -> None:
        text, called = self._reasons.pop(told.compile_id, ("", Where("compile")))
        text = text or str(told.fields.get("recompile_reason") or "")
        known = self._known.setdefault(code, set())
        if not text:
            if stage == LATE and told.fields.get("graph_op_count"):
                first = "code that had not run before"
                self.recompiles.append(Recompile(frame_name(code), _place_of(code), "new code", first, late=True))
            return
        guards = read_guards(text)
        guard, repeated = closest(guards, known)
        # One call that needs a function in three sizes needs three graphs of it: those of its modules' weights.
        repeated = repeated and not (stage == FIRST and guard.of_tensor)
        known |= guard.families
        where = _innermost(guard.stack) or (_place_of(code) if is_users(code[0]) else called)
        self.recompiles.append(
            Recompile(frame_name(code), where, guard.kind, guard.text, repeated, stage == LATE, hint(guard.kind))
        )

    def _guards(self, told: Told) -> str:
        text, _ = self._reasons.get(told.compile_id, ("", None))
        text = text or str(told.fields.get("recompile_reason") or "")
        return read_guards(text)[0].text if text else ""

    def _break(self, found: GraphBreak) -> None:
        key = (found.where.file, found.where.line or 0, found.reason)
        known = self.breaks.get(key)
        frames = found.frames | known.frames if known else found.frames
        self.breaks[key] = GraphBreak(found.where, found.reason, found.hint, found.times, frames)


def read_break(text: str) -> GraphBreak:
    """The place and the reason of a graph break, from the text of its record: place, reason, hints, traceback."""
    text = text.partition("Traceback (most recent call last)")[0]
    told, _, stack = text.partition("User code traceback:")
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(stack or told)]
    inside = frames[_last_boundary(frames) :]
    place = _PLACE.search(told)
    users = [frame for frame in inside if is_users(frame[0]) and not _is_pythons(frame[0])]
    if users:
        file, line, _ = users[-1]
    elif place:
        file, line = place[1], int(place[2])
    else:
        file, line, _ = frames[-1] if frames else ("", 0, "")
    reason = told.partition("Graph Break Reason: ")[2] or told
    title, advice = _titled(reason)
    where = Where("compile", file=short_path(file), line=line or None)
    return GraphBreak(where, title, advice, frames=frozenset((name, function) for name, _, function in inside))


def is_wrapper(code: Code) -> bool:
    """Whether a function is the one through which Dynamo compiles every module of PyTorch's own."""
    return code[0].endswith(os.path.join("torch", "_dynamo", "external_utils.py"))


def frame_name(code: Code) -> str:
    """`forward (models.py:12)`; the wrapper around a module of PyTorch's own has no name that a user knows."""
    file, name, line = code
    if is_wrapper(code):
        return "the compiled module"
    name = re.sub(r"torch_dynamo_resume_in_(.+)_at_\d+", r"\1, behind a break", name)
    return f"{name} ({short_path(file)}:{line})"


def resumed_in(name: str) -> tuple[str, int] | None:
    """The function, and the line, that a function of Dynamo's goes on with behind a graph break."""
    match = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", name)
    return (match[1], int(match[2])) if match else None


def _is_pythons(file: str) -> bool:
    """Whether a file is of Python's standard library."""
    return file.startswith(os.path.dirname(os.__file__) + os.sep) and "site-packages" not in file


def _torchs(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is PyTorch's; those further in belong to the logging that calls us."""
    while frame is not None and f"{os.sep}torch{os.sep}" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame


def _last_boundary(frames: list[tuple[str, int, str]]) -> int:
    """Where the compiled region begins in a traceback; code further out called it."""
    found = [place for place, (file, _, name) in enumerate(frames) if file.endswith(_BOUNDARY[0]) and name != "_fn"]
    return found[-1] + 1 if found else 0


def _titled(reason: str) -> tuple[str, str]:
    """A break's reason in one sentence, and PyTorch's advice without what it says of every break."""
    head, _, rest = reason.partition("\n  Explanation: ")
    lines = [line.strip() for line in head.strip().splitlines() if line.strip() and not _ASIDE.match(line)]
    title = (lines or ["no reason given"])[-1 if rest else 0]
    explanation = rest.partition("\n")[0].strip()
    hints = [line.strip() for line in re.findall(r"\n  Hint: (.+)", rest)]
    useful = [line for line in hints if not line.startswith(_GENERIC)]
    return _short(f"{title}: {explanation}" if explanation else title), " ".join(useful[:2])


def _short(text: str) -> str:
    line = re.sub(r" at 0x[0-9a-f]+", "", " ".join(text.partition("\n\n")[0].split()))
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 3]}..."


def _place_of(code: Code) -> Where:
    file, _, line = code
    return Where("compile", file=short_path(file), line=line) if is_users(file) else Where("compile")


def _innermost(stack: str) -> Where | None:
    users = [(file, int(line)) for file, line, _ in _FRAME.findall(stack) if is_users(file)]
    return Where("compile", file=short_path(users[-1][0]), line=users[-1][1]) if users else None


def _key(text: str) -> Iterator[str]:
    try:
        key = json.loads(text).get("key")
    except (ValueError, AttributeError):
        return
    if key:
        yield str(key)
