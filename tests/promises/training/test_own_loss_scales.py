"""Loss scales that code has of its own: a skipped step is no overflow, one that is made with infinities is."""

from __future__ import annotations

from typing import Any

import pytest
from own_loss_scales import TESTS, Test, own_loss_scale

from ampcheck import Run, Verdict, audit


def _audit(test: Test, **options: Any) -> Run:
    return audit(own_loss_scale(test, **options))


@pytest.mark.parametrize("unscale_first", [False, True], ids=["test then unscale", "unscale then test"])
@pytest.mark.parametrize("name", TESTS)
def test_steps_that_code_skips_for_a_lower_scale_are_no_defect(name: str, unscale_first: bool) -> None:
    run = _audit(TESTS[name], unscale_first=unscale_first)
    assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]


def test_a_step_that_is_made_with_infinities_fails() -> None:
    assert any(f.check == "overflow" for f in _audit(TESTS["a number"], skips=False).of(Verdict.FAIL))


def test_a_scale_that_never_falls_makes_no_step_and_fails() -> None:
    assert any(f.check == "overflow" for f in _audit(TESTS["a number"], backs_off=False).of(Verdict.FAIL))
