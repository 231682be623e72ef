"""The terminal: 25 lines with the cause first, within the width, plain where it must be; -v shows everything."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from runs import FINDINGS, RUNS
from sample_run import PROBLEMS, sample_run

from ampcheck.core.arm import Arm
from ampcheck.core.excerpt import excerpt_of
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
from ampcheck.report import print_run, summary_lines
from ampcheck.report.fitting import plain
from ampcheck.report.sections import arrange
from ampcheck.report.text import wrap
from ampcheck.report.verdict_table import verdict_table

HOSTILE = "[bold]x[/] \x1b[31m\r\x9b 模型模型模型模型 " + "long_word" * 30


def printed(run: Run, *, width: int = 100, verbose: bool = False, quiet: bool = False, **settings) -> str:
    stream = io.StringIO()
    print_run(run, Console(file=stream, width=width, **settings), verbose=verbose, quiet=quiet)
    return stream.getvalue()


def flat(lines) -> str:
    return " ".join(" ".join(lines).split())


def test_failures_come_first_and_in_full() -> None:
    lines = list(summary_lines(sample_run(), width=100, limit=None))
    assert lines[0] == "nightly audit: 3 failed, 2 warnings, 1 undecided, 4 skipped, 46 passed"
    heads = [line.split(" ")[0] for line in lines if not line.startswith(" ")][1:]
    assert heads == ["FAIL"] * 3 + ["WARN"] * 2 + ["undecided", "skip", "passed:", "coverage:"]
    text = flat(lines)
    for finding in PROBLEMS.values():
        if finding.verdict in (Verdict.FAIL, Verdict.WARN):
            assert finding.message in text
            assert f"where: {finding.where}" in text
            assert f"hint: {finding.hint}" in text
    assert "observed: inf, limit: 65,504" in text


def test_the_coverage_is_last_and_says_what_was_not_seen() -> None:
    text = flat(summary_lines(sample_run(), width=80, limit=None))
    last = text[text.index("coverage: 48,213 ops") :]
    assert last.endswith(
        "not seen: inside a custom Triton kernel (3), output of a C++ extension without a meta kernel (1)"
    )


def test_passes_are_counted_or_with_verbose_listed() -> None:
    brief = list(summary_lines(sample_run(), width=200))
    full = list(summary_lines(sample_run(), width=120, verbose=True))
    assert any(line.startswith("passed: overflow 6, low-precision-error 7") for line in brief)
    assert sum(line.startswith("pass ") for line in full) == 46


def test_a_pass_that_is_the_only_answer_is_printed() -> None:
    message = "the same function; 3 results differ by at most 2 roundings"
    only = Run(findings=(Finding("parity", Verdict.PASS, "a and b", message),), coverage=Coverage({"results": 3}))
    assert f"pass parity: a and b: {message}" in printed(only)
    assert "pass parity: " not in printed(
        replace(only, findings=(*only.findings, Finding("parity", Verdict.SKIP, "c", "m")))
    )


def test_reasons_shared_by_many_subjects_stand_once() -> None:
    lines = list(summary_lines(sample_run(), width=100, limit=None))
    assert "skip loss-dtype ×4: the compiled step returns no loss: nothing to judge" in lines


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [0, 20, 33, 80, 200])
def test_no_line_exceeds_the_width(width: int, verbose: bool) -> None:
    findings = tuple(
        Finding(HOSTILE, verdict, HOSTILE, HOSTILE, Where(file=HOSTILE), hint=HOSTILE) for verdict in Verdict
    )
    hostile = Run({}, findings, Coverage({HOSTILE: 1}, {HOSTILE: 1}), title=HOSTILE)
    for run in (sample_run(), hostile):
        lines = list(summary_lines(run, width=width, verbose=verbose))
        assert max(cell_len(line) for line in lines) <= max(width, 20)
        assert all(line == line.rstrip("\r\n") and line.isprintable() for line in lines)
        if width:
            assert max(cell_len(line) for line in printed(run, width=max(width, 20)).splitlines()) <= max(width, 20)


@given(st.text(), st.integers(min_value=10, max_value=60))
def test_wrapping_loses_nothing_and_fits(text: str, width: int) -> None:
    lines = list(wrap(text, width, indent="> ", hanging="  "))
    assert all(cell_len(line) <= width for line in lines)
    if text.isascii() and text.isprintable():
        assert "".join("".join(lines).split()).removeprefix(">") == "".join(text.split())


def test_an_empty_run_says_so() -> None:
    assert list(summary_lines(Run(), width=80)) == ["nothing was looked at", "coverage: nothing was looked at"]
    assert "passed" not in printed(Run())


def one(verdict: Verdict, seen: int = 0) -> Run:
    return Run(findings=(Finding("flush", verdict, "a", "m"),), coverage=Coverage({"ops": seen}))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (Run(coverage=Coverage({"ops": 3})), "no verdict: 3 ops seen, no check made"),
        (one(Verdict.SKIP, 3), "1 skipped: nothing was judged"),
        (one(Verdict.PASS), "1 passed; coverage: nothing was looked at"),
        (one(Verdict.WARN, 3), "1 warning"),
    ],
)
def test_the_headline_never_flatters(run: Run, said: str) -> None:
    assert next(summary_lines(run, width=80)) == said


def test_the_command_line_shows_a_table_of_verdicts_below_the_failures() -> None:
    text = printed(sample_run(), width=200, verbose=True)
    below = text[text.rindex("WARN headroom:") :]
    rows = {line.split()[0]: line.split()[1:] for line in below.splitlines() if line.strip()}
    assert rows["overflow"] == ["FAIL", "FAIL", *["pass"] * 6]
    assert rows["low-precision-error"] == [*["pass"] * 6, "FAIL", "pass"]
    assert "not seen: inside a custom Triton kernel (3)" in text
    assert "\x1b" not in text


def test_colours_only_on_a_terminal() -> None:
    assert "\x1b[1;31mFAIL overflow" in printed(sample_run(), force_terminal=True, color_system="standard")


def test_subjects_beyond_the_width_get_a_table_of_their_own() -> None:
    text = printed(sample_run(), width=80, verbose=True)
    assert text.count("low-precision-error ") >= 2
    assert max(cell_len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("width", range(40, 120))
def test_the_head_of_every_column_is_whole(width: int) -> None:
    """A head that is cut ("bfloat16, eag") would name a subject that does not exist."""
    arms = [Arm(dtype, mode) for dtype in ("float16", "bfloat16") for mode in ("eager", "compiled")]
    findings = tuple(Finding("nonfinite-reference", Verdict.PASS, f"demo [{arm}]", "m", arm=arm) for arm in arms)
    heads = [plain(line) for line in verdict_table(arrange(Run(findings=findings)), width)]
    words = " ".join(heads).replace(",", " ").split()
    assert words.count("eager") == words.count("compiled") == 2
    assert words.count("float16") == words.count("bfloat16") == 2


def test_very_many_subjects_are_counted() -> None:
    findings = tuple(Finding("flush", Verdict.PASS, f"test_{i}", "m") for i in range(100))
    text = "\n".join(map(plain, verdict_table(arrange(Run(findings=findings)), 100)))
    assert "pass ×100" in text
    assert "test_7" not in text


def test_messages_are_no_markup() -> None:
    run = Run(findings=(Finding("flush", Verdict.FAIL, "[red]s[/red]", "[bold]m[/nope]"),))
    assert "FAIL flush: [red]s[/red]\n  [bold]m[/nope]\n" in printed(run)


# 25 lines ------------------------------------------------------------------------------------------------------------

LARGE_RUNS = st.builds(
    lambda run, findings: Run(run.environment, (*run.findings, *findings), run.coverage, title=run.title),
    RUNS,
    st.lists(FINDINGS, max_size=60),
)
WIDTHS = st.sampled_from([20, 60, 80, 200])


@given(LARGE_RUNS, WIDTHS)
def test_a_report_has_at_most_25_lines_and_none_exceeds_the_width(run: Run, width: int) -> None:
    on_terminal = printed(run, width=width, force_terminal=True, color_system=None)
    for lines in (list(summary_lines(run, width=width)), on_terminal.split("\n")[:-1]):
        assert len(lines) <= 25
        assert all(cell_len(line) <= width for line in lines)


def counted_in(last: str, noun: str) -> int:
    """How many findings a last line counts, such as 3 of `3 failures`."""
    words = last.replace(",", "").replace(";", "").split()
    counts = [words[i - 1] for i, word in enumerate(words) if word.rstrip("s") == noun]
    return int(counts[0]) if counts else 0


@given(st.lists(FINDINGS, max_size=60), WIDTHS, st.booleans())
def test_every_cause_is_shown_in_full_or_counted(findings: list[Finding], width: int, verbose: bool) -> None:
    run = Run(findings=tuple(findings))
    lines = list(summary_lines(run, width=width, verbose=verbose))
    last = flat(lines).rpartition("shortened or left out:")[2] if "shortened or left out:" in flat(lines) else ""
    causes = arrange(run).problems
    for verdict, noun in ((Verdict.FAIL, "failure"), (Verdict.WARN, "warning")):
        shown = sum(line.split(" ")[0] == verdict.upper() for line in lines)
        wanted = sum(cause.verdict is verdict for cause in causes)
        assert wanted == shown or wanted <= shown + counted_in(last, noun)
    if verbose:
        assert not last


def test_the_last_line_says_how_much_is_missing_and_how_to_see_it() -> None:
    findings = tuple(Finding("overflow", Verdict.FAIL, f"model {i}", "m " * 60, hint="h") for i in range(40))
    lines = list(summary_lines(Run(findings=findings), width=80, more="-v shows all"))
    assert len(lines) == 25
    assert lines[-1] == "shortened or left out: 39 failures; -v shows all"
    assert lines[1] == "FAIL overflow: model 0"
    assert "  hint: h" in lines[:6], "the first cause stands there in full"
    assert len(list(summary_lines(Run(findings=findings), width=80, verbose=True))) > 100


def test_the_cause_comes_first_with_its_source_and_the_command_that_finds_it_again() -> None:
    source = ["def forward(self, x):\n", "    hidden = self.up(x)\n", "    return hidden * 600.0\n"]
    cause = Finding(
        "overflow", Verdict.FAIL, "model", "it overflows", Where("forward", "", "aten::mul.Tensor", "model.py", 3),
        excerpt=excerpt_of(source, 3, "aten::mul.Tensor"),
        reproduce="ampcheck audit model.py:subject --select overflow --no-compile",
    )  # fmt: skip
    warned = Finding("headroom", Verdict.WARN, "model", "near the end")
    assert list(summary_lines(Run(findings=(warned, cause), coverage=Coverage({"ops": 2})), width=80)) == [
        "1 failed, 1 warning",
        "FAIL overflow: model",
        "  it overflows",
        "  where: forward, aten::mul.Tensor, model.py:3",
        "    1 | def forward(self, x):",
        "    2 |     hidden = self.up(x)",
        "    3 |     return hidden * 600.0",
        "      |            ^^^^^^^^^^^^^^",
        "  reproduce: ampcheck audit model.py:subject --select overflow --no-compile",
        "WARN headroom: model",
        "  near the end",
        "coverage: 2 ops",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_a_table_of_verdicts_keeps_every_row_and_column(width: int) -> None:
    dtypes = ("float16", "bfloat16", "float32")
    arms = [Arm(dtype, mode) for dtype in dtypes for mode in ("eager", "compiled")]
    checks = ("overflow", "nonfinite-reference", "policy-unregistered")
    findings = tuple(Finding(c, Verdict.PASS, f"demo [{arm}]", "m", arm=arm) for arm in arms for c in checks)
    text = printed(Run(findings=findings, coverage=Coverage({"ops": 1})), width=width, verbose=True)
    table = text[: text.index("pass overflow")]
    assert table.removeprefix("18 passed").count("pass") == len(findings)
    words = table.replace(",", " ").split()
    assert [words.count(word) for word in ("float16", "bfloat16", "float32", "eager", "compiled")] == [2, 2, 2, 3, 3]


def failures(count: int) -> Run:
    where = Where("forward", op="aten::mul", file="model.py", line=3)
    found = (Finding("overflow", Verdict.FAIL, f"model {i}", "values must be finite", where) for i in range(count))
    return Run(findings=tuple(found), coverage=Coverage({"ops": 1}))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_advice_is_whole_or_absent(count: int) -> None:
    advice = "keep this op in float32: " + ", ".join(f"step {number} of what to do" for number in range(35)) + ": done"
    long = tuple(replace(f, message="too large " * 60, hint=advice) for f in failures(count).findings)
    text = flat(summary_lines(Run(findings=long), width=80))
    assert text.count("hint: keep this op") == text.count("what to do: done") >= 1


def test_no_failure_is_left_out_where_the_output_is_piped_or_quiet() -> None:
    """Nobody can ask a log for more."""
    for text in (printed(failures(60)), printed(failures(60), force_terminal=True, quiet=True)):
        assert all(f"FAIL overflow: model {i}" in text for i in range(60))
    on_terminal = printed(failures(60), force_terminal=True)
    assert len(on_terminal.splitlines()) <= 25
    assert "-v shows all" in on_terminal


def test_a_healthy_run_shows_no_table_of_checks() -> None:
    arms = (Arm("float16", "eager"), Arm("bfloat16", "eager"))
    found = tuple(Finding("flush", Verdict.PASS, f"m [{arm}]", "m", arm=arm) for arm in arms)
    text = printed(Run(findings=found, coverage=Coverage({"ops": 3})))
    assert "passed: flush 2" in text
    assert "judged: float16, eager; bfloat16, eager" in text
    assert "───" not in text
    assert "───" in printed(one(Verdict.WARN, 3))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_each_failure_shows_its_place_however_short_it_is(width: int) -> None:
    subject = "training of a subject with a long name, tensors of the step ema.shadow.blocks.0.attention.qkv.weight"
    places = [Where("update", "ema.shadow." * 5, "aten::mul_.Scalar", "train.py", 20 + i, 3) for i in range(20)]
    places += [Where("forward", f"blocks.{i}.head") for i in range(20)]
    found = tuple(Finding("stagnation", Verdict.FAIL, subject, "it stagnates " * 30, place) for place in places)
    lines = printed(Run(findings=found, coverage=Coverage({"ops": 1})), width=width).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    for place in places:
        assert any((place.place or place.module) in line for line in lines), place


def test_infinities_come_before_lost_digits() -> None:
    digits, infinite = (
        Finding("stagnation", Verdict.FAIL, "m", "digits", Where("forward", file="m.py", line=1)),
        Finding("overflow", Verdict.FAIL, "m", "infinite", Where("update", "head")),
    )
    warned = Finding("overflow", Verdict.WARN, "m", "warned", Where("forward", file="m.py", line=1))
    run = Run(findings=(warned, digits, infinite))
    assert [finding.message for finding in arrange(run).problems] == ["infinite", "digits", "warned"]


def test_the_cause_nearest_to_the_users_code_comes_first() -> None:
    places = [
        Where("update", op="aten::add_"),
        Where("backward", file="m.py", line=4),
        Where("forward", file="m.py", line=9),
    ]
    found = tuple(Finding("overflow", Verdict.FAIL, "model", f"number {i}", place) for i, place in enumerate(places))
    shown = [finding.message for finding in arrange(Run(findings=found)).problems]
    assert shown == ["number 2", "number 1", "number 0"]


def test_a_backward_pass_is_not_shown_as_the_forward_code_of_its_line() -> None:
    source = ["def loss(out):\n", "    return out.float().sum()\n"]
    where = Where("backward", op="aten::_to_copy", file="m.py", line=2)
    finding = Finding("overflow", Verdict.FAIL, "m", "message", where, excerpt=excerpt_of(source, 2, where.op))
    text = printed(Run(findings=(finding,)))
    assert "^^^^^^^^^^^ in the backward pass" in text
    assert "in the backward pass" not in printed(Run(findings=(replace(finding, where=Where("forward", op=where.op)),)))
