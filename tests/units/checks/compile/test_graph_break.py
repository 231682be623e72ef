"""The check graph-break, on records."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ampcheck.records.graphs import Fallback
from checks.compile.records import CLEAN, broken, failed, found


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 12))
def test_breaks_fail_exactly_when_a_call_has_more_than_the_limit(times: list[int], limit: int) -> None:
    stats = replace(CLEAN, breaks=tuple(broken(line, n) for line, n in enumerate(times)))
    expected = ["graph-break"] * len(times) if sum(times) > limit else []
    assert failed(stats, max_breaks=limit) == expected


def test_what_ran_eager_through_a_break_is_told_with_the_break() -> None:
    stats = replace(CLEAN, breaks=(broken(3),), fallbacks=(Fallback(("loop",), "graph break", "cut"),))
    assert failed(stats) == ["graph-break"]
    assert "eager because of breaks: loop" in found(stats, "graph-break")[0].message
    assert "loop" in found(stats, "eager-fallback", max_breaks=1)[0].message
