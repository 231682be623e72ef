"""What the package exports, what it costs to import, and the text that every renderer shares."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ampcheck.report as report
from ampcheck.core.run import Chart, Finding, Run, Table, Verdict
from ampcheck.report.sections import arrange
from ampcheck.report.text import clean, command_lines, number, quantity, shorten_middle

HEAVY = ("torch", "matplotlib", "jinja2", "rich", "numpy")


def imported_after(statement: str) -> list[str]:
    code = f"import sys; {statement}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_importing_the_package_is_cheap() -> None:
    statement = "from ampcheck import Run, report; list(report.summary_lines(Run(), width=80))"
    assert imported_after(statement) == []


def test_the_test_above_can_fail() -> None:
    assert imported_after("import jinja2") == ["jinja2"]


def test_the_exported_names_exist() -> None:
    assert all(getattr(report, name) for name in report.__all__)
    assert sorted(report.__all__) == report.__all__


def test_checks_come_worst_first_and_keep_their_evidence() -> None:
    run = Run(
        findings=(
            Finding("flush", Verdict.PASS, "a", "1"),
            Finding("overflow", Verdict.PASS, "a", "2"),
            Finding("overflow", Verdict.FAIL, "b", "3"),
        ),
        tables=(Table("t", (), (), check="flush"), Table("u", (), ()), Table("v", (), (), check="unjudged")),
        charts=(Chart("line", "c", "x", check="overflow"),),
    )
    content = arrange(run)
    assert [section.check for section in content.checks] == ["overflow", "flush", "unjudged"]
    overflow, flush, unjudged = content.checks
    assert [finding.message for finding in overflow.findings] == ["3", "2"]
    assert overflow.worst_of("a") == (1, Verdict.PASS)
    assert overflow.worst_of("c")[0] == 0
    assert [finding.message for finding in flush.findings] == ["1"]
    assert unjudged.worst is None
    assert [topic.name for topic in content.topics] == ["overflow", "flush", "unjudged", ""]
    assert [table.title for table in content.topics[-1].tables] == ["u"]
    assert [[chart.title for chart in topic.charts] for topic in content.topics] == [["c"], [], [], []]
    assert [[table.title for table in topic.tables] for topic in content.topics] == [[], ["t"], ["v"], ["u"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1234, "1,234"), (-1234567, "-1,234,567"), (10**15, "1e15"), (10**400, "1e400"), (True, "yes"),
        (None, "–"), ("a", "a"), (65504.0, "65,504"), (6.55e4 + 0.5, "65,500"), (655040.0, "6.55e5"), (0.31, "0.31"),
        (0.0, "0"), (-0.0, "-0"), (999.4, "999"), (999.7, "1,000"), (0.001, "0.001"), (0.000999, "9.99e-4"),
        (1e-8, "1e-8"),
        (5e-324, "4.94e-324"), (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (3.4028e38, "3.4e38"),
    ],
)  # fmt: skip
def test_numbers_are_for_people(value, text: str) -> None:
    assert number(value) == text


def test_a_quantity_has_its_unit_or_is_empty() -> None:
    assert quantity(0.31, "%") == "0.31 %"
    assert quantity(2.0, "") == "2"
    assert quantity(None, "%") == ""


def test_names_are_shortened_in_the_middle() -> None:
    assert shorten_middle("abc", 3) == "abc"
    assert shorten_middle("abcdefghij", 6) == "ab…hij"


def test_controls_are_made_visible() -> None:
    assert clean("a\x1b[0m\x9b\ud800\u202e\n\tmodèle") == "a\\x1b[0m\\x9b\\ud800\\u202e\n\tmodèle"


WORD = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=120)


@settings(max_examples=20)
@given(st.lists(WORD, min_size=1, max_size=5), st.sampled_from([20, 60, 80]))
def test_a_command_that_is_folded_is_one_command_for_a_shell(words: list[str], width: int) -> None:
    lines = list(command_lines("  reproduce:", shlex.join(words), width))
    assert all(len(line) <= width for line in lines)
    pasted = "\n".join(lines).partition("reproduce:")[2]
    printed = subprocess.run(["sh", "-c", f"printf '%s\\0' {pasted}"], check=True, capture_output=True, text=True)
    assert printed.stdout.split("\0")[:-1] == words
