"""The checks are pure functions: from a record made by hand to its verdicts."""

from __future__ import annotations

from dataclasses import replace

from checks.range.records import (
    HEALTHY,
    OUTPUT,
    run_verdicts,
)

from ampcheck.checks import REGISTRY
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.numerics import CHECKS, check_numerics
from ampcheck.records.results import Examination

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_every_check_has_a_page_and_passes_or_skips_a_healthy_run() -> None:
    assert set(CHECKS) <= set(REGISTRY)
    assert {f.verdict for f in check_numerics(HEALTHY, Limits())} <= {Verdict.PASS, Verdict.SKIP}


def test_nothing_compared_is_not_a_pass() -> None:
    nothing = replace(OUTPUT, seen=Examination(64, exact_nan=64))
    assert run_verdicts(replace(HEALTHY, errors=(nothing,)), "precision-loss") == [Verdict.INCOMPLETE]
    assert run_verdicts(replace(HEALTHY, errors=(nothing,)), "overflow") == [Verdict.INCOMPLETE]


def test_switches_that_a_model_leaves_changed_fail() -> None:
    assert run_verdicts(HEALTHY, "autocast-state") == []
    left = {"default dtype": ("float32", "float64")}
    assert run_verdicts(replace(HEALTHY, left=left), "autocast-state") == [Verdict.FAIL]


def test_a_declaration_of_one_16_bit_format_says_nothing_of_another() -> None:
    declared = replace(HEALTHY, module_dtypes={"head": ("bfloat16",)}, declared_dtypes={"head": "bfloat16"})
    assert run_verdicts(declared, "dtype") == [Verdict.PASS]
    assert run_verdicts(replace(declared, declared_dtypes={"head": "float16"}), "dtype") == [Verdict.SKIP]
    assert run_verdicts(replace(declared, declared_dtypes={"tail": "bfloat16"}), "dtype") == [Verdict.FAIL]
