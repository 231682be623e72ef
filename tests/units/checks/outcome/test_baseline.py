"""The check baseline, on records."""

from __future__ import annotations

from ampcheck.checks.outcome.baseline import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.baseline import BaselineStats


def test_what_is_gone_is_counted_and_each_place_named_once() -> None:
    gone = (("overflow", "model"), ("overflow", "model"), ("flush", "loop"))
    (finding,) = check(BaselineStats("baseline.json", gone), Limits())
    assert (finding.verdict, finding.subject) == (Verdict.WARN, "baseline.json")
    assert finding.message == "3 accepted findings no longer found: overflow in model, flush in loop"
    assert "--prune" in finding.hint
    assert finding.family == CHECK.family == "outcome"


def test_nothing_gone_is_no_finding() -> None:
    assert check(BaselineStats("baseline.json"), Limits()) == []
