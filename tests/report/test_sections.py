"""Runs are put in the order in which people read them."""

from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.report.sections import arrange, short_names


def test_a_table_of_one_subject_heads_its_columns_with_what_differs() -> None:
    assert short_names(["demo [float16, eager]", "demo [bfloat16, eager]"]) == {
        "demo [float16, eager]": "float16, eager",
        "demo [bfloat16, eager]": "bfloat16, eager",
    }
    mixed = ["demo [float16, eager]", "other [float16, eager]"]
    assert short_names(mixed) == {name: name for name in mixed}
    assert short_names(["demo"]) == {"demo": "demo"}
    assert short_names([]) == {}


def test_a_failure_is_shown_even_if_its_cause_did_not_fail() -> None:
    cause = Finding("stagnation", Verdict.SKIP, "a", "the cause")
    failure = Finding("flush", Verdict.FAIL, "a", "the failure", cause=cause.key)
    assert arrange(Run(findings=(cause, failure))).problems == (failure,)


def test_a_subject_counts_once_in_all_its_dtypes_and_modes() -> None:
    names = ("m.py:a [float16, eager]", "m.py:a [bfloat16, eager]", "m.py:a [cpu float16]", "m.py:b")
    found = tuple(Finding("flush", Verdict.PASS, name, "m") for name in names)
    assert arrange(Run(findings=found)).judged == 2
