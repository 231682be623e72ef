"""Every declaration of the corpus is confirmed by plain float64 runs."""

import ast
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from handwritten import CASES, FAMILIES
from handwritten.case import LOW, Case
from handwritten.loops import as_island
from handwritten.oracle import Oracle, tensors

# Severities between these are neither: another CPU's order of summation could turn the verdict.
FAULT, SOUND = 1.5, 0.75

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
    severity = oracle(case).severity(torch.float32, low)
    assert severity < SOUND, f"{case.name} in float32: {severity:.3g} of the bound of {low}"


@each_format
@each_case
def test_island_behind_rounded_data_is_sound(case, low):
    severity = oracle(case).severity_of(tensors(as_island(case, low)()), low)
    assert severity < SOUND, f"{case.name} as an island in {low}: {severity:.3g} of the bound"


@each_case
def test_declaration_is_complete(case):
    assert case.formats
    assert case.fault_lines, "no line is marked"
    source = case.file.read_text().splitlines()
    assert all("# lost here" in source[line - 1] for line in case.fault_lines)
    assert case.note


def test_corpus_is_wide():
    names = Counter(case.name for case in CASES)
    assert max(names.values()) == 1
    assert len(names) >= 50
    assert {case.family for case in CASES} == set(FAMILIES)
    assert len({case.kind for case in CASES}) == 8


def test_every_mark_belongs_to_a_case():
    folder = Path(__file__).parent
    for family in FAMILIES:
        source = (folder / f"{family}.py").read_text()
        marked = {number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# lost here")}
        claimed = {line for case in CASES if case.family == family for line in case.fault_lines}
        assert marked == claimed, family


def test_cases_import_nothing_of_the_judged():
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("ampcheck") for name in imported), path


@each_case
def test_same_result_twice(case):
    first, second = Oracle(case), oracle(case)
    for left, right in zip(first.exact, second.exact, strict=True):
        assert torch.equal(left, right)
