"""docs/evidence.md says what the evidence says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import evidence
import pytest

EVIDENCE = sorted((evidence.ROOT / "reports" / "evidence").glob("*.json"))


def test_the_page_is_that_of_the_evidence() -> None:
    assert evidence.FILE.read_text(encoding="utf-8") == evidence.text(), "run python docs/site/evidence.py"


def test_each_claim_has_figures_and_what_needs_a_gpu_is_a_step_that_there_is() -> None:
    rows = re.findall(r"^\| (.*) \|$", evidence.text().split("\n## ")[0], re.MULTILINE)[2:]
    assert rows
    script = (evidence.ROOT / "benchmarks" / "gpu.py").read_text(encoding="utf-8")
    for row in rows:
        claim, holds, figures, needs = row.split(" | ")
        assert "" not in (claim, holds)
        assert "reports/evidence/" in figures
        for step in re.findall(r"\(`(\w+)`", needs):
            assert f'"{step}"' in script


@pytest.mark.parametrize("file", EVIDENCE, ids=[file.stem for file in EVIDENCE])
def test_evidence_is_json(file: Path) -> None:
    assert isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
