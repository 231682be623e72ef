"""Defects of training loops and reductions: each manifests with plain PyTorch, is found, and passes once mended."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ampcheck import Verdict, audit

HERE = Path(__file__).parents[2] / "corpus" / "training"
CASES = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("test_"))


def case(name: str) -> ModuleType:
    known = f"training_corpus_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        spec.loader.exec_module(module)
    return sys.modules[known]


def subject(name: str, which: str) -> Any:
    """What is judged: the loop, or of a call the repro itself."""
    module = case(name)
    made = getattr(module, which)
    return made if getattr(module, "KIND", "train") == "call" else made()


@pytest.fixture(autouse=True)
def _equal_weights():
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("name", CASES)
def test_a_training_defect_manifests(name):
    assert name == case(name).ID
    case(name).manifests()


def params(names: list[str]) -> list[Any]:
    """The names; those that are judged wrongly so far are strict expected failures with the `GAP` they fall into."""
    gaps = {name: case(name).GAP for name in names if hasattr(case(name), "GAP")}
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=gaps[name], strict=True)) if name in gaps else name
        for name in names
    ]


@pytest.mark.parametrize("name", params(CASES))
def test_a_training_defect_is_found_by_its_check(name):
    run = audit(subject(name, "buggy"))
    checks = case(name).EXPECTED["check"]
    found = {finding.check for finding in run.of(Verdict.FAIL)}
    assert not found.isdisjoint((checks,) if isinstance(checks, str) else checks), found


@pytest.mark.parametrize("name", CASES)
def test_a_mended_training_defect_passes(name):
    run = audit(subject(name, "fixed"))
    assert [(one.check, one.message) for one in run.of(Verdict.FAIL)] == []
