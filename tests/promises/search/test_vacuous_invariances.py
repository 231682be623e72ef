"""An invariance that changes nothing shows nothing: it is told, and never a pass."""

from __future__ import annotations

import pytest
from harness import collect

from ampcheck import Verdict, assert_property
from ampcheck.search import BatchOrder, SearchOptions, Shift
from ampcheck.strategies import tensors

INPUTS = tensors("float16", shape=(4,), min_value=-10, max_value=10)


def test_an_invariance_that_changes_no_input_fails() -> None:
    with collect() as runs, pytest.raises(AssertionError, match="batch order along dimension 5 changed no input"):
        assert_property(
            lambda x: x.relu(),
            inputs=INPUTS,
            invariances=(BatchOrder(5), BatchOrder()),
            compile=False,
            options=SearchOptions(examples=20),
        )
    verdicts = [found.verdict for found in runs[0].findings if found.check == "property-invariance"]
    assert verdicts == [Verdict.FAIL, Verdict.PASS]


def test_one_that_holds_says_how_many_examples_it_changed() -> None:
    run = assert_property(
        lambda x: x.relu(),
        inputs=INPUTS,
        invariances=(BatchOrder(),),
        compile=False,
        options=SearchOptions(examples=20),
    )
    (found,) = [found for found in run.findings if found.check == "property-invariance"]
    assert found.verdict is Verdict.PASS
    assert 1 <= (found.observed or 0) <= 20


def test_one_that_was_not_reached_is_a_skip() -> None:
    broken = lambda x: (x * 1e4) * 1e4 / 1e8  # noqa: E731
    with collect() as runs, pytest.raises(AssertionError):
        assert_property(
            broken,
            inputs=tensors("float16", shape=(2,), min_value=9, max_value=10),
            invariances=(Shift(5.0, 5.0),),
            compile=False,
            options=SearchOptions(examples=9),
        )
    (found,) = [found for found in runs[0].findings if found.check == "property-invariance"]
    assert found.verdict is Verdict.SKIP
