"""Promise: what a finding follows from is known from its fields: no wording decides it, and no order but the run's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ampcheck.checks.causes import _RULES, with_causes
from ampcheck.core.arm import Arm
from ampcheck.core.run import SEVERITY, Finding, Verdict, Where

KINDS = sorted({kind for one, other, _ in _RULES for kind in f"{one} {other}".split()})
NAMES = ("fc.weight", "fc.weight.exp_avg_sq", "head.bias", "train.py:9")
ARMS = (Arm(), Arm("float16", "eager"), Arm("float16", "policy", "cuda"))
WHERES = st.builds(
    Where,
    st.sampled_from(("", "forward", "backward", "update")),
    st.sampled_from(("", "fc")),
    st.sampled_from(("", "aten::add_", "aten::linalg_vector_norm", "GradScaler.step")),
    st.sampled_from(("", "train.py")),
    st.sampled_from((9, 12)),
    st.none() | st.integers(0, 2),
)


@st.composite
def problems(draw: st.DrawFn) -> Finding:
    check, _, kind = draw(st.sampled_from(KINDS)).partition("/")
    verdict = draw(st.sampled_from((Verdict.FAIL, Verdict.FAIL, Verdict.WARN, Verdict.PASS)))
    subject, arm = draw(st.sampled_from(("m", "n"))), draw(st.sampled_from(ARMS))
    return Finding(
        *(check, verdict, f"{subject} [{arm}]" if arm else subject, draw(st.text(max_size=3)), draw(WHERES)),
        limit=draw(st.none() | st.floats()),
        hint=draw(st.text(max_size=3)),
        arm=arm,
        kind=kind,
        names=tuple(draw(st.lists(st.sampled_from(NAMES), max_size=2))),
    )


RUNS = st.lists(problems(), max_size=8)


def causes(findings: Sequence[Finding]) -> list[tuple[object, ...]]:
    return [finding.cause for finding in with_causes(findings)]


@given(RUNS)
def test_the_words_of_findings_decide_nothing(findings: list[Finding]) -> None:
    silent = [replace(finding, message="x", hint="", code="y", observed=None, seen=3) for finding in findings]
    assert causes(silent) == causes(findings)


@given(RUNS)
def test_causes_that_are_there_change_nothing(findings: list[Finding]) -> None:
    once = with_causes(findings)
    assert with_causes(once) == once
    assert [replace(finding, cause=()) for finding in once] == findings


@given(RUNS)
def test_a_cause_is_a_problem_of_its_own_and_as_severe(findings: list[Finding]) -> None:
    found = with_causes(findings)
    own = {finding.key: finding for finding in found if not finding.cause}
    for finding in found:
        if finding.cause:
            cause = own[finding.cause]
            assert cause.name == finding.name
            assert SEVERITY.index(cause.verdict) <= SEVERITY.index(finding.verdict)


@given(RUNS, RUNS)
def test_another_subject_and_passes_between_change_nothing(findings: list[Finding], others: list[Finding]) -> None:
    strange = [replace(f, subject=f"z{f.subject}") for f in others] + [replace(f, verdict=Verdict.SKIP) for f in others]
    mixed = [finding for pair in zip(findings, strange, strict=False) for finding in pair]
    mixed += [*findings[len(strange) :], *strange[len(findings) :]]
    ours = [finding for finding in with_causes(mixed) if not finding.subject.startswith("z")]
    assert [f for f in ours if f.verdict is not Verdict.SKIP] == list(with_causes(findings))


@given(RUNS)
def test_warnings_may_stand_before_failures(findings: list[Finding]) -> None:
    ordered = sorted(findings, key=lambda finding: SEVERITY.index(finding.verdict))
    assert Counter(map(str, with_causes(ordered))) == Counter(map(str, with_causes(findings)))
