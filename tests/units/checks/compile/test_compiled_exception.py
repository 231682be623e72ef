"""The check compiled-exception, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.run import Verdict
from ampcheck.records.accuracy import (
    Exceptions,
)
from ampcheck.records.graphs import RunError
from checks.compile.records import CLEAN, failed, stats, verdicts


def test_what_only_one_side_raises_is_a_finding_in_either_direction() -> None:
    def raised(**facts: str) -> Verdict:
        (verdict,) = verdicts(stats(exceptions=Exceptions(**facts)), "compiled-exception")
        return verdict

    assert raised(compiled="ValueError: no") is Verdict.FAIL
    assert raised(eager="ValueError: no", float32="ValueError: no") is Verdict.FAIL
    assert raised(eager="ValueError: no") is Verdict.WARN
    assert raised(eager="ValueError: no", compiled="ValueError: no") is Verdict.SKIP
    assert raised(compiled="no compiler", missing="no compiler") is Verdict.SKIP


@pytest.mark.parametrize(
    ("stopped", "checks"),
    [
        (RunError("ValueError: x", "ValueError"), ["compiled-exception"]),
        (RunError("ValueError: x", "ValueError", eager="ValueError: x"), ["coverage"]),
        (RunError("ValueError: x", "ValueError", eager=None), ["coverage"]),
        (RunError("InvalidCxxCompiler: none", "InvalidCxxCompiler", machine="no compiler"), []),
        (RunError("ImportError: file too short", "ImportError", eager=None, machine="a broken file"), []),
    ],
)
def test_an_exception_is_the_compilers_or_the_subjects_own(stopped: RunError, checks: list[str]) -> None:
    assert failed(replace(CLEAN, error=stopped)) == checks
