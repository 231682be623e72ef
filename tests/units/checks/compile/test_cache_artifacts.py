"""The check cache-artifacts, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.records.graphs import Artifacts
from checks.compile.records import CLEAN, found


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (Artifacts("save", 2, 1), "pass"),
        (Artifacts("save", 0, 0), "fail"),
        (Artifacts("save", 0, 3), "fail"),
        (Artifacts("load", 2, 0, hits=1, later=1), "pass"),
        (Artifacts("load", 2, 0, hits=0, later=1), "fail"),
        (Artifacts("load", 0, 0), "fail"),
    ],
)
def test_artifacts_are_to_be_something_and_used(call: Artifacts, verdict: str) -> None:
    (finding,) = found(replace(CLEAN, artifacts=(call,)), "cache-artifacts")
    assert finding.verdict.value == verdict
    assert bool(finding.hint) == (verdict == "fail")
