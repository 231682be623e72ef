"""The waist of the hourglass: what a check says, and the run that keeps it.

Checks produce `Finding`s; renderers (terminal, HTML, JSON) know a `Run` and never a check. Everything here is frozen,
plain Python data without torch, and survives a round trip through JSON, NaN and infinities included.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeAlias

from ampcheck.core.chart import Band as Band
from ampcheck.core.chart import Chart as Chart
from ampcheck.core.chart import Marker as Marker
from ampcheck.core.chart import Series as Series
from ampcheck.core.chart import is_number, require_drawable
from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import read_json, tag_nonfinite, untag_nonfinite, write_atomically
from ampcheck.core.text import clean

SCHEMA = 1
"""Version of the JSON form. 1: the first."""

Scalar: TypeAlias = "str | int | float | bool | None"


class Verdict(str, Enum):
    """What a check concluded. Only `FAIL` fails a build.

    `INCOMPLETE`: the subject prevents a check that was asked for, such as a backward that raises in every precision.
    `SKIP`: the check does not apply to the subject, or this machine lacks what it needs.
    """

    PASS = "pass"
    FAIL = "fail"
    WARN = "warn"
    UNDECIDED = "undecided"
    INCOMPLETE = "incomplete"
    SKIP = "skip"

    def __str__(self) -> str:
        return self.value


SEVERITY: tuple[Verdict, ...] = (
    Verdict.FAIL,
    Verdict.WARN,
    Verdict.UNDECIDED,
    Verdict.INCOMPLETE,
    Verdict.SKIP,
    Verdict.PASS,
)
"""Verdicts in the order in which a reader wants them."""


@dataclass(frozen=True, slots=True)
class Where:
    """The place a finding speaks of; what is unknown stays empty.

    `phase` is forward, backward, update, compile or speed; `module` the dotted path inside the subject (the root is
    `""`); `op` an op overload such as `aten::mm`; `file` and `line` the user's source; `step` counts from 0.
    """

    phase: str = ""
    module: str = ""
    op: str = ""
    file: str = ""
    line: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        parts = [self.phase, self.module, self.op]
        if self.file:
            parts.append(f"{self.file}:{self.line}" if self.line is not None else self.file)
        if self.step is not None:
            parts.append(f"step {self.step}")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict of one check about one subject.

    `observed` and `limit` are in `unit`. `message` states the requirement, what was observed and where; `hint` names
    the knob to turn. `seen` counts the observations (ops, tensors, steps) that the verdict rests on; None where they
    were not counted.
    """

    check: str
    verdict: Verdict
    subject: str
    message: str
    where: Where = Where()
    observed: float | None = None
    limit: float | None = None
    unit: str = ""
    hint: str = ""
    seen: int | None = None

    @property
    def key(self) -> tuple[Scalar, ...]:
        """Equal for findings that differ in their numbers, wording or step alone, such as those of several ranks."""
        where = self.where
        return self.check, self.verdict.value, self.subject, where.phase, where.module, where.op, where.file, where.line


def passed(
    check: str,
    subject: str,
    message: str,
    seen: int,
    *,
    where: Where = Where(),
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
    hint: str = "",
) -> Finding:
    """A pass that rests on `seen` observations; a skip where there were none. The one place that builds a pass."""
    if seen < 1:
        return Finding(check, Verdict.SKIP, subject, f"nothing to judge: {message}", where, hint=hint, seen=0)
    return Finding(check, Verdict.PASS, subject, message, where, observed, limit, unit, hint, seen)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much was looked at (`seen`) and what could not be (`unseen`: reason to count). Coverages add up."""

    seen: Mapping[str, int] = field(default_factory=dict)
    unseen: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(_sum(self.seen, other.seen), _sum(self.unseen, other.unseen))

    @property
    def total(self) -> int:
        """Everything that was looked at, of all sorts together."""
        return sum(self.seen.values())

    def __str__(self) -> str:
        seen = ((_singular(what) if count == 1 else what, count) for what, count in self.seen.items())
        return ", ".join(f"{count:,} {what}" for what, count in seen) or "nothing"


def _singular(what: str) -> str:
    """One of what was counted; its first plural is the noun: `loss` of `losses`, `set of modules` of `sets of ...`."""
    words = what.split(" ")
    for place, word in enumerate(words):
        if word.endswith("s") and not word.endswith("ss") and word != "series":
            words[place] = word[:-2] if word.endswith("sses") else word[:-1]
            break
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class Table:
    """Evidence in rows; a number keeps its type so that renderers can align and format it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Scalar]]
    check: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything one audit, test session or experiment found, with the evidence for it."""

    environment: Mapping[str, Scalar] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    coverage: Coverage = Coverage()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    title: str = ""

    def __add__(self, other: Run) -> Run:
        return merge((self, other))

    def __str__(self) -> str:
        """Every finding, the worst first, and how much was looked at; control characters are made visible."""
        told = (describe(finding) for verdict in SEVERITY for finding in self.of(verdict))
        return "\n".join((*told, clean(f"looked at {self.coverage}")))

    def of(self, verdict: Verdict) -> tuple[Finding, ...]:
        """The findings with this verdict, in the order in which they were made."""
        return tuple(finding for finding in self.findings if finding.verdict is verdict)

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(finding.verdict is Verdict.FAIL for finding in self.findings)

    def counts(self) -> dict[Verdict, int]:
        """How many findings have each verdict, worst first, without the zeros."""
        count = Counter(finding.verdict for finding in self.findings)
        return {verdict: count[verdict] for verdict in SEVERITY if count[verdict]}

    def to_json(self) -> dict[str, Any]:
        """This run as data for `json.dumps`, in the form that `from_json` reads."""
        data = {"schema": SCHEMA, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}
        return {key: tag_nonfinite(value) for key, value in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        """The run that `to_json` wrote. Raises `UsageError` for a newer schema, for damaged data, and for tables and
        charts that cannot be drawn."""
        require_schema(data, "this", "run of ampcheck", SCHEMA)
        try:
            plain = untag_nonfinite(dict(data))
            environment = {key: untag_nonfinite(value) for key, value in data["environment"].items()}
            if not all(isinstance(plain[name], tuple) for name in ("findings", "tables", "charts")):
                raise TypeError("findings, tables and charts must be lists")
            if not all(_is_count(count) for counts in plain["coverage"].values() for count in counts.values()):
                raise TypeError("coverage must be counts")
            if not all(map(_is_scalar, environment.values())):
                raise TypeError("environment must be text, numbers, yes or no")
            run: Run = _checked(
                cls(
                    environment=environment,
                    findings=tuple(finding_from_dict(item) for item in plain["findings"]),
                    coverage=_checked(Coverage(**plain["coverage"])),
                    tables=tuple(_table_from_dict(item) for item in plain["tables"]),
                    charts=tuple(_chart_from_dict(item) for item in plain["charts"]),
                    title=plain.get("title", ""),
                )
            )
            return run
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"this run of ampcheck is damaged ({error!r:.300}): write it again") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form to `path`, whole or not at all."""
        write_atomically(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """The run kept at `path`. Raises `UsageError` where there is none."""
        try:
            data = read_json(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"no run of ampcheck could be read from {os.fspath(path)}: {error}") from error
        return cls.from_json(data)


def finding_to_dict(finding: Finding) -> dict[str, Any]:
    """A finding as plain data that crosses process borders (JSON, execnet)."""
    plain: dict[str, Any] = tag_nonfinite(_plain(finding))
    return plain


def finding_from_dict(data: Mapping[str, Any]) -> Finding:
    """The finding that `finding_to_dict` made."""
    plain = untag_nonfinite(dict(data))
    where = _checked(Where(**plain["where"]))
    finding: Finding = _checked(Finding(**{**plain, "verdict": Verdict(plain["verdict"]), "where": where}))
    return finding


_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "float | None": (float, int, type(None)),
    "int | None": (int, type(None)),
    "float": (float, int),
    "Verdict": (Verdict,),
    "Where": (Where,),
    "Coverage": (Coverage,),
}
"""What a field's annotation allows; all others hold mappings or sequences."""

_BITS = 10_000
"""Of an integer; Python prints no number of more than 4,300 digits."""


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, float)) or (isinstance(value, int) and value.bit_length() <= _BITS)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0 and _is_scalar(value)


def _checked(record: Any) -> Any:
    """A record read from outside, with values of the kinds that its class declares. Raises `TypeError`."""
    for known in fields(record):
        value = getattr(record, known.name)
        kind = str(known.type)
        allowed = _KINDS.get(kind) or ((Mapping,) if kind.startswith("Mapping") else (tuple,))
        large = isinstance(value, int) and not (is_number(value) if "float" in kind else _is_scalar(value))
        if not isinstance(value, allowed) or isinstance(value, bool) or large:
            raise TypeError(f"{known.name} of a {type(record).__name__} cannot be {value!r:.40}")
    return record


def _table_from_dict(data: Mapping[str, Any]) -> Table:
    table: Table = _checked(Table(**data))
    if not all(isinstance(column, str) for column in table.columns):
        raise TypeError(f"the columns of the table {table.title!r:.40} must be text")
    for row in table.rows:
        if not isinstance(row, tuple) or not row or len(row) != len(table.columns):
            raise ValueError(f"each row of the table {table.title!r:.40} must have a cell for each column")
        if not all(map(_is_scalar, row)):
            raise TypeError(f"the cells of the table {table.title!r:.40} must be text, numbers, yes or no")
    return table


def _chart_from_dict(data: Mapping[str, Any]) -> Chart:
    series = tuple(_checked(Series(**item)) for item in data["series"])
    bands = tuple(_checked(Band(**item)) for item in data["bands"])
    markers = tuple(_checked(Marker(**item)) for item in data.get("markers", ()))  # runs before them had none
    chart: Chart = _checked(Chart(**{**data, "series": series, "bands": bands, "markers": markers}))
    require_drawable(chart)
    return chart


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}  # asdict spoils a Counter
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


_collectors: ContextVar[tuple[list[Run], ...]] = ContextVar("ampcheck_collectors", default=())


@contextmanager
def collect() -> Iterator[list[Run]]:
    """Gather every run that is emitted inside; collectors nest and each sees what happens within it."""
    runs: list[Run] = []
    token = _collectors.set((*_collectors.get(), runs))
    try:
        yield runs
    finally:
        _collectors.reset(token)


def emit(run: Run) -> None:
    """Hand a run to whoever collects; without a collector nothing happens."""
    for runs in _collectors.get():
        runs.append(run)


def verify(run: Run) -> Run:
    """Emit `run`, then raise `AssertionError` with every failure in it: the one place where verdicts raise."""
    __tracebackhide__ = True
    emit(run)
    failures = run.of(Verdict.FAIL)
    if failures:
        raise AssertionError("\n\n".join(describe(finding) for finding in failures))
    return run


def describe(finding: Finding) -> str:
    """A finding in a few lines of text: check and verdict, message, place, hint; control characters made visible."""
    lines = [f"[{finding.check}] {finding.verdict}: {finding.subject}: {finding.message}"]
    if place := str(finding.where):
        lines.append(f"  where: {place}")
    if finding.hint:
        lines.append(f"  hint: {finding.hint}")
    return clean("\n".join(lines))


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}  # a count of 0 is evidence, and stays


def merge(runs: Iterable[Run]) -> Run:
    """All of the runs as one."""
    given = tuple(runs)
    return Run(
        {key: value for run in given for key, value in run.environment.items()},
        tuple(finding for run in given for finding in run.findings),
        sum((run.coverage for run in given), Coverage()),
        tuple(table for run in given for table in run.tables),
        tuple(chart for run in given for chart in run.charts),
        next((run.title for run in given if run.title), ""),
    )
