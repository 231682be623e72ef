"""The check blame, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.records.accuracy import (
    EAGER,
    INDUCTOR,
)
from ampcheck.records.blame import BlameStats, Minimised, StageResult

FAILED = (StageResult(EAGER, 1.0, 1.0, True, "beyond"),)
MENDED = BlameStats("m", stages=FAILED, minimised=Minimised(("a",), 1, True), code="import torch")


@pytest.mark.parametrize(
    ("rung", "said"),
    [
        (StageResult(INDUCTOR, 0.0, 0.0, False, "within"), "compiled with them it passes, too"),
        (StageResult(INDUCTOR, 1.0, 0.0, True, "beyond"), "Compiled it still fails with them in float32 (beyond)"),
        (StageResult(INDUCTOR, None, None, False, "not judged: no compiler"), "compiled: not judged: no compiler"),
    ],
)
def test_what_becomes_of_the_mended_model_compiled_is_told(rung: StageResult, said: str) -> None:
    (found,) = findings(replace(MENDED, compiled_too=rung), Limits())
    assert said in found.message
    assert ("run the changed model eager" in found.hint) == rung.failed
