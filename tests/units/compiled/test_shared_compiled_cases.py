"""Real defects of compiled projects, beside this repository: found at their place, and clean once mended."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from graph_cases import EAGER
from graph_watch import observe_graphs

from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject

SHARED = Path(__file__).parents[4] / "shared" / "corpus"

EXPECTED = {
    "cmp_isinf_branch_graph_break": ("graph-break", "if not self.branch or torch.isinf(h).any():"),
    "cmp_item_logging_graph_break": ("graph-break", "LOG.append(loss.item())"),
    "cmp_layer_index_attribute": ("eager-fallback", "def forward(self, x):"),
    "cmp_cache_artifacts_before_compile": ("cache-artifacts", ""),
    "cmn_autocast_nesting_leak_on_exception": ("autocast-state", "return x.index_select(0, idx)"),
}
"""Check and source line that the `expected detection:` of each case asks for."""


NEEDS = {
    "cmp_cache_artifacts_before_compile": [pytest.mark.needs_torch("2.7", "torch.compiler.save_cache_artifacts")],
    "cmp_layer_index_attribute": [pytest.mark.needs_torch("2.7", "integer attributes of modules are constants")],
}


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=NEEDS.get(name, [])) for name in names]


@pytest.fixture(autouse=True)
def _equal_weights() -> None:
    torch.manual_seed(0)


def case(name: str) -> ModuleType:
    """The case as a module; Dynamo resumes a broken graph by the module's name, so it stays registered."""
    path = SHARED / f"{name}.py"
    if not path.is_file():
        pytest.skip("the shared corpus is not beside this repository")
    known = f"shared_graph_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


def judged(make: Callable[[], Any], name: str) -> Run:
    shape = make if name.startswith("cmp_cache") else make()
    return judge_graph(Subject(shape, name=name), options=CompileOptions() if callable(shape) else EAGER)


def is_at(finding: Finding, name: str, text: str) -> bool:
    lines = (SHARED / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return not text or text in lines[(finding.where.line or 1) - 1]


@pytest.mark.parametrize("name", cases(EXPECTED))
def test_shared_defect_is_found_where_it_is(name: str) -> None:
    check, text = EXPECTED[name]
    run = judged(case(name).buggy, name)
    found = [finding for finding in run.of(Verdict.FAIL) if finding.check == check]
    assert found
    assert all(is_at(finding, name, text) for finding in found)


@pytest.mark.parametrize("name", cases(name for name in EXPECTED if not name.startswith("cmn_autocast")))
def test_shared_mended_defect_passes(name: str) -> None:
    assert judged(case(name).fixed, name).of(Verdict.FAIL) == ()


@pytest.mark.needs_torch("2.7", "integer attributes of modules are constants")
def test_three_blocks_break_three_times_and_twelve_of_twenty_run_eager() -> None:
    breaks = judged(case("cmp_isinf_branch_graph_break").buggy, "cmp_isinf_branch_graph_break")
    assert [f.observed for f in breaks.of(Verdict.FAIL)] == [3]
    eager = judged(case("cmp_layer_index_attribute").buggy, "cmp_layer_index_attribute")
    assert [f.observed for f in eager.of(Verdict.FAIL) if f.check == "eager-fallback"] == [12]


def test_toggled_modes_are_five_compilations_of_four_kinds() -> None:
    module = case("cmp_mode_toggle_recompiles")
    with observe_graphs(raises=False) as seen:
        module.manifests()
    assert seen.stats is not None
    assert len(seen.stats.graphs) == 5
    assert {one.kind for one in seen.stats.recompiles} == {"training flag", "grad mode", "autocast", "inference mode"}
    plain = judged(module.buggy, "cmp_mode_toggle_recompiles")
    assert plain.of(Verdict.FAIL) == (), "one mode is one graph"


def test_the_other_compiled_cases_raise_no_alarm_of_graphs() -> None:
    for name in ("cmn_rope_bf16_fusion", "cmn_lowp_cast_elided"):
        assert judged(case(name).buggy, name).of(Verdict.FAIL) == ()


# Accuracy ---------------------------------------------------------------------------------------------------------


def troubles(run: Run) -> list[Finding]:
    return [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


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
    found = [f for f in troubles(judge_accuracy(Plan.of(case(name).buggy()))) if f.check == check]
    assert [f.verdict for f in found] == [verdict]


def test_the_stage_that_errs_is_told() -> None:
    (found,) = troubles(judge_accuracy(Plan.of(case("cmn_item_break_addcdiv_loop").buggy())))
    assert "Inductor's kernels are at fault" in found.message
    (found, *_) = troubles(judge_accuracy(Plan.of(case("cmn_lowp_cast_elided").buggy())))
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
    assert troubles(judge_accuracy(Plan.of(getattr(case(name), version)()))) == []
