"""Read PyTorch's trace of its compilations: graphs, breaks, guards that failed, failures, caches. No torch runs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from ampcheck.compiled.graph.stats import Code, Graph, GraphBreak, Recompile
from ampcheck.core.run import Where
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
            file, line = users_line(_innermost_of_torch(sys._getframe()))
            self._reasons[record.compile_id] = record.text, Where("compile", file=file, line=line)
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

    None where PyTorch's own code asks for the break, as every optimizer does around its step.
    """
    text = text.partition("Traceback (most recent call last)")[0]
    head, _, stack = text.partition("User code traceback:")
    for older, newer in _OLDER:
        head = re.sub(rf"^Reason: (?:Unsupported: )?(?:{older})$", f"Reason: {newer}", head, flags=re.M)
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(stack or head)]
    if "Call to `torch._dynamo.graph_break()`" in head and stack and frames and not is_users(frames[-1][0]):
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
    """Whether a function is the one through which Dynamo compiles every module of PyTorch's own."""
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


# Guards ----------------------------------------------------------------------------------------------------------

_TENSOR = re.compile(r"tensor '(.*?)' (.+?) mismatch(?: at index (\d+))?")
_SIZE = re.compile(r"([\w.\[\]']+)\.size\(\)\[(\d+)\]")
_TWO_OR_MORE = re.compile(rf"2 <= {_SIZE.pattern}( <= \d+)?")  # of a dynamic size: Dynamo always specialises 0 and 1
_ACTUAL = re.compile(rf"{_TENSOR.pattern}\. expected \d+, actual (\d+)")
_CONSTANT = re.compile(r"(.+?) (==|is|!=|is not|in|not in) .+")
_LENGTH_OF = re.compile(r"len\((.+)\) [=!]= \d+")
_IDENTITY = re.compile(r"___check_(?:obj|type)_id\((.+?), \d+\)|___dict_\w+\((.+?)[,)]")
_STACK = "\nUser stack trace:\n"

HINTS = {
    "shape": "mark the dimension with torch._dynamo.mark_dynamic(tensor, dim) before the first call, compile with "
    "dynamic=True; where Python code needs the size (range, a list of that length) only padding to few sizes helps; "
    "sizes 0 and 1 are always specialised",
    "stride": "bring the input to one memory layout before the call, with contiguous()",
    "rank": "give the input one number of dimensions, or compile one function for each",
    "dtype": "give the input one dtype, or warm up with each that occurs",
    "device": "keep the input on one device, or warm up with each that occurs",
    "requires_grad": "call with inputs that agree in requires_grad, or warm up with both",
    "training flag": "switch train() and eval() seldom, and warm up with both; or compile one function for each",
    "grad mode": "run the warm-up with and without torch.no_grad(), or compile one function for each",
    "inference mode": "use torch.no_grad() where the same code also runs in training, or warm up under inference_mode",
    "autocast": "enter autocast inside the compiled function, or warm up in each autocast state that occurs",
    "constant attribute": "keep what changes in a buffer (register_buffer(name, torch.tensor(value))), or set "
    "torch._dynamo.config.allow_unspec_int_on_nn_module = True for an integer",
    "constant": "pass what changes as a tensor; Python values are compiled into the graph",
    "length": "stack what a list gathers into one tensor, or fill a buffer of fixed size: each length of a list or "
    "dict is compiled again",
    "identity": "keep one object instead of creating a new one for each call",
    "backend": "wrap with torch.compile once, and keep the result",
    "invalidated": "keep the objects that the graph was compiled for alive",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """One failed guard. families: what varies, without its value; a family that failed before has varied before.
    of_tensor: it checks the size, layout, dtype or the like of a tensor."""

    kind: str
    text: str
    families: frozenset[tuple[str, ...]]
    global_state: bool = False
    of_tensor: bool = False
    stack: str = ""


def read_guards(text: str) -> list[Guard]:
    """The failed guards of a recompilation, one for each older compilation, the newest first.

    text: the payload of the record `recompile_reasons`: one reason, or a JSON list of them.
    """
    try:
        reasons = json.loads(text)
    except ValueError:
        reasons = text
    texts = [str(reason) for reason in (reasons if isinstance(reasons, list) else [reasons])]
    return [_guard(text, _actual_sizes(texts)) for text in texts]


def _actual_sizes(reasons: Iterable[str]) -> dict[tuple[str, str], int]:
    """The sizes that the guards of static graphs found, by name and dimension of the tensor."""
    found = [match for reason in reasons if (match := _ACTUAL.search(reason)) and match[2] == "size"]
    return {(match[1], match[3]): int(match[4]) for match in found}


def closest(guards: Sequence[Guard], known: Collection[tuple[str, ...]]) -> tuple[Guard, bool]:
    """The most specific guard, and whether all that differs had differed before.

    Each older compilation names the first of its guards that fails, global state before tensors. Values that have not
    varied yet come first; among those the compilation that agrees longest.
    """

    def order(guard: Guard) -> tuple[bool, bool, int]:
        return guard.families <= set(known), guard.global_state, len(guard.families)

    best = min(guards, key=order)
    return best, best.families <= set(known)


def hint(kind: str) -> str:
    """How recompilations of this kind are avoided."""
    return HINTS.get(kind) or next((HINTS[part] for part in kind.split(" and ") if part in HINTS), "")


def _guard(reason: str, sizes: Mapping[tuple[str, str], int]) -> Guard:
    text, _, stack = reason.partition(_STACK)
    of_module = "allow_unspec_int_on_nn_module" in text  # PyTorch's own advice, which follows such a guard alone
    text = re.sub(r"^\S+: ", "", text, count=1)
    text = re.sub(r"\bL\['(\w+)'\](?! got)", r"\1", text)  # locals as 2.6 writes them
    text = " ".join(text.partition("  #")[0].split())
    if text.startswith("GLOBAL_STATE changed:"):
        flags = text.partition(":")[2].split()
        kinds = list(dict.fromkeys(map(_flag_kind, flags))) or ["global state"]
        families = frozenset(("global", flag) for flag in flags)
        return Guard(" and ".join(kinds), text, families, global_state=True, stack=stack)
    kind, family = _kind(text)
    if (match := _TWO_OR_MORE.fullmatch(text)) and sizes.get((match[1], match[2]), 2 if match[3] else 1) < 2:
        family = (*family, "0 or 1")
    kind = "constant attribute" if of_module and kind == "constant" else kind
    of_tensor = bool(_TENSOR.match(text) or _SIZE.search(text))
    return Guard(kind, text, frozenset([family]), of_tensor=of_tensor, stack=stack)


def _flag_kind(flag: str) -> str:
    if flag.startswith("autocast"):
        return "autocast"
    return "grad mode" if flag == "grad_mode" else flag.replace("_", " ")


def _kind(text: str) -> tuple[str, tuple[str, ...]]:
    """The kind of what differs, and its family."""
    if match := _TENSOR.match(text):
        name, what, index = match[1], match[2], match[3] or ""
        if what == "size":
            return "shape", ("shape", name, index)
        if what == "dispatch key set":
            expected, _, actual = text.partition("actual")
            kinds = {"Autograd": "inference mode", "Autocast": "autocast"}  # autocast in 2.6
            kind = next((kind for key, kind in kinds.items() if (key in expected) != (key in actual)), "dispatch keys")
            return kind, (kind, name)
        return what, (what, name, index)
    if match := _SIZE.search(text):
        return "shape", ("shape", match[1], match[2])
    if "BACKEND_MATCH" in text:
        return "backend", ("backend",)
    if "invalidated" in text:
        return "invalidated", ("invalidated",)
    if re.search(r"\.training(?: == |, \d+\)$)", text):
        return "training flag", ("training",)
    if match := _LENGTH_OF.fullmatch(text):
        return "length", ("length", match[1])
    if match := _IDENTITY.search(text):
        return "identity", ("identity", next(filter(None, match.groups()), text))
    if match := _CONSTANT.fullmatch(text):
        attribute = match[1].startswith("self.") or "._modules[" in match[1]
        return "constant attribute" if attribute else "constant", ("constant", match[1])
    return "other", ("other", re.sub(r"\d+", "#", text))
