"""The pages of the checks: each failing example yields its check's finding as shown, each mended example none."""

from __future__ import annotations

import examples
import pytest
from snippets import in_essence

from ampcheck.checks import REGISTRY
from ampcheck.core.run import describe

CHECKS = examples.documented()


def test_every_check_has_an_example_or_is_listed_without() -> None:
    assert set(CHECKS) | examples.WITHOUT.keys() == set(REGISTRY)
    assert not examples.WITHOUT.keys() & set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_an_example_says_what_it_shows_and_how_it_runs(check: str) -> None:
    failing, mended = (examples.example(check, side) for side in examples.SIDES)
    assert failing.text
    assert mended.text
    assert failing.code != mended.code
    assert failing.run.replace("failing.py", "mended.py") == mended.run


@pytest.mark.filterwarnings("ignore")  # the examples are the user's code
@pytest.mark.parametrize("check", CHECKS)
def test_a_failing_example_yields_its_finding_and_a_mended_one_none(check: str) -> None:
    failing = examples.run(check, "failing")
    assert failing, "no finding"
    assert in_essence(describe(failing[0])) == in_essence(examples.finding_of(check)), "run docs/site/examples.py"
    assert [describe(finding) for finding in examples.run(check, "mended")] == []
