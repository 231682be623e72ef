"""Runs are put in the order in which people read them."""

from ampcheck.report.sections import short_names


def test_a_table_of_one_subject_heads_its_columns_with_what_differs() -> None:
    assert short_names(["demo [float16, eager]", "demo [bfloat16, eager]"]) == {
        "demo [float16, eager]": "float16, eager",
        "demo [bfloat16, eager]": "bfloat16, eager",
    }
    mixed = ["demo [float16, eager]", "other [float16, eager]"]
    assert short_names(mixed) == {name: name for name in mixed}
    assert short_names(["demo"]) == {"demo": "demo"}
    assert short_names([]) == {}
