"""Defects that real projects had in their use of autocast: found by the guards, and silent once mended."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ampcheck.autocast.guards.guard import judge_call
from ampcheck.core.run import Finding, Verdict

SHARED = Path(__file__).parents[4] / "shared" / "corpus"

EXPECTED = {
    "acm_bce_banned_on_cuda": ("policy-banned", "aten::binary_cross_entropy"),
    "acm_checkpoint_loses_autocast": ("autocast-checkpoint", "aten::addmm"),
    "acm_checkpoint_mutable_precision_flag": ("autocast-checkpoint", "aten::addmm"),
    "acm_grouped_mm_not_registered": ("policy-unregistered", "aten::_grouped_mm"),
    "acm_inplace_and_out_bypass": ("autocast-bypass", "aten::addmm_"),
    "acm_thread_loses_autocast_dtype": ("autocast-thread", "aten::addmm"),
    "acm_train_loop_inside_autocast": ("autocast-scope", ""),
}
"""Check and op of each case, as its `expected detection` asks for."""
NEWER = {"acm_grouped_mm_not_registered": pytest.mark.needs_torch("2.8", "torch._grouped_mm")}
CASES = [pytest.param(name, marks=NEWER.get(name, ())) for name in EXPECTED]
SILENT = ("dst_tf32_conv_default", "dst_bf16_gradient_reduce", "dst_grad_norm_bf16_grouping")
"""Calls whose defects are not those of autocast's use."""


def load(name: str) -> ModuleType:
    path = SHARED / f"{name}.py"
    if not path.is_file():
        pytest.skip("the shared corpus is not beside this repository")
    spec = importlib.util.spec_from_file_location(f"guarded_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def findings(name: str, twin: str) -> list[Finding]:
    torch.manual_seed(0)
    make: Any = getattr(load(name), twin)

    def call() -> None:
        subject = make()
        if isinstance(subject, dict):
            subject["run"]()
        elif isinstance(subject, tuple) and isinstance(subject[0], torch.nn.Module):
            with torch.autocast("cpu", torch.bfloat16):
                subject[0](*subject[1])

    run = judge_call(call, name)
    return [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


@pytest.mark.parametrize("name", CASES)
def test_a_defect_is_found_at_its_op(name: str) -> None:
    found = findings(name, "buggy")
    assert EXPECTED[name] in {(f.check, f.where.op) for f in found if f.verdict is Verdict.FAIL}
    assert all(Path(f.where.file).stem == name for f in found)


@pytest.mark.parametrize("name", [*CASES, *SILENT])
def test_a_mended_defect_is_silent(name: str) -> None:
    assert findings(name, "fixed") == []


@pytest.mark.parametrize("name", SILENT)
def test_a_defect_of_another_kind_is_left_to_others(name: str) -> None:
    assert findings(name, "buggy") == []
