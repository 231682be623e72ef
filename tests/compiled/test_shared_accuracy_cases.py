"""Real defects of compiled code, kept outside the repository; skipped where they are absent."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.core.run import Finding, Run, Verdict

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
BAD = (Verdict.FAIL, Verdict.WARN)

pytestmark = pytest.mark.skipif(not CORPUS.is_dir(), reason="the shared corpus is not beside this repository")


def case(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CORPUS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo looks the module up by name
    spec.loader.exec_module(module)
    return module


def troubles(run: Run) -> list[Finding]:
    return [f for f in run.findings if f.verdict in BAD]


@pytest.mark.parametrize(
    ("name", "check", "verdict"),
    [
        ("cmn_bce_target_not_validated", "compiled-exception", Verdict.FAIL),
        ("cmn_item_break_addcdiv_loop", "compiled-error", Verdict.FAIL),
        ("cmn_lowp_cast_elided", "compiled-error", Verdict.FAIL),
        ("cmn_fp8_scale_from_bf16_amax", "compiled-error", Verdict.WARN),
    ],
)
def test_a_real_defect_is_judged_rightly(name: str, check: str, verdict: Verdict) -> None:
    found = [f for f in troubles(judge_accuracy(case(name).buggy())) if f.check == check]
    assert [f.verdict for f in found] == [verdict]


def test_the_stage_that_errs_is_told() -> None:
    (found,) = troubles(judge_accuracy(case("cmn_item_break_addcdiv_loop").buggy()))
    assert "Inductor's kernels err" in found.message
    (found, *_) = troubles(judge_accuracy(case("cmn_lowp_cast_elided").buggy()))
    assert "emulate_precision_casts = True" in found.hint


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("cmn_rope_bf16_fusion", "buggy"),
        ("cmn_rope_bf16_fusion", "fixed"),
        ("cmn_fp8_scale_from_bf16_amax", "fixed"),
    ],
)
def test_the_negative_control_and_what_is_fixed_are_clean(name: str, version: str) -> None:
    assert troubles(judge_accuracy(getattr(case(name), version)())) == []
