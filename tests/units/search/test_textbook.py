"""Ten textbook functions break within 200 examples in both formats; what an engineer writes instead does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from textbook import FORMATS, TEXTBOOK

from ampcheck import assert_property
from ampcheck.core.run import Verdict, collect
from ampcheck.torchtools.pytree import tensors

CASES = [(name, fmt) for name in TEXTBOOK for fmt in FORMATS]


def smallest_input(message: str) -> Any:
    """The example that a finding prints, made again."""
    found = re.search(r"The smallest input found is (.*), after \d+ of 200 examples", message)
    assert found, message
    return eval(found[1], {"torch": torch})


@pytest.mark.parametrize(("name", "fmt"), CASES)
def test_a_breaking_input_of_a_few_elements_is_found(name: str, fmt: str) -> None:
    case = TEXTBOOK[name]
    with collect() as runs, pytest.raises(AssertionError):
        assert_property(case.naive, inputs=case.inputs(fmt), compile=False)
    failures = runs[0].of(Verdict.FAIL)
    examples = [smallest_input(finding.message) for finding in failures]
    assert min(max(t.numel() for _, t in tensors(example)) for example in examples) <= 3
    assert {finding.check for finding in failures} <= {"property-finite", "property-accuracy"}


@pytest.mark.parametrize(("name", "fmt"), CASES)
def test_none_is_found_for_the_stable_form(name: str, fmt: str) -> None:
    case = TEXTBOOK[name]
    run = assert_property(case.stable, inputs=case.inputs(fmt), compile=False)
    assert not run.failed
    assert 50 <= run.coverage.seen["examples"] <= 200


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_found_fails_again_by_itself(fmt: str) -> None:
    case = TEXTBOOK["softmax"]
    with collect() as runs, pytest.raises(AssertionError):
        assert_property(case.naive, inputs=case.inputs(fmt), compile=False)
    example = smallest_input(runs[0].of(Verdict.FAIL)[0].message)
    assert not bool(case.naive(example).isfinite().all())
    assert bool(case.stable(example).isfinite().all())
