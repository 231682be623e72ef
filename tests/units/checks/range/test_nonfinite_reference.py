"""The check nonfinite-reference, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks import findings
from ampcheck.checks.range.nonfinite_reference import reference
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.finite import FiniteStats
from ampcheck.records.numerics import Values
from ampcheck.records.results import Examination
from checks.range.records import (
    HEALTHY,
    OUTPUT,
    PLACE,
    SEEN,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_the_reference_is_judged_by_its_outputs_data_and_ops() -> None:
    bad = replace(OUTPUT, seen=replace(SEEN, exact_nan=4))
    maker = (PLACE, Examination(64, exact_nan=4))
    assert [f.verdict for f in reference(HEALTHY)] == [Verdict.PASS]
    (finding,) = reference(replace(HEALTHY, errors=(bad,), nonfinite=(maker,)))
    assert (finding.verdict, finding.where, finding.subject) == (Verdict.FAIL, PLACE, "model [float64]")
    (finding,) = reference(replace(HEALTHY, errors=(bad,), data=(Values("input", "args.0", 1, 0),)))
    assert "input args.0 holds 1 NaN" in finding.message
    assert [f.verdict for f in reference(replace(HEALTHY, errors=(bad,)))] == [Verdict.INCOMPLETE]


def test_losses_that_are_not_finite_in_float64_either_are_of_the_reference() -> None:
    nan = float("nan")
    loop = FiniteStats("loop", (1.0, nan, nan, nan), (), (), 4, PLACE, undefined=1)
    assert [(f.check, f.where.step) for f in findings(loop, Limits())] == [("nonfinite-reference", 1)]
