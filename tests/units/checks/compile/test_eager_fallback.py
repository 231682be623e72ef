"""The check eager-fallback, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.run import Verdict
from ampcheck.records.graphs import Fallback
from checks.compile.records import CLEAN, found


@pytest.mark.parametrize("cause", ["recompile limit", "backend error", "skipped"])
def test_what_ran_eager_fails_with_its_names(cause: str) -> None:
    stats = replace(CLEAN, fallbacks=(Fallback(("layers.8", "layers.9"), cause, "the reason"),))
    (finding,) = found(stats, "eager-fallback")
    assert finding.verdict is Verdict.FAIL
    assert finding.observed == 2
    assert "layers.8, layers.9" in finding.message
    assert "the reason" in finding.message
    assert finding.hint
