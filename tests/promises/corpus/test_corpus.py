"""Defects that real projects had, and what they became once mended: the first must be found, the second left alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ampcheck import Finding, Run, Subject, Verdict, audit

HERE = Path(__file__).parents[2] / "corpus"
SHARED = HERE.parents[2] / "shared" / "corpus"

CASES = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith(("test_", "_")))
DEFECTS = [name for name in CASES if not name.startswith("healthy_")]
HEALTHY = [name for name in CASES if name.startswith("healthy_")]
COMPILED = ("gated_ffn_output", "eps_below_float16")
"""Compiling is slow: one case that runs in float16 as it is, one under autocast."""

SHARED_EXPECTED: dict[str, tuple[str, str]] = {
    "acm_fp32_norm_weight_promotes_stream": ("dtype", "norm"),
    "acm_inplace_and_out_bypass": ("low-precision-error", ""),
    "acm_rope_upcasts_q_breaks_sdpa": ("low-precision-error", ""),
    "ovf_batched_nms_offset": ("overflow", ""),
    "ovf_eps_1e8_is_zero": ("silent-zero", ""),
    "ovf_mask_finfo_min_plus_score": ("overflow", ""),
    "ovf_mask_minus_1e9": ("low-precision-error", ""),
    "ovf_residual_stream_growth": ("overflow", "blocks.7"),
    "ovf_t5_ffn_wo": ("overflow", "wo"),
    "prec_cumsum_log_decay": ("precision-loss", ""),
    "prec_rope_table_half": ("precision-loss", ""),
    "prec_schedule_buffer_half": ("overflow", ""),
}
"""Check and module that the `expected detection:` of each forward case asks for, in this package's words."""
SHARED_DTYPES = {"acm_fp32_norm_weight_promotes_stream": {"norm": torch.bfloat16}}


@pytest.fixture(autouse=True)
def _equal_weights():
    torch.manual_seed(0)


def load(path: Path) -> ModuleType:
    """The case as a module; Dynamo resumes a broken graph by the module's name, so it stays registered."""
    name = f"corpus_{path.stem}" if path.parent == HERE else f"shared_corpus_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def case(name: str) -> ModuleType:
    return load(HERE / f"{name}.py")


def judged(subject: Any, mode: str, *, compile: bool = False) -> Run:
    """The audit in the mode that a case asks for: `native` or `autocast:DTYPE`."""
    how, _, dtype = mode.partition(":")
    if how == "native":
        return audit(subject, compile=compile)
    return audit(subject, dtype=dtype, autocast=True, compile=compile)


def failures(run: Run) -> list[tuple[str, str, str]]:
    return [(f.check, f.where.module, f.where.op) for f in run.of(Verdict.FAIL)]


def meets(finding: Finding, expected: dict[str, Any]) -> bool:
    """expected: its check, or several of which each may say so, and where it is."""
    where, checks = finding.where, expected["check"]
    return (
        finding.check in ((checks,) if isinstance(checks, str) else checks)
        and where.module == expected["module"]
        and expected.get("op", where.op) == where.op
    )


def params(names: list[str], *, gaps: bool = True) -> list[Any]:
    """The names; those that PyTorch has mended itself say so in `UNTIL`. gaps: those that are judged wrongly so far are
    strict expected failures with the `GAP` they fall into."""

    def marks(module: ModuleType) -> Iterator[pytest.MarkDecorator]:
        if gaps and hasattr(module, "GAP"):
            yield pytest.mark.xfail(reason=module.GAP, strict=True)
        if hasattr(module, "UNTIL"):
            yield pytest.mark.until_torch(*module.UNTIL)

    return [pytest.param(name, marks=[*marks(case(name))]) for name in names]


@pytest.mark.parametrize("name", params(DEFECTS, gaps=False))
def test_defect_shows_on_plain_torch(name):
    case(name).manifests()


@pytest.mark.parametrize("name", params(DEFECTS))
def test_defect_is_found_where_it_is(name):
    module = case(name)
    run = judged(module.buggy(), module.RUN)
    assert any(meets(f, module.EXPECTED) for f in run.of(Verdict.FAIL)), failures(run)


@pytest.mark.parametrize("name", DEFECTS)
def test_mended_defect_passes(name):
    module = case(name)
    assert failures(judged(module.fixed(), module.RUN)) == []


@pytest.mark.parametrize("name", params(HEALTHY))
def test_healthy_model_passes(name):
    module = case(name)
    for mode in module.RUNS:
        assert failures(judged(module.healthy(), mode)) == [], mode


@pytest.mark.parametrize("name", COMPILED)
def test_defect_is_found_in_the_compiled_model(name):
    module = case(name)
    run = judged(module.buggy(), module.RUN, compile=True)
    assert any(f.check in ("overflow", "nonfinite-gradient") and "compiled" in f.subject for f in run.of(Verdict.FAIL))
    assert failures(judged(module.fixed(), module.RUN, compile=True)) == []


@pytest.mark.parametrize("name", CASES)
def test_case_follows_the_protocol(name):
    module = case(name)
    assert name == module.ID
    if name in HEALTHY:
        assert module.RUNS
        return
    assert module.RUN in ("native", "autocast:float16", "autocast:bfloat16")
    assert {"check", "module"} <= set(module.EXPECTED) <= {"check", "module", "op"}
    assert "\nSource: " in module.__doc__
    assert "\nExpected: " in module.__doc__


def shared(name: str) -> tuple[ModuleType, str]:
    path = SHARED / f"{name}.py"
    if not path.is_file():
        pytest.skip("the shared corpus is not beside this repository")
    module = load(path)
    mode = next(line.split()[1] for line in module.__doc__.splitlines() if line.startswith("run: "))
    return module, mode


def declared(name: str, shape: Any) -> Any:
    return Subject(shape, dtypes=SHARED_DTYPES[name]) if name in SHARED_DTYPES else shape


@pytest.mark.parametrize("name", SHARED_EXPECTED)
def test_shared_defect_is_found_where_it_is(name):
    module, mode = shared(name)
    check, where = SHARED_EXPECTED[name]
    run = judged(declared(name, module.buggy()), mode)
    assert any(meets(f, {"check": check, "module": where}) for f in run.of(Verdict.FAIL)), failures(run)


@pytest.mark.parametrize("name", SHARED_EXPECTED)
def test_shared_mended_defect_passes(name):
    module, mode = shared(name)
    assert failures(judged(declared(name, module.fixed()), mode)) == []


def test_every_shared_forward_case_is_expected():
    if not SHARED.is_dir():
        pytest.skip("the shared corpus is not beside this repository")
    forward = {path.stem for path in SHARED.glob("*.py") if "\nkind: forward\n" in path.read_text(encoding="utf-8")}
    assert forward == set(SHARED_EXPECTED)
