"""The check recompile, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.run import Verdict
from checks.compile.records import CLEAN, again, failed, found


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6), st.integers(0, 6), st.booleans())
def test_recompilations_count_when_late_or_repeated(ones: list[tuple[bool, bool]], limit: int, warm: bool) -> None:
    stats = replace(CLEAN, warm=warm, recompiles=tuple(again(repeated=r, late=late) for r, late in ones))
    count = sum(repeated or late for repeated, late in ones)
    assert bool(failed(stats, max_recompiles=limit)) == (count > limit)


@pytest.mark.parametrize(
    ("kind", "warm", "counts"), [("grad mode", True, 0), ("grad mode", False, 1), ("shape", False, 0)]
)
def test_without_a_warm_up_only_a_new_size_is_free(kind: str, warm: bool, counts: int) -> None:
    assert len(failed(replace(CLEAN, warm=warm, recompiles=(again(kind),)))) == counts


def test_recompilations_that_are_free_are_told_beside_those_that_fail() -> None:
    (finding,) = found(replace(CLEAN, warm=False, recompiles=(again("shape"), again("grad mode"))), "recompile")
    assert finding.verdict is Verdict.FAIL
    assert "there were 1;" in finding.message
    assert "1 recompilation to learn what varies (shape)" in finding.message


def test_recompilations_are_grouped_by_kind() -> None:
    ones = tuple(again(kind, late=True) for kind in ("shape", "grad mode", "shape"))
    messages = [f.message for f in found(replace(CLEAN, recompiles=ones), "recompile")]
    assert len(messages) == 2
    assert "2 of forward (net.py:3) by its guard on shape" in messages[0]
    assert "1 of forward (net.py:3) by its guard on the grad mode" in messages[1]
