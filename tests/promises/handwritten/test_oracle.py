"""Every declaration of the corpus is confirmed by plain float64 runs."""

import ast
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from handwritten import CASES, FAMILIES
from handwritten.case import KINDS, LOW, MARK, Case
from handwritten.loops import as_island
from handwritten.oracle import Oracle, run, tensors

# Severities between these are neither: another CPU's order of summation could turn the verdict.
FAULT, SOUND = 1.5, 0.75

FOLDER = Path(__file__).parents[2] / "handwritten"

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_format = pytest.mark.parametrize("low", LOW, ids=("float16", "bfloat16"))


@lru_cache
def oracle(case: Case) -> Oracle:
    return Oracle(case)


@each_format
@each_case
def test_low_run_is_at_fault_exactly_where_declared(case, low):
    severity = oracle(case).severity(low, low)
    if low in case.formats:
        assert severity > FAULT, f"{case.name} in {low}: {severity:.3g} of the bound, declared a fault"
    else:
        assert severity < SOUND, f"{case.name} in {low}: {severity:.3g} of the bound, declared sound"


@each_format
@each_case
def test_float32_twin_is_sound(case, low):
    twin = oracle(case).severity(torch.float32, low)
    assert twin < SOUND, f"{case.name} in float32: {twin:.3g} of the bound of {low}"
    island = oracle(case).severity_of(tensors(as_island(case, low)()), low)
    assert island < SOUND, f"{case.name} in float32 behind data in {low}: {island:.3g} of the bound"


def test_results_repeat():
    for case in CASES:
        for first, second in zip(oracle(case).exact, run(case, torch.float64), strict=True):
            assert torch.equal(first, second), case.name


def test_declarations_are_complete():
    for case in CASES:
        assert case.formats, case.name
        assert case.note.endswith("."), case.name
        assert case.kind in KINDS, case.name
        source = case.file.read_text().splitlines()
        assert case.fault_lines, case.name
        assert all(MARK in source[line - 1] for line in case.fault_lines), case.name


def test_corpus_is_wide():
    names = Counter(case.name for case in CASES)
    assert max(names.values()) == 1
    assert len(names) >= 50
    assert {case.family for case in CASES} == set(FAMILIES)
    assert {case.kind for case in CASES} == set(KINDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mark_belongs_to_a_case(family):
    source = (FOLDER / f"{family}.py").read_text().splitlines()
    marked = {number for number, line in enumerate(source, 1) if line.endswith(MARK)}
    claimed = {line for case in CASES if case.family == family for line in case.fault_lines}
    assert marked == claimed
    # A mark on a closing bracket names no line of a traceback.
    assert all(source[line - 1].removesuffix(MARK).strip(" )]}") for line in marked)


def test_cases_import_nothing_of_the_judged():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("ampcheck") for name in imported), path
