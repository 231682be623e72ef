"""Defects that compilation makes or hides, judged by the audit: each is found, and what is mended is clean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from test_corpus import SHARED, load

from ampcheck import Verdict, audit

EXPECTED = {
    "cmn_autocast_nesting_leak_on_exception": (Verdict.FAIL, "autocast-state"),
    "cmn_bce_target_not_validated": (Verdict.FAIL, "compiled-exception"),
    # Compiled code is nearer to float64 than eager mode here, so it is told and not failed.
    "cmn_fp8_scale_from_bf16_amax": (Verdict.WARN, "compiled-error"),
    "cmn_item_break_addcdiv_loop": (Verdict.FAIL, "compiled-error"),
    "cmn_lowp_cast_elided": (Verdict.FAIL, "compiled-error"),
    "cmp_cache_artifacts_before_compile": (Verdict.FAIL, "cache-artifacts"),
    "cmp_isinf_branch_graph_break": (Verdict.FAIL, "graph-break"),
    "cmp_item_logging_graph_break": (Verdict.FAIL, "graph-break"),
    "cmp_layer_index_attribute": (Verdict.FAIL, "eager-fallback"),
}
CONTROLS = ("cmn_rope_bf16_fusion", "cmp_mode_toggle_recompiles")
"""Healthy as given: nearer to float64 compiled than eager; and a module that only a harness toggles between modes."""


def subject(name: str, which: str) -> Any:
    path = SHARED / f"{name}.py"
    if not path.is_file():
        pytest.skip("the shared corpus is not beside this repository")
    made = getattr(load(path), which)
    torch.manual_seed(0)
    # A case of kind call is what runs; all others return what is judged.
    return made if "\nkind: call\n" in path.read_text(encoding="utf-8") else made()


def loud(run: Any) -> list[tuple[str, str]]:
    return [(str(f.verdict), f.check) for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


NEEDS = {
    "cmp_cache_artifacts_before_compile": [pytest.mark.needs_torch("2.7", "torch.compiler.save_cache_artifacts")],
    "cmp_layer_index_attribute": [pytest.mark.needs_torch("2.7", "integer attributes of modules are constants")],
}


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=NEEDS.get(name, [])) for name in names]


@pytest.mark.parametrize("name", cases(EXPECTED))
def test_a_defect_of_compilation_is_found(name):
    verdict, check = EXPECTED[name]
    run = audit(subject(name, "buggy"))
    assert any(f.verdict is verdict and f.check == check for f in run.findings), loud(run)


@pytest.mark.parametrize("name", cases([*EXPECTED, *CONTROLS]))
def test_what_is_mended_is_left_alone(name):
    if SHARED.is_dir() and not hasattr(load(SHARED / f"{name}.py"), "fixed"):
        pytest.skip("the case has no mended form")
    run = audit(subject(name, "fixed"))
    assert loud(run) == []


@pytest.mark.parametrize("name", CONTROLS)
def test_a_healthy_model_is_left_alone(name):
    assert loud(audit(subject(name, "buggy"))) == []


def test_every_shared_case_of_compilation_is_expected():
    if not SHARED.is_dir():
        pytest.skip("the shared corpus is not beside this repository")
    assert {p.stem for p in SHARED.glob("cm[np]_*.py")} == {*EXPECTED, *CONTROLS}
