"""The check dtype, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.dtype.dtype import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from checks.range.records import HEALTHY

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP
FULL = ("float32",)


def judged(declared: dict[str, str]) -> list[Finding]:
    seen = {"head": ("bfloat16",), "body.0": ("float32",)}
    return check(replace(HEALTHY, module_dtypes=seen, declared_dtypes=declared), Limits())


def test_modules_give_the_dtype_that_was_declared_for_them() -> None:
    assert [f.verdict for f in judged({"head": "bfloat16", "body.*": "float32"})] == [PASS, PASS]
    (wrong,) = judged({"body.*": "bfloat16"})
    assert (wrong.verdict, wrong.where.module) == (FAIL, "body.0")
    assert "float32 parameter or constant that promotes" in wrong.hint


def test_a_pattern_that_matches_nothing_fails_and_another_16_bit_format_is_skipped() -> None:
    (nothing,) = judged({"tail": "bfloat16"})
    assert nothing.verdict is FAIL
    assert "it matches none (body.0, head, ...)" in nothing.message
    assert [f.verdict for f in judged({"head": "float16"})] == [SKIP]
    assert judged({}) == []
