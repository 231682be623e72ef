"""From the record of a compiled run to its findings."""

from __future__ import annotations

from checks.compile.records import error, stats, verdicts

from ampcheck.compiled.accuracy.checks import CHECKS, check_accuracy
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.accuracy import (
    Exceptions,
)


def test_nothing_compiled_and_nothing_compared_are_no_pass() -> None:
    for empty in (stats(error(), graphs=0), stats(), stats(exceptions=Exceptions(eager="no", compiled="no"))):
        assert Verdict.PASS not in verdicts(empty, "compiled-error")
        assert verdicts(empty, "coverage") == [Verdict.FAIL]
    random = stats(incomparable="other random numbers")
    assert {*verdicts(random, "compiled-error"), *verdicts(random, "coverage")} == {Verdict.SKIP}


def test_every_check_says_something_of_every_run() -> None:
    for record in (stats(error(), error("gradient")), stats(), stats(exceptions=Exceptions(eager="no"))):
        assert {f.check for f in check_accuracy(record, Limits())} == set(CHECKS)
