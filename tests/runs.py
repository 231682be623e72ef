"""Runs for property tests: of every shape, with the texts and numbers that break renderers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ampcheck.core.arm import Arm
from ampcheck.core.excerpt import Excerpt
from ampcheck.core.run import (
    Band,
    Chart,
    Coverage,
    Finding,
    Marker,
    ModelMap,
    Run,
    Series,
    Site,
    Table,
    Verdict,
    Where,
)

HOSTILE = [
    "float",
    "nan",
    "inf",
    "-inf",
    '{"float": "nan"}',
    "NaN",
    "\ud800",
    "\u2028",
    "\x00",
    "</script>",
    "é",
    "schema",
]
KNOWN_TEXT = st.sampled_from(HOSTILE)
TEXT = KNOWN_TEXT | st.text(max_size=8)
NUMBER = st.floats() | st.integers()
SCALAR = TEXT | NUMBER | st.booleans() | st.none()
COUNTS = st.dictionaries(TEXT, st.integers(0, 10**12), max_size=3)


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


WHERES = st.builds(
    Where, TEXT, TEXT, TEXT, TEXT, line=st.none() | st.integers(0, 10**6), step=st.none() | st.integers(0, 10**6)
)
SOURCE_LINE = st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=30)


@st.composite
def excerpts(draw: st.DrawFn) -> Excerpt:
    lines, first = tuple(draw(st.lists(SOURCE_LINE, min_size=1, max_size=4))), draw(st.integers(1, 10**6))
    line = draw(st.integers(0, len(lines) - 1))
    start = draw(st.integers(0, len(lines[line])))
    return Excerpt(lines, first, first + line, start, draw(st.integers(start, len(lines[line]))))


FINDINGS = st.builds(
    Finding,
    TEXT,
    st.sampled_from(Verdict),
    TEXT,
    TEXT,
    where=WHERES,
    observed=st.none() | st.floats(),
    limit=st.none() | st.floats(),
    unit=TEXT,
    hint=TEXT,
    seen=st.none() | st.integers(0, 10**12),
    cause=st.just(()) | st.lists(SCALAR, min_size=8, max_size=8).map(tuple),
    code=TEXT,
    accepted=TEXT,
    excerpt=st.just(Excerpt()) | excerpts(),
    reproduce=TEXT,
    family=TEXT,
    arm=st.builds(Arm, *[TEXT] * 4, native=st.booleans(), backend=TEXT),
    kind=TEXT,
    names=tuples(TEXT),
)
COVERAGES = st.builds(Coverage, COUNTS, COUNTS)


def exactly(count: int, of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*[of] * count)


TABLES = st.integers(0, 3).flatmap(
    lambda width: st.builds(
        Table, TEXT, exactly(width, TEXT), tuples(exactly(width, SCALAR)) if width else st.just(()), TEXT, TEXT
    )
)
LINES = st.integers(0, 3).flatmap(
    lambda count: st.builds(Series, TEXT, exactly(count, st.floats()), exactly(count, st.floats()), TEXT)
)
ROWS = st.builds(Series, TEXT, st.lists(st.floats(), max_size=5).map(tuple), st.just(()), TEXT)
EDGES = st.sets(st.floats(-1e300, 1e300, exclude_min=True, exclude_max=True), min_size=2, max_size=4)
OUTLINES = EDGES.flatmap(
    lambda edges: st.builds(
        Series, TEXT, st.just(tuple(sorted(edges))), exactly(len(edges) - 1, st.floats(allow_nan=False)), TEXT
    )
)
BANDS = st.builds(Band, TEXT, st.floats(), st.floats())
MARKERS = st.builds(Marker, TEXT, st.floats(), TEXT)
CHARTS = st.one_of(
    *(
        st.builds(Chart, st.just(kind), TEXT, TEXT, TEXT, tuples(series), tuples(BANDS), TEXT, TEXT, tuples(MARKERS))
        for kind, series in (("line", LINES), ("range", ROWS), ("histogram", OUTLINES))
    )
)
FEW = st.none() | st.floats()
SITES = st.builds(
    Site, *[TEXT] * 4, st.none() | st.integers(0, 10**6), TEXT, *[FEW] * 4, st.integers(0, 10**9), *[FEW] * 3,
    st.integers(-1090, 1090), st.lists(st.integers(0, 10**9), max_size=4).map(tuple), TEXT,
)  # fmt: skip
MAPS = st.builds(ModelMap, TEXT, tuples(SITES), tuples(BANDS), TEXT)
PLAIN_RUNS = st.builds(
    Run,
    environment=st.dictionaries(TEXT, SCALAR, max_size=3),
    findings=tuples(FINDINGS),
    coverage=COVERAGES,
    tables=tuples(TABLES),
    charts=tuples(CHARTS),
    title=TEXT,
    maps=tuples(MAPS),
)


def _explained(run: Run, cause: int, follower: int) -> Run:
    """The run with a finding that follows from another one of it."""
    findings = list(run.findings)
    if len(findings) > 1 and cause % len(findings) != follower % len(findings):
        first, second = cause % len(findings), follower % len(findings)
        findings[first] = replace(findings[first], cause=())
        findings[second] = replace(findings[second], cause=findings[first].key)
    return replace(run, findings=tuple(findings))


RUNS = st.builds(_explained, PLAIN_RUNS, st.integers(0, 2), st.integers(0, 2))

_EVIL = "::error file=x,line=1::%0A\r\n::stop-commands::x\n\x1b[31m\u202e</script><!-- --> | `a` ]]> \x00 \ufffe @all"
HOSTILE_RUN = Run(
    {"ampcheck": _EVIL, _EVIL: float("nan"), "target": "x" * 100_000},
    (
        *(Finding(_EVIL, verdict, _EVIL, _EVIL, Where(*[_EVIL] * 4, -1, -1), float("nan"), float("inf"), _EVIL, _EVIL)
          for verdict in Verdict),
        Finding("overflow", Verdict.FAIL, "m", "word " * 20_000, Where(file="C:\\models\\net.py", line=3)),
        Finding("overflow", Verdict.FAIL, "m", "", Where(file="odd\udc80\ud800.py", line=0), code="x" * 100_000),
        Finding("overflow", Verdict.FAIL, "m", "no place"),
        Finding("overflow", Verdict.FAIL, "m", "a device", Where(file="/dev/zero", line=1)),
        Finding("overflow", Verdict.FAIL, "m", "a folder", Where(file="/", line=1)),
    ),
    Coverage({_EVIL: 1}, {_EVIL: 2}),
    (Table(_EVIL, (_EVIL, "b"), ((_EVIL, None), (float("nan"), True)), _EVIL, _EVIL),),
    title=_EVIL,
)  # fmt: skip
"""Text that a terminal, Markdown, HTML, XML or a runner of workflows could obey; paths of every kind."""
