"""Promise: against an earlier run only what is new or worse fails, though lines move; gone means judged and absent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import RUNS

from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.range.headroom import CHECK as HEADROOM
from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.checks.range.precision_loss import CHECK as PRECISION_LOSS
from ampcheck.core.errors import UsageError
from ampcheck.core.run import FAIL_ON, Finding, Run, Verdict, Where
from ampcheck.outcome.compare import compare

HERE = Path(__file__).parent
BAD = FAIL_ON["incomplete"]


def overflow(op: str = "aten::exp", observed: float | None = 4.0, limit: float | None = 2.0, **more) -> Finding:
    finding = OVERFLOW.fail(
        "m", "too large", where=Where("forward", "ffn", op, "m.py", 3), observed=observed, limit=limit
    )
    return replace(finding, **{"code": "y = x.exp()", "unit": "times", **more})


def compared(old: list[Finding], new: list[Finding], **more) -> Run:
    return compare(Run(findings=tuple(old)), Run(findings=tuple(new)), HERE, **more)


def states(run: Run) -> dict[str, int]:
    """The counts in the title of the table of changes."""
    counts = (part.partition(" ") for part in run.tables[0].title.split(", "))
    return {state: int(count) for count, _, state in counts if count != "0"}


def test_the_same_finding_is_unchanged_and_accepted():
    run = compared([overflow()], [overflow()])
    assert states(run) == {"unchanged": 1}
    assert not run.tables[0].rows
    (finding,) = run.findings
    assert (finding.verdict, finding.accepted) == (Verdict.ACCEPTED, "not new: the earlier run has it, too")


def test_a_new_finding_fails_as_it_is():
    run = compared([overflow()], [overflow(), new := overflow("aten::mul")])
    assert states(run) == {"new": 1, "unchanged": 1}
    assert run.of(Verdict.FAIL) == (new,)


def test_a_second_finding_at_one_place_is_new():
    assert states(compared([overflow()], [overflow(), overflow()])) == {"new": 1, "unchanged": 1}


def test_a_finding_is_gone_if_its_check_judged_its_subject_and_else_no_longer_judged():
    assert states(compared([overflow()], [OVERFLOW.passed("m", "finite", 3)])) == {"gone": 1}
    for new in ([], [OVERFLOW.skip("m", "no GPU")], [OVERFLOW.passed("other", "finite", 3)]):
        assert states(compared([overflow()], new)) == {"no longer judged": 1}


def test_lines_wording_and_numbers_may_change():
    moved = replace(overflow(), where=replace(overflow().where, line=99, step=7), message="larger", observed=4.1)
    assert states(compared([overflow()], [moved])) == {"unchanged": 1}


def test_the_source_of_an_earlier_run_is_what_it_recorded(tmp_path, monkeypatch):
    """The file has changed since, and its line 3 is another one now."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("import torch\n\n\n\ny = x.exp()\n", encoding="utf-8")
    now = OVERFLOW.fail("m", "too large", where=Where("forward", "ffn", "aten::exp", "m.py", 5))
    assert now.code == "y = x.exp()"
    assert states(compared([overflow()], [now])) == {"unchanged": 1}


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ((4.0, 2.0), (6.0, 2.0), False),
        ((4.0, 2.0), (6.1, 2.0), True),
        ((4.0, 2.0), (math.inf, 2.0), True),
        ((4.0, 2.0), (math.nan, 2.0), True),
        ((math.inf, 2.0), (math.inf, 2.0), False),
        ((math.nan, 2.0), (4.0, 2.0), False),
        ((0.9, 1.2), (0.5, 1.2), True),  # a least value, such as a speedup
        ((0.9, 1.2), (0.7, 1.2), False),
        ((100.0, 0.0), (149.0, 0.0), False),  # a count of which none is allowed
        ((100.0, 0.0), (151.0, 0.0), True),
        ((-1.0, 2.0), (-4.0, 2.0), True),
        ((None, None), (4.0, 2.0), False),
    ],
)
def test_further_beyond_the_limit_by_more_than_the_factor_is_worse(before, now, worse):
    run = compared([overflow(observed=before[0], limit=before[1])], [overflow(observed=now[0], limit=now[1])])
    assert states(run) == ({"worse": 1} if worse else {"unchanged": 1})
    assert run.failed is worse


def test_the_factor_can_be_chosen_and_is_at_least_one():
    old, new = [overflow()], [overflow(observed=6.1)]
    assert states(compared(old, new, factor=2.0)) == {"unchanged": 1}
    assert states(compared(old, new, factor=1.0)) == {"worse": 1}
    for factor in (0.9, math.nan):
        with pytest.raises(UsageError, match="must be at least 1"):
            compared(old, new, factor=factor)


def test_numbers_of_another_unit_are_not_compared():
    assert states(compared([overflow()], [overflow(observed=400.0, unit="%")])) == {"unchanged": 1}


@pytest.mark.parametrize(
    ("before", "now", "state"),
    [
        (Verdict.WARN, Verdict.FAIL, "worse"),
        (Verdict.ACCEPTED, Verdict.FAIL, "worse"),
        (Verdict.UNDECIDED, Verdict.WARN, "worse"),
        (Verdict.FAIL, Verdict.WARN, "unchanged"),
        (Verdict.FAIL, Verdict.ACCEPTED, "unchanged"),
        (Verdict.INCOMPLETE, Verdict.INCOMPLETE, "unchanged"),
    ],
)
def test_a_worse_verdict_is_worse_and_a_milder_one_is_not(before, now, state):
    run = compared([replace(overflow(), verdict=before)], [replace(overflow(), verdict=now)])
    assert states(run) == {state: 1}
    if state == "worse":
        assert f"worse: it was {before}, 4 times" in run.findings[0].message


def test_what_follows_from_an_unchanged_cause_is_accepted_with_it_and_from_a_new_one_fails_with_it():
    cause = overflow()
    follower = replace(PRECISION_LOSS.fail("m", "off"), cause=cause.key)
    assert compared([cause], [cause, follower]).counts() == {Verdict.ACCEPTED: 2}
    run = compared([], [cause, follower])
    assert run.counts() == {Verdict.FAIL: 2}
    assert states(run) == {"new": 1}


def test_an_effect_whose_cause_was_mended_is_not_new():
    cause = overflow()
    follower = replace(PRECISION_LOSS.fail("m", "off"), cause=cause.key)
    run = compared([cause, follower], [replace(follower, cause=()), OVERFLOW.passed("m", "finite", 3)])
    assert states(run) == {"gone": 1, "unchanged": 1}


def test_the_table_shows_each_change_with_both_verdicts():
    mended = HEADROOM.warn("m", "near", observed=1.0, limit=4.0, unit="times")
    run = compared([mended, overflow()], [overflow(observed=40.0), HEADROOM.passed("m", "far", 2)])
    place = "forward, ffn, aten::exp, m.py:3"
    assert run.tables[0].rows == [
        ("worse", "overflow", "m", place, "fail, 4 times", "fail, 40 times"),
        ("gone", "headroom", "m", "", "warn, 1 time", ""),
    ]


def test_evidence_and_coverage_are_those_of_the_new_run():
    new = Run({"torch": "2.13"}, (COVERAGE.passed("m", "seen", 3),), title="audit of m")
    run = compare(Run({"torch": "2.4"}, title="audit of m"), new, HERE)
    assert (run.environment, run.coverage) == (new.environment, new.coverage)
    assert run.title == "audit of m against an earlier run"


# Any runs ------------------------------------------------------------------------------------------------------------


@given(RUNS)
def test_against_itself_nothing_of_any_run_is_new_worse_or_gone(run):
    result = compare(run, run, HERE)
    assert states(result).keys() <= {"unchanged"}
    assert not [f for verdict in BAD for f in result.of(verdict) if not f.cause]


@given(RUNS, RUNS)
def test_every_cause_has_one_state(old, new):
    counts = states(compare(old, new, HERE))
    compared = (*BAD, Verdict.ACCEPTED)
    keys = {finding.key for finding in new.findings if not finding.cause}
    causes = [f for f in new.findings if f.verdict in compared and (not f.cause or f.cause not in keys)]
    assert sum(counts.get(state, 0) for state in ("new", "worse", "unchanged")) == len(causes)
    assert sum(counts.values()) <= len(causes) + sum(finding.verdict in compared for finding in old.findings)


@given(RUNS, st.randoms())
def test_the_order_of_findings_does_not_matter(run, random):
    findings = list(run.findings)
    random.shuffle(findings)
    assert states(compare(run, replace(run, findings=tuple(findings)), HERE)).keys() <= {"unchanged"}


@given(RUNS)
def test_against_an_empty_run_everything_is_new(run):
    result = compare(Run(), run, HERE)
    assert states(result).keys() <= {"new", "unchanged"}
    for was, now in zip(run.findings, result.findings, strict=True):
        assert was.cause or now == was
