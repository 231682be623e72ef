"""Tables on a terminal: side by side where words fit, else a paragraph for each row; nothing is ever cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ampcheck.core.run import Table
from ampcheck.report import print_tables

COLUMNS = ("start", "to first step, s", "compiler, s", "times faster than eager", "has paid after")
ROW = ("cold, dynamic shapes (default, float32)", 34.25, 20.125, "1.234 (1.201 to 1.267)", "undecided, 4,012 calls")


def printed(table: Table, width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        print_tables([table])
    return capsys.readouterr().out.splitlines()


def test_columns_that_fit_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(Table("Costs", COLUMNS, [ROW]), 160, capsys)
    assert any("start" in line and "compiler, s" in line for line in lines)
    assert any(ROW[0] in line and "34.2" in line for line in lines)


def test_a_row_becomes_a_paragraph_where_words_would_be_broken(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(Table("Costs", COLUMNS, [ROW, (*ROW[:2], None, *ROW[3:])]), 60, capsys)
    assert lines[:3] == [
        "Costs",
        "cold, dynamic shapes (default, float32)",
        "    to first step, s: 34.2; compiler, s: 20.1; times faster",
    ]
    assert "compiler" not in "".join(lines[5:]), "what a row does not have is left out"


@pytest.mark.parametrize("width", [200, 30])
def test_no_control_character_reaches_the_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    name = "net\x1b[2J\x9b31m\ud800"
    told = "\n".join(printed(Table(name, (name, name), [(name, 1)], note=name), width, capsys))
    assert not set(told) & set("\x1b\x9b\ud800")
    assert told.count("\\x1b") >= 4


def test_a_yes_or_no_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    told = "".join(printed(Table("Kept", ("dtype", "survives"), [("float16", True), ("bfloat16", False)]), 80, capsys))
    assert "yes" in told
    assert "no" in told
    assert "True" not in told


@given(
    width=st.integers(30, 200),
    cells=st.lists(
        st.lists(st.text("abc ü模", min_size=1, max_size=12), min_size=3, max_size=3), min_size=1, max_size=4
    ),
)
def test_every_word_is_told_within_the_width(width: int, cells: list[list[str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        capsys = _Captured(patch)
        patch.setenv("COLUMNS", str(width))
        print_tables([Table("title", ("one", "two", "three"), cells)])
    assert all(cell_len(line) <= width for line in capsys.lines)
    told = " ".join(capsys.lines)
    for row in cells:
        for word in " ".join(row).split():
            assert word in told


class _Captured:
    """What is written to stdout."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import io
        import sys

        self._stream = io.StringIO()
        patch.setattr(sys, "stdout", self._stream)

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()
