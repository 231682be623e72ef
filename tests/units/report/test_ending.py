"""A watched block ends with its line, and in 25 lines with what no error shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from runs import FINDINGS

from ampcheck.core.run import Coverage, Finding, Run, Verdict
from ampcheck.report.ending import print_ending


def ending(run: Run, *raised: Verdict, width: int = 80) -> list[str]:
    """The printed lines."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setenv("COLUMNS", str(width))
        patch.setattr("builtins.print", lambda line: lines.append(line))
        print_ending(run, raised)
    return lines


def test_many_findings_are_counted_and_the_run_shows_them() -> None:
    findings = tuple(Finding("overflow", Verdict.FAIL, f"block {i}", "it overflows", hint="mend it") for i in range(40))
    lines = ending(Run(findings=findings, coverage=Coverage({"ops": 3})))
    assert lines[:4] == ["ampcheck: 3 ops, 40 findings", "FAIL overflow: block 0", "  it overflows", "  hint: mend it"]
    assert len(lines) <= 25
    assert " ".join(lines[-2:]).split("shortened or left out: ")[1].startswith("3")
    assert "print(seen.run)" in " ".join(lines[-2:])
    assert ending(Run(findings=findings, coverage=Coverage({"ops": 3})), Verdict.FAIL) == lines[:1], (
        "the error shows it"
    )


@given(st.lists(FINDINGS, max_size=40), st.sampled_from([40, 80, 120]))
def test_an_ending_has_at_most_25_lines_within_the_width(findings: list[Finding], width: int) -> None:
    lines = ending(Run(findings=tuple(findings)), width=width)
    assert len(lines) <= 25
    assert all(cell_len(line) <= width for line in lines[1:])
