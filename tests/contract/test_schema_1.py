"""Promise: a run that an older version wrote is read with the same findings, arms, keys and causes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampcheck.core.arm import Arm
from ampcheck.core.run import Run, followers

FILE = Path(__file__).parent / "data" / "run_schema_1.json"
STORED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
ARMS = {
    "squares [float16, eager]": Arm("float16", "eager"),
    "squares [bfloat16, compiled]": Arm("bfloat16", "compiled"),
    "squares [float32, compiled, cuda emulated by aot_eager]": Arm("float32", "compiled", "cuda", backend="aot_eager"),
    "squares [float64]": Arm("float64"),
    "squares [cpu bfloat16]": Arm("bfloat16", "policy", "cpu"),
    "demo [cuda float16, emulated]": Arm("float16", "policy", "cuda"),
    "demo [float16, eager, cuda emulated]": Arm("float16", "eager", "cuda"),
    "demo [float64, cuda emulated]": Arm("float64", device="cuda"),
    "block [cuda emulated]": Arm(device="cuda"),
    "native [float16 native, eager]": Arm("float16", "eager", native=True),
    "tests/test_m.py::test_loss [Loud]": Arm(),
    "loop": Arm(),
}


def test_findings_are_as_they_were_written() -> None:
    run = Run.load(FILE)
    assert STORED["schema"] == 1
    written = {**run.to_json(), "schema": 1}
    for finding in written["findings"]:
        for field in ("arm", "kind", "names"):
            del finding[field]
    assert written == STORED


def test_causes_are_found_by_their_keys() -> None:
    findings = Run.load(FILE).findings
    following = {findings[n].check: f for n in range(len(findings)) if (f := followers(findings).get(id(findings[n])))}
    assert [f.check for f in following["stagnation"]] == ["nonfinite-gradient", "overflow"]
    assert [f.check for f in following["overflow"]] == ["nonfinite-gradient"]


@pytest.mark.parametrize("subject", ARMS)
def test_the_arm_is_read_off_the_subject(subject: str) -> None:
    finding = next(finding for finding in Run.load(FILE).findings if finding.subject == subject)
    assert finding.arm == ARMS[subject]
    assert subject == (f"{finding.name} [{finding.arm}]" if finding.arm else finding.name)


def test_what_an_older_version_wrote_is_written_again_in_the_newest_form() -> None:
    run = Run.load(FILE)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run
