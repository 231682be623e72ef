"""Promise: severities, comments on lines and the baseline decide which findings fail; new ones always do."""

from __future__ import annotations

import dataclasses
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.checks import REGISTRY
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.range.headroom import CHECK as HEADROOM
from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.checks.range.precision_loss import CHECK as PRECISION_LOSS
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.core.settings import Settings
from ampcheck.core.source import with_excerpts
from ampcheck.outcome.accept import accept
from ampcheck.outcome.baseline import Baseline
from ampcheck.outcome.raising import raise_for

TODAY = date(2026, 11, 24)
CODE = """import torch

def forward(x):
    y = x.exp()
    z = torch.cat([
        y,
        y * 1e30,  # ampcheck: ignore[overflow] the caller clamps
    ])
    # ampcheck: ignore[headroom, flush]
    w = z.sum()
    return w.exp()  # ampcheck: ignore[overfow] a typing error
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def overflow(line: int | None = 4, subject: str = "model") -> Finding:
    return OVERFLOW.fail(subject, "too large", where=Where("forward", "", "aten::exp", "model.py", line))


def judged(settings: Settings, *findings: Finding) -> list[Verdict]:
    return [finding.verdict for finding in accept(Run(findings=findings), settings, today=TODAY).findings]


# Severity and selection ----------------------------------------------------------------------------------------------


def test_without_settings_a_run_is_judged_as_it_is(folder):
    run = Run(findings=(overflow(), HEADROOM.warn("model", "near"), COVERAGE.passed("model", "seen", 3)))
    judged = accept(run, Settings(folder), gone=True)
    assert judged == dataclasses.replace(run, findings=with_excerpts(run.findings))


@pytest.mark.parametrize("pattern", ["headroom", "head*", "*"])
def test_a_warning_of_severity_fail_fails(folder, pattern):
    assert judged(Settings(folder, severity={pattern: "fail"}), HEADROOM.warn("model", "near")) == [Verdict.FAIL]


def test_a_failure_of_severity_warn_warns_and_a_pass_stays_a_pass(folder):
    settings = Settings(folder, severity={"overflow": "warn"})
    passed = OVERFLOW.passed("other", "finite", 5)
    assert judged(settings, overflow(), passed) == [Verdict.WARN, Verdict.PASS]


def test_a_later_pattern_wins(folder):
    settings = Settings(folder, severity={"*-loss": "ignore", "precision-loss": "warn"})
    assert judged(settings, PRECISION_LOSS.fail("model", "off")) == [Verdict.WARN]


def test_an_ignored_check_reports_nothing_and_what_follows_from_it_stays(folder):
    cause = overflow()
    follower = dataclasses.replace(PRECISION_LOSS.fail("model", "off"), cause=cause.key)
    (left,) = accept(Run(findings=(cause, follower)), Settings(folder, severity={"overflow": "ignore"})).findings
    assert left == dataclasses.replace(follower, cause=())


def test_what_is_more_severe_than_its_cause_is_shown_and_raised_as_a_cause(folder):
    follower = dataclasses.replace(PRECISION_LOSS.fail("model", "off"), cause=overflow().key)
    run = accept(Run(findings=(overflow(), follower)), Settings(folder, severity={"overflow": "warn"}))
    assert [(f.verdict, f.cause) for f in run.findings] == [(Verdict.WARN, ()), (Verdict.FAIL, ())]
    with pytest.raises(AssertionError, match="precision-loss"):
        raise_for(run, (Verdict.FAIL,))
    accepted = written(folder, overflow())
    both = dataclasses.replace(accepted, severity={"overflow": "warn"})
    assert judged(both, overflow(), follower) == [Verdict.ACCEPTED, Verdict.FAIL]


def test_what_is_not_selected_is_not_reported_but_the_coverage_always_is(folder):
    run = Run(findings=(overflow(), PRECISION_LOSS.fail("model", "off"), COVERAGE.passed("model", "seen", 3)))
    findings = accept(run, Settings(folder, select=("overflow",))).findings
    assert [finding.check for finding in findings] == ["overflow", "coverage"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"severity": {"overfow": "warn"}}, "did you mean overflow"),
        ({"select": ("nothing-*",)}, "`ampcheck explain` lists them"),
        ({"severity": {"coverage": "ignore"}}, "coverage cannot be ignored"),
    ],
)
def test_settings_that_name_no_check_are_a_usage_error(folder, settings, message):
    with pytest.raises(UsageError, match=message):
        accept(Run(), Settings(folder, **settings))


# Comments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [5, 6, 7, 8])
def test_a_comment_accepts_findings_anywhere_in_its_statement(folder, line):
    (finding,) = accept(Run(findings=(overflow(line),)), Settings(folder)).findings
    assert finding.verdict is Verdict.ACCEPTED
    assert finding.accepted == f"by a comment at model.py:{line}: the caller clamps"


def test_a_comment_above_a_statement_accepts_its_checks_alone(folder):
    where = Where("forward", "", "aten::sum", "model.py", 10)
    findings = HEADROOM.warn("model", "near", where=where), OVERFLOW.fail("model", "large", where=where)
    assert judged(Settings(folder), *findings) == [Verdict.ACCEPTED, Verdict.FAIL]


@pytest.mark.parametrize("line", [3, 4, None])
def test_a_line_without_a_comment_is_judged(folder, line):
    assert judged(Settings(folder), overflow(line)) == [Verdict.FAIL]


def test_a_comment_that_names_no_check_accepts_nothing_and_is_named(folder):
    (finding,) = accept(Run(findings=(overflow(11),)), Settings(folder)).findings
    assert finding.verdict is Verdict.FAIL
    assert "names overfow, which is no check" in finding.hint


# The baseline --------------------------------------------------------------------------------------------------------


def written(folder: Path, *findings: Finding, expires: str = "2027-01-01") -> Settings:
    settings = Settings(folder)
    baseline = Baseline(folder).updated(findings, "a known limit", "Ada", expires)
    baseline.save(folder / settings.baseline)
    assert Baseline.load(folder / settings.baseline) == baseline
    return settings


def test_accepted_findings_pass_and_a_new_one_fails(folder):
    settings = written(folder, overflow())
    assert judged(settings, overflow(), overflow(10), overflow(subject="other")) == [
        Verdict.ACCEPTED,
        Verdict.FAIL,
        Verdict.FAIL,
    ]


def test_a_second_finding_at_the_same_place_is_new(folder):
    settings = written(folder, overflow())
    assert judged(settings, overflow(), overflow()) == [Verdict.ACCEPTED, Verdict.FAIL]
    settings = written(folder, overflow(), overflow())
    assert judged(settings, overflow(), overflow()) == [Verdict.ACCEPTED, Verdict.ACCEPTED]


def test_lines_may_move(folder):
    settings = written(folder, overflow())
    (folder / "model.py").write_text("# a new line\n" + CODE, encoding="utf-8")
    assert judged(settings, overflow(5)) == [Verdict.ACCEPTED]


def test_numbers_and_wording_may_change_and_a_failure_may_become_a_warning(folder):
    settings = written(folder, overflow())
    changed = dataclasses.replace(overflow(), message="larger", observed=3.0, verdict=Verdict.WARN)
    assert judged(settings, changed) == [Verdict.ACCEPTED]


@pytest.mark.parametrize(("days", "verdict"), [(0, Verdict.ACCEPTED), (1, Verdict.FAIL)])
def test_after_its_last_day_an_accepted_finding_fails_and_says_why(folder, days, verdict):
    settings = written(folder, overflow(), expires=TODAY.isoformat())
    (finding,) = accept(Run(findings=(overflow(),)), settings, today=TODAY + timedelta(days)).findings
    assert finding.verdict is verdict
    assert "until 2026-11-24: a known limit (Ada)" in finding.accepted + finding.message


def test_what_follows_from_an_accepted_finding_is_accepted_with_it(folder):
    follower = dataclasses.replace(PRECISION_LOSS.fail("model", "off"), cause=overflow().key)
    settings = written(folder, overflow(), follower)
    assert len(Baseline.load(folder / settings.baseline).findings) == 1
    assert judged(settings, overflow(), follower) == [Verdict.ACCEPTED, Verdict.ACCEPTED]
    assert judged(settings, dataclasses.replace(follower, cause=())) == [Verdict.FAIL]


def test_a_finding_is_gone_where_its_check_judged_its_subject_and_only_there(folder):
    settings = written(folder, overflow())
    mended = accept(Run(findings=(OVERFLOW.passed("model", "finite", 5),)), settings, gone=True, today=TODAY).findings
    assert [finding.check for finding in mended] == ["overflow", "baseline"]
    assert "1 accepted finding no longer found: overflow in model" in mended[1].message
    for run in (Run(), Run(findings=(OVERFLOW.skip("model", "not run"), OVERFLOW.passed("other", "finite", 5)))):
        assert accept(run, settings, gone=True, today=TODAY) == run


def test_writing_again_keeps_reasons_and_removes_what_is_gone(folder):
    settings = written(folder, overflow(), overflow(10))
    before = Baseline.load(folder / settings.baseline)
    accepted = accept(Run(findings=(overflow(), overflow(subject="new"))), settings, today=TODAY).findings
    after = before.updated(accepted, "another reason", "Bob", "")
    reasons = {(entry.subject, entry.op): entry.reason for entry in after.findings}
    assert reasons == {("model", "aten::exp"): "a known limit", ("new", "aten::exp"): "another reason"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "findings": [{"check": 3}]}'])
def test_a_damaged_baseline_is_a_usage_error_with_advice(folder, text):
    settings = Settings(folder)
    (folder / settings.baseline).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"ampcheck\.baseline\.json"):
        accept(Run(findings=(overflow(),)), settings)


findings = st.builds(
    lambda check, verdict, subject, line: check.finding(
        verdict, subject, "text", where=Where("forward", "", "aten::exp", "model.py", line)
    ),
    st.sampled_from([OVERFLOW, PRECISION_LOSS, HEADROOM]),
    st.sampled_from([verdict for verdict in Verdict if verdict not in (Verdict.PASS, Verdict.ACCEPTED)]),
    st.sampled_from(["one", "two"]),
    st.sampled_from([1, 4, 10]),
)


@given(before=st.lists(findings, max_size=8), new=st.lists(findings, max_size=4))
def test_of_any_run_the_baseline_accepts_every_problem_and_of_more_exactly_the_others(before, new):
    problems = (Verdict.FAIL, Verdict.WARN)
    baseline = Baseline(Path.cwd()).updated(before, "", "", "")
    assert not [finding for finding in baseline.accept(before, TODAY) if finding.verdict in problems]
    left = [finding for finding in baseline.accept([*before, *new], TODAY) if finding.verdict in problems]
    assert len(left) == sum(finding.verdict in problems for finding in new)


def test_every_check_can_be_named_in_a_comment(folder):
    for slug in REGISTRY:
        (folder / f"{slug}.py").write_text(f"x = 1  # ampcheck: ignore[{slug}] why\n", encoding="utf-8")
        finding = REGISTRY[slug].fail("model", "text", where=Where(file=f"{slug}.py", line=1))
        assert judged(Settings(folder), finding) == [Verdict.ACCEPTED]


def test_each_failure_of_many_says_what_to_do_about_it() -> None:
    findings = tuple(
        Finding("overflow", Verdict.FAIL, f"m{n}", "too large", Where(f"phase {n}"), hint=f"advice {n // 2}")
        for n in range(10)
    )
    with pytest.raises(AssertionError) as raised:
        raise_for(Run(findings=findings), (Verdict.FAIL,))
    lines = [line for line in str(raised.value).splitlines() if "hint: " in line]
    assert list(dict.fromkeys(lines)) == [f"  hint: advice {n}" for n in range(5)]
