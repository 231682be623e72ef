"""Findings, and the run that holds them.

Checks produce `Finding`s; renderers (terminal, HTML, JSON) know a `Run` and never a check. Everything here is frozen,
plain Python data without torch, and survives a round trip through JSON, NaN and infinities included.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from ampcheck.core.arm import joined
from ampcheck.core.charts import Band as Band
from ampcheck.core.charts import Chart as Chart
from ampcheck.core.charts import Marker as Marker
from ampcheck.core.charts import Series as Series
from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.excerpt import cut
from ampcheck.core.files import write_atomically
from ampcheck.core.finding import FAIL_ON as FAIL_ON
from ampcheck.core.finding import PROBLEMS as PROBLEMS
from ampcheck.core.finding import SEVERITY as SEVERITY
from ampcheck.core.finding import UNJUDGED as UNJUDGED
from ampcheck.core.finding import Finding as Finding
from ampcheck.core.finding import Scalar as Scalar
from ampcheck.core.finding import Verdict as Verdict
from ampcheck.core.finding import Where as Where
from ampcheck.core.finding import nearest_first as nearest_first
from ampcheck.core.finding import phase_order as phase_order
from ampcheck.core.json_files import from_plain, read_json, tag_nonfinite, to_plain, untag_nonfinite
from ampcheck.core.model_map import ModelMap as ModelMap
from ampcheck.core.model_map import Site as Site
from ampcheck.core.schema_1 import with_arm
from ampcheck.core.text import clean, counted

SCHEMA = 2
"""Version of the JSON form. 2: findings have `arm`, `kind` and `names`."""

_ALWAYS = frozenset({"environment", "findings", "coverage", "tables", "charts", "where", "series", "bands"})
"""Fields that JSON must have although they have a default in Python."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of what was examined (`seen`, by sort) and of what could not be (`unseen`, by reason)."""

    seen: Mapping[str, int] = field(default_factory=dict)
    unseen: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Coverage) -> Coverage:
        def add(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
            return {sort: left.get(sort, 0) + right.get(sort, 0) for sort in (*left, *right)}  # 0 is evidence, too

        return Coverage(add(self.seen, other.seen), add(self.unseen, other.unseen))

    def without(self, sort: str) -> Coverage:
        """The coverage but for one sort, which another counts as well."""
        return Coverage({name: count for name, count in self.seen.items() if name != sort}, self.unseen)

    @property
    def total(self) -> int:
        """The number of examined items of all sorts."""
        return sum(self.seen.values())

    def __str__(self) -> str:
        return ", ".join(counted(count, what) for what, count in self.seen.items()) or "nothing"


@dataclass(frozen=True, slots=True)
class Table:
    """Evidence in rows; numbers stay numbers, so that renderers can align and format them."""

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
    maps: tuple[ModelMap, ...] = ()

    def __add__(self, other: Run) -> Run:
        return merge((self, other))

    def __str__(self) -> str:
        """Every cause, worst first, beneath it the checks that fail because of it, and the coverage; control characters
        are made visible."""
        findings = (text for verdict in SEVERITY for _, text in describe_causes(self.findings, self.of(verdict)))
        return "\n".join((*findings, clean(f"looked at {self.coverage}")))

    def of(self, verdict: Verdict) -> tuple[Finding, ...]:
        """The findings with this verdict, in order."""
        return tuple([finding for finding in self.findings if finding.verdict is verdict])

    def by(self, check: str) -> tuple[Finding, ...]:
        """The findings of this check, in order."""
        return tuple([finding for finding in self.findings if finding.check == check])

    def only(self, checks: Collection[str]) -> Run:
        """The run with the findings of these checks alone."""
        return replace(self, findings=tuple([finding for finding in self.findings if finding.check in checks]))

    @property
    def failed(self) -> bool:
        """True if any check failed."""
        return any(finding.verdict is Verdict.FAIL for finding in self.findings)

    def counts(self) -> dict[Verdict, int]:
        """Return how many findings have each verdict, worst first, without the zeros."""
        return count_verdicts(self.findings)

    def to_json(self) -> dict[str, Any]:
        """This run as data for `json.dumps`, in the form that `from_json` reads."""
        return {key: tag_nonfinite(value) for key, value in {"schema": SCHEMA, **to_plain(self)}.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        """The run that `to_json` wrote.

        Raises `UsageError` for a newer schema, for damaged data, and for tables and charts that cannot be drawn.
        """
        require_schema(data, "this", "run of ampcheck", SCHEMA)
        try:
            plain = untag_nonfinite({name: value for name, value in data.items() if name != "schema"})
            plain["environment"] = {name: untag_nonfinite(value) for name, value in data["environment"].items()}
            if data["schema"] == 1:
                plain["findings"] = tuple(map(with_arm, plain["findings"]))
            run = from_plain(cls, plain, _ALWAYS)
            if any(count < 0 for counts in (run.coverage.seen, run.coverage.unseen) for count in counts.values()):
                raise ValueError("a count of the coverage is negative")
            for table in run.tables:
                if any(not row or len(row) != len(table.columns) for row in table.rows):
                    raise ValueError(f"each row of the table {table.title!r:.40} must have a cell for each column")
            return run
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"this run of ampcheck is damaged ({error!r:.300}): write it again") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form to `path`, as a whole or not at all."""
        write_atomically(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """The run in the file at `path`. Raises `UsageError` where there is none."""
        try:
            data = read_json(path)
        except (OSError, ValueError) as error:
            place = os.fspath(path) or "an empty name"
            raise UsageError(f"no run of ampcheck could be read from {place}: {error}") from error
        try:
            return cls.from_json(data)
        except UsageError as error:
            raise UsageError(f"{os.fspath(path)}: {error}") from error


def renamed(run: Run, old: str, new: str) -> Run:
    """The run of the subject `old` with `new` as its name, in findings, their causes, maps and titles."""
    if old == new:
        return run
    pattern = re.compile(rf"(^|^audit of |: ){re.escape(old)}(?= \[|$)")

    def name(text: str) -> str:
        return pattern.sub(lambda match: match[1] + new, text)

    def cause(key: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        return (*key[:2], name(str(key[2])), *key[3:]) if key else key

    return replace(
        run,
        findings=tuple([replace(one, subject=name(one.subject), cause=cause(one.cause)) for one in run.findings]),
        tables=tuple([replace(one, title=name(one.title)) for one in run.tables]),
        charts=tuple([replace(one, title=name(one.title)) for one in run.charts]),
        maps=tuple([replace(one, subject=name(one.subject)) for one in run.maps]),
        title=name(run.title),
    )


def count_verdicts(findings: Iterable[Finding]) -> dict[Verdict, int]:
    """Return how many findings have each verdict, worst first, without the zeros."""
    count = Counter([finding.verdict for finding in findings])
    return {verdict: count[verdict] for verdict in SEVERITY if verdict in count}


_collectors: ContextVar[tuple[list[Run], ...]] = ContextVar("ampcheck_collectors", default=())


@contextmanager
def collect() -> Iterator[list[Run]]:
    """Collect every run that is emitted inside; collectors nest."""
    runs: list[Run] = []
    token = _collectors.set((*_collectors.get(), runs))
    try:
        yield runs
    finally:
        _collectors.reset(token)


@contextmanager
def emitted_if(settled: Callable[[], bool]) -> Iterator[None]:
    """Emit what the block emits once it has ended and `settled()` holds; otherwise drop it."""
    runs: list[Run] = []
    token = _collectors.set((runs,))
    try:
        yield
    finally:
        _collectors.reset(token)
        for run in runs if settled() else ():
            emit(run)


def emit(run: Run) -> None:
    """Append a run to every open collector."""
    for runs in _collectors.get():
        runs.append(run)


def describe(finding: Finding) -> str:
    """A finding in a few lines: check and verdict, message, location, source, hint; controls are made visible."""
    lines = [f"[{finding.check}] {finding.verdict}: {_indented(f'{finding.subject}: {finding.message}')}"]
    lines += [f"  where: {_indented(where)}"] if (where := str(finding.where)) else []
    lines += [f"    {line}" for line in source_lines(finding)]
    lines += [f"  hint: {_indented(finding.hint)}"] if finding.hint else []
    lines += [f"  accepted {_indented(finding.accepted)}"] if finding.accepted else []
    return clean("\n".join(lines))


def _indented(text: str) -> str:
    """A text whose further lines, such as a name may have, do not pose as lines of the report."""
    return text.replace("\n", "\n      ")


def source_lines(finding: Finding, width: int | None = None) -> Iterator[str]:
    """The excerpt of the source within `width` columns, or else the line itself, unless the message shows it."""
    if finding.excerpt.lines:
        yield from finding.excerpt.drawn(width, finding.where.part)
    elif finding.code and finding.code not in finding.message:
        yield cut(clean(finding.code), width)


def causes_by_key(findings: Sequence[Finding], now: Sequence[Finding]) -> dict[tuple[Scalar, ...], Finding]:
    """The findings that others follow from by their keys, as they are `now`; of equal keys the first is the cause."""
    if not any(map(attrgetter("cause"), findings)):
        return {}
    return {old.key: new for old, new in reversed(list(zip(findings, now, strict=True))) if not old.cause}


def followers(findings: Iterable[Finding]) -> dict[int, list[Finding]]:
    """Return what follows from each finding that is a cause, by the cause's `id`."""
    findings = tuple(findings)
    causes = causes_by_key(findings, findings)
    following: dict[int, list[Finding]] = {}
    for finding in findings:
        if finding.cause in causes:
            following.setdefault(id(causes[finding.cause]), []).append(finding)
    return following


def follow_line(following: Sequence[Finding]) -> str:
    """Return what follows from a cause in one line: `it explains 3 stagnation, precision-loss`."""
    counts = Counter(finding.check for finding in following)
    return f"it explains {', '.join(f'{n:,} {check}' if n > 1 else check for check, n in counts.items())}"


@dataclass(frozen=True, slots=True)
class Cause:
    """A finding that follows from no other, once for all arms in which it was made.

    twins: the findings, which differ in their arm alone. following: the findings that follow from them.
    """

    twins: tuple[Finding, ...]
    following: tuple[Finding, ...]

    @property
    def arms(self) -> str:
        """The arms of all twins as one: `float16 and bfloat16, eager`."""
        return joined(twin.arm for twin in self.twins)

    @property
    def finding(self) -> Finding:
        """The first of the twins; its subject lists the arms of all."""
        first = self.twins[0]
        return replace(first, subject=f"{first.name} [{self.arms}]") if self.arms != str(first.arm) else first


def causes(findings: Sequence[Finding], wanted: Iterable[Finding]) -> list[Cause]:
    """The causes among the wanted findings, in their order."""
    following = followers(findings)
    by_problems = (following.get(id(finding), ()) for finding in findings if finding.verdict in PROBLEMS)
    explained = {id(finding) for group in by_problems for finding in group}
    twins: dict[tuple[str, Verdict, str, Where], list[list[Finding]]] = {}
    for finding in wanted:
        if id(finding) not in explained:
            groups = twins.setdefault((finding.check, finding.verdict, finding.name, finding.where), [])
            group = next((group for group in groups if _are_twins(group, finding)), None)
            groups.append([finding]) if group is None else group.append(finding)
    return [
        Cause(tuple(group), tuple(f for twin in group for f in following.get(id(twin), ())))
        for groups in twins.values()
        for group in groups
    ]


def _are_twins(group: Sequence[Finding], finding: Finding) -> bool:
    """Return whether a finding at the place of others is theirs, in another arm; two of one arm are if they say the
    same."""
    where, same = finding.where, group[0].message == finding.message
    other_arm = all(other.subject != finding.subject for other in group)
    return same or (other_arm and bool(where.file or where.op or where.module))


def describe_causes(findings: Sequence[Finding], wanted: Iterable[Finding]) -> Iterator[tuple[Finding, str]]:
    """Each of the `causes`, and its text: `describe`, with a line of what follows from it."""
    for cause in causes(findings, wanted):
        below = f"\n  {clean(follow_line(cause.following))}" if cause.following else ""
        yield cause.finding, describe(cause.finding) + below


def merge(runs: Iterable[Run]) -> Run:
    """All of the runs as one."""
    runs = tuple(runs)
    return Run(
        {key: value for run in runs for key, value in run.environment.items()},
        tuple([finding for run in runs for finding in run.findings]),
        sum((run.coverage for run in runs), Coverage()),
        tuple(table for run in runs for table in run.tables),
        tuple(chart for run in runs for chart in run.charts),
        next((run.title for run in runs if run.title), ""),
        tuple(model_map for run in runs for model_map in run.maps),
    )
