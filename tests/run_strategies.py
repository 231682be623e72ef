"""Strategies of runs: every record that JSON can carry, with hostile texts and numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ampcheck.core.excerpt import Excerpt
from ampcheck.core.run import Band, Chart, Coverage, Finding, Run, Series, Table, Verdict, Where

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
SOURCE_LINES = st.lists(
    st.text(st.characters(blacklist_characters="\n", codec="utf-8"), max_size=30), min_size=1, max_size=4
)


@st.composite
def excerpts(draw: st.DrawFn) -> Excerpt:
    lines, first = tuple(draw(SOURCE_LINES)), draw(st.integers(1, 10**6))
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
    excerpt=st.just(Excerpt()) | excerpts(),
    reproduce=TEXT,
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
CHARTS = st.one_of(
    *(
        st.builds(Chart, st.just(kind), TEXT, TEXT, TEXT, tuples(series), tuples(BANDS), TEXT, TEXT)
        for kind, series in (("line", LINES), ("range", ROWS), ("histogram", OUTLINES))
    )
)
RUNS = st.builds(
    Run,
    environment=st.dictionaries(TEXT, SCALAR, max_size=3),
    findings=tuples(FINDINGS),
    coverage=COVERAGES,
    tables=tuples(TABLES),
    charts=tuples(CHARTS),
    title=TEXT,
)
