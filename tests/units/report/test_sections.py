"""Runs are put in the order in which people read them."""

from ampcheck.core.arm import Arm, armed
from ampcheck.core.check import Check
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.report.sections import arrange

FLUSH = Check("flush", "range", "")
HALF, BRAIN = Arm("float16", "eager"), Arm("bfloat16", "eager")


def run_of(*names: str) -> Run:
    return Run(findings=tuple(FLUSH.passed(name, "m", 1) for name in names))


def test_a_table_of_one_subject_heads_its_columns_with_what_differs() -> None:
    assert arrange(run_of(armed("demo", HALF), armed("demo", BRAIN))).heads == {
        "demo [float16, eager]": "float16, eager",
        "demo [bfloat16, eager]": "bfloat16, eager",
    }
    mixed = armed("demo", HALF), armed("other", HALF)
    assert arrange(run_of(*mixed)).heads == {name: name for name in mixed}
    assert arrange(run_of("demo")).heads == {"demo": "demo"}
    assert arrange(Run()).heads == {}


def test_a_failure_is_shown_even_if_its_cause_did_not_fail() -> None:
    cause = Finding("stagnation", Verdict.SKIP, "a", "the cause")
    failure = Finding("flush", Verdict.FAIL, "a", "the failure", cause=cause.key)
    assert arrange(Run(findings=(cause, failure))).problems == (failure,)


def test_a_subject_counts_once_in_all_its_dtypes_and_modes() -> None:
    arms = (HALF, BRAIN, Arm("float16", "policy", "cpu"))
    assert arrange(run_of(*(armed("m.py:a", arm) for arm in arms), "m.py:b")).judged == 2
