"""No odd subject crashes ampcheck, ends the interpreter, or passes without having run."""

from __future__ import annotations

import re
import warnings
from typing import Any

import odd_calls
import odd_forwards
import odd_modules
import odd_neighbours
import odd_outputs
import odd_values
import pytest
import torch
from odd_rows import ROWS

from ampcheck import Run, UsageError, Verdict, audit

assert all((odd_calls, odd_forwards, odd_modules, odd_neighbours, odd_outputs, odd_values))

VERDICTS = {"fails": Verdict.FAIL, "incomplete": Verdict.INCOMPLETE, "warns": Verdict.WARN}


def _audited(make: Any) -> Run:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the subjects' own
        return audit(make(), dtype="float16", compile=False)


def _state() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu")
    return torch.is_grad_enabled(), autocast, torch.get_default_dtype(), torch.get_default_device()


@pytest.mark.parametrize("name", ROWS)
def test_an_odd_subject_gets_the_verdict_that_it_deserves(name: str) -> None:
    make, report = ROWS[name]
    state = _state()
    if report.error is not None:
        with pytest.raises(report.error):
            _audited(make)
    elif report.outcome == "refused":
        with pytest.raises(UsageError, match=f"(?s){report.phrase}") as caught:
            _audited(make)
        text = str(caught.value)
        assert len(text) < 2_000
        assert not re.search(r"[\x00-\x08\x0b-\x1f]", text), text
    else:
        run = _audited(make)
        failed = run.of(Verdict.FAIL)
        if report.outcome == "passes":
            assert not [*failed, *run.of(Verdict.WARN), *run.of(Verdict.INCOMPLETE)], run
            assert run.coverage.seen.get("outputs") or run.coverage.seen.get("ops"), run.coverage
        else:
            found = run.of(VERDICTS[report.outcome])
            assert found, run
            assert {finding.check for finding in found} >= set(report.checks), run
            named = [f.message for f in found if f.check in report.checks or not report.checks]
            assert any(re.search(report.phrase, message) for message in named), run
            assert report.outcome == "fails" or not failed, run
        assert failed or run.coverage.seen or not run.of(Verdict.PASS), "a pass of a run that did not happen"
        assert all(len(finding.message) < 5_000 for finding in run.findings)
    assert state == _state()
