"""Read PyTorch's trace of its compilations: graphs, breaks, guards that failed, failures, caches. No torch runs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from types import FrameType

from ampcheck.compiled.graph.guards import closest, hint, read_guards
from ampcheck.core.run import Where
from ampcheck.records.graphs import Code, Graph, GraphBreak, Recompile
from ampcheck.torchtools.dynamo import TraceRecord
from ampcheck.torchtools.source import is_users, short_path, users_line

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+), in (\S+)', re.MULTILINE)
_BREAK_LINE = re.compile(r"Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")
_OLDER = (
    (r"'skip function graph_break in file .+'", "Call to `torch._dynamo.graph_break()`"),
    (
        r"Data-dependent jump|Dynamic control flow is not supported at the moment.*",
        "Data-dependent branching\n  Explanation: Dynamo does not support tracing dynamic control flow.\n"
        "  Hint: Use `torch.cond` to express dynamic control flow.",
    ),
)
"""Reasons of PyTorch 2.6, several for one break, and what later releases write."""
_ASIDE = re.compile(r"\s*(For more information|Graph break in user code at|from user code|https?:)", re.IGNORECASE)
_GENERIC = ("This graph break", "Dynamo has detected", "It may be possible", "Please report", "Note: Python")
_LIMIT = "Dynamo recompile limit exceeded"
_SOFT = ("Unsupported", "UserError", "StepUnsupported")
_CACHES = {"fx_graph_cache": "FX graph cache", "aotautograd_cache": "AOTAutograd cache"}
_RESULTS = {"hit": "hits", "miss": "misses", "bypass": "bypassed"}
FIRST, WARM, LATE = "first call", "warm-up", "late"
_LENGTH = 240
"""Characters of a reason that messages quote."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A frame that was not compiled.

    cause: `recompile limit`, `backend error`, `graph break`, `skipped` or `unseen`; kind: the class of the exception.
    """

    code: Code | None
    cause: str
    reason: str
    where: Where = field(default_factory=Where)
    kind: str = ""


@dataclass(slots=True)
class CompileLog:
    """A listener of the trace that keeps what its records say, in their order.

    stage: `FIRST` during the first call, `WARM` until the warm-up is over, then `LATE`. hits: keys of cached artifacts
    that were used. frames: how many compilations; empty: functions without a graph; seen: all functions that Dynamo
    looked at.
    """

    stage: str = FIRST
    graphs: list[Graph] = field(default_factory=list)
    breaks: dict[tuple[str, int, str], GraphBreak] = field(default_factory=dict)
    recompiles: list[Recompile] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    caches: Counter[str] = field(default_factory=Counter)
    hits: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    frames: int = 0
    empty: set[Code] = field(default_factory=set)
    seen: set[Code] = field(default_factory=set)
    _calls: int = 0
    _codes: dict[str, Code] = field(default_factory=dict)
    _reasons: dict[str, tuple[str, Where]] = field(default_factory=dict)
    _broken: set[str] = field(default_factory=set)
    _measured: set[str] = field(default_factory=set)
    _varied: dict[Code, set[tuple[str, ...]]] = field(default_factory=dict)

    def next_call(self) -> None:
        """Another call of the warm-up begins."""
        self._calls += 1
        self.stage = FIRST if self._calls == 1 else WARM

    def __call__(self, record: TraceRecord) -> None:
        """Take in one record; of a recompilation also the user's line that called the compiled code."""
        cache, _, result = record.name.rpartition("_")
        if record.name == "dynamo_graph_break_reason":
            self._broken.add(record.compile_id)
            if (found := read_break(record.text)) is not None:
                self._break(found)
        elif record.name == "recompile_reasons":
            where = Where("compile", "", "", *users_line(_innermost_of_torch(sys._getframe())))
            self._reasons[record.compile_id] = record.text, where
        elif record.name == "compilation_metrics":
            self._compiled(record)
        elif cache in _CACHES:
            self.caches[f"{_CACHES[cache]} {_RESULTS[result]}"] += 1
            if result == "hit" and (key := _cache_key(record.text)):
                self.hits.append(key)
        if skip := record.fields.get("cudagraph_skip_reason"):
            self.skips[str(skip)] += 1

    def _compiled(self, record: TraceRecord) -> None:
        fields = record.fields
        reason = str(fields.get("fail_reason") or "")
        self.frames += 1
        self._measured.add(record.compile_id)
        if reason.startswith(_LIMIT) or fields.get("fail_type") == "RecompileLimitExceeded":  # the class until 2.9
            self._limited(record.compile_id, str(fields.get("recompile_reason") or ""), reason)
            return
        if fields.get("co_name") is None:
            return
        code = (str(fields["co_filename"]), str(fields["co_name"]), int(fields["co_firstlineno"]))
        self._codes[record.compile_id.partition("/")[0]] = code
        self.seen.add(code)
        if fields.get("fail_type"):
            self._failed(record, code, reason)
            return
        ops = int(fields.get("graph_op_count") or 0) if fields.get("has_guarded_code") else 0
        if ops:
            seconds = int(fields.get("duration_us") or fields.get("dynamo_cumulative_compile_time_us") or 0) / 1e6
            self.graphs.append(Graph(frame_name(code), ops, seconds, self.stage == LATE))
        elif record.compile_id not in self._broken:  # 2.9 also records functions that it gave up at a break
            self.empty.add(code)
        if fields.get("has_guarded_code"):
            self._recompiled(record, code)

    def end(self) -> None:
        """Nothing more is recorded. Of a function that reached the limit 2.6 writes the guards, and no metrics."""
        for compile_id in self._reasons.keys() - self._measured:
            self._limited(compile_id)
            del self._reasons[compile_id]

    def _limited(self, compile_id: str, text: str = "", reason: str = "") -> None:
        if text := self._reasons.get(compile_id, ("", None))[0] or text:
            guard = read_guards(text)[0].text
            reason = f"the limit of recompilations was reached; the last guard that failed: {guard}"
        known = self._codes.get(compile_id.partition("/")[0])
        self.failures.append(Failure(known, "recompile limit", reason, defined(known)))

    def _failed(self, record: TraceRecord, code: Code, reason: str) -> None:
        file, line = record.fields.get("fail_user_frame_filename"), record.fields.get("fail_user_frame_lineno")
        where = defined(code)
        if file and is_users(str(file)):
            where = Where("compile", file=short_path(str(file)), line=line)
        soft = record.fields["fail_type"] in _SOFT
        if soft and record.compile_id not in self._broken:
            title, advice = _titled(reason)
            self._break(GraphBreak(where, title, advice, frames=frozenset([code[:2]])))
        cause = "graph break" if soft else "backend error"
        self.failures.append(Failure(code, cause, _short(reason), where, record.fields["fail_type"]))

    def _recompiled(self, record: TraceRecord, code: Code) -> None:
        text, caller = self._reasons.pop(record.compile_id, ("", Where("compile")))
        text = text or str(record.fields.get("recompile_reason") or "")
        late, varied = self.stage == LATE, self._varied.setdefault(code, set())
        if not text:
            if late and record.fields.get("graph_op_count"):
                first = "code that had not run before"
                self.recompiles.append(Recompile(frame_name(code), defined(code), "new code", first, late=True))
            return
        guards = read_guards(text)
        guard, repeated = closest(guards, varied)
        # One call that needs a function in three sizes needs three graphs of it: those of its modules' weights.
        repeated = repeated and not (self.stage == FIRST and guard.of_tensor)
        varied |= guard.families
        users = [(file, int(line)) for file, line, _ in _FRAME.findall(guard.stack) if is_users(file)]
        where = defined(code) if is_users(code[0]) else caller
        if users:
            where = Where("compile", file=short_path(users[-1][0]), line=users[-1][1])
        self.recompiles.append(
            Recompile(frame_name(code), where, guard.kind, guard.text, repeated, late, hint(guard.kind))
        )

    def _break(self, new: GraphBreak) -> None:
        key = (new.where.file, new.where.line or 0, new.reason)
        known = self.breaks.get(key)
        self.breaks[key] = replace(new, frames=new.frames | known.frames) if known else new


def read_break(text: str) -> GraphBreak | None:
    """A graph break from the text of its record: line, reason, hints, traceback.

    None where PyTorch's own code asks for the break, as every optimizer does around its step, and where Dynamo refuses
    the file of the schedulers on purpose, which wrap the step of their optimizer.
    """
    text = text.partition("Traceback (most recent call last)")[0]
    head, _, stack = text.partition("User code traceback:")
    for older, newer in _OLDER:
        head = re.sub(rf"^Reason: (?:Unsupported: )?(?:{older})$", f"Reason: {newer}", head, flags=re.M)
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(stack or head)]
    if "Call to `torch._dynamo.graph_break()`" in head and stack and frames and not is_users(frames[-1][0]):
        return None
    if os.path.join("torch", "optim", "lr_scheduler.py") in head:
        return None
    # The compiled region begins at the last wrapper of torch.compile; code further out called it.
    wrappers = [index for index, (f, _, name) in enumerate(frames) if f.endswith(_EVAL_FRAME) and name != "_fn"]
    inside = frames[wrappers[-1] + 1 if wrappers else 0 :]
    users = [frame for frame in inside if is_users(frame[0]) and not _of_standard_library(frame[0])]
    if users:
        file, line, _ = users[-1]
    elif named := _BREAK_LINE.search(head):
        file, line = named[1], int(named[2])
    else:
        file, line, _ = frames[-1] if frames else ("", 0, "")
    title, advice = _titled(re.split(r"^(?:Graph Break )?Reason: (?:Unsupported: )?", head, maxsplit=1, flags=re.M)[-1])
    where = Where("compile", file=short_path(file), line=line or None)
    return GraphBreak(where, title, advice, frames=frozenset((name, function) for name, _, function in inside))


def is_wrapper(code: Code) -> bool:
    """Return whether a function is the one through which Dynamo compiles every module of PyTorch's own."""
    return code[0].endswith(os.path.join("torch", "_dynamo", "external_utils.py"))


def frame_name(code: Code) -> str:
    """`forward (models.py:12)`; the wrapper around a module of PyTorch's own has no name that a user knows."""
    file, name, line = code
    if is_wrapper(code):
        return "the compiled module"
    name = re.sub(r"torch_dynamo_resume_in_(.+)_at_\d+", r"\1, after a break", name)
    return f"{name} ({short_path(file)}:{line})"


def _of_standard_library(file: str) -> bool:
    return file.startswith(os.path.dirname(os.__file__) + os.sep) and "site-packages" not in file


def _innermost_of_torch(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of PyTorch's; those further in are of the logging that calls the listener."""
    while frame is not None and f"{os.sep}torch{os.sep}" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame


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
    return line if len(line) <= _LENGTH else f"{line[: _LENGTH - 3]}..."


def defined(code: Code | None) -> Where:
    """Where a function of the user's begins; no line for any other code."""
    if code is None or not is_users(code[0]):
        return Where("compile")
    return Where("compile", file=short_path(code[0]), line=code[2])


def _cache_key(text: str) -> str:
    try:
        return str(json.loads(text).get("key") or "")
    except (ValueError, AttributeError):
        return ""
