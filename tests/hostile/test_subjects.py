"""No odd subject crashes ampcheck, ends the interpreter, or passes without having run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import odd_calls
import odd_forwards
import odd_modules
import odd_values
import pytest
import torch
from odd_rows import ROWS

from ampcheck.audit import audit
from ampcheck.errors import UsageError
from ampcheck.record import Run, Verdict

assert all((odd_calls, odd_forwards, odd_modules, odd_values))


def _audited(make: Any) -> Run:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the subjects' own
        return audit(make(), dtype="float16", compile=False)


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def _row(name: str) -> Any:
    reason = ROWS[name][1].xfail
    return pytest.param(name, marks=[pytest.mark.xfail(strict=False, reason=reason)] if reason else [])


@pytest.mark.parametrize("name", [_row(name) for name in ROWS])
def test_an_odd_subject_gets_the_verdict_that_it_deserves(name: str) -> None:
    make, report = ROWS[name]
    state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
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
        failed = {finding.check for finding in run.of(Verdict.FAIL)}
        messages = [(finding.check, finding.message) for finding in run.of(Verdict.FAIL)]
        if report.outcome == "fails":
            assert failed, run
            assert failed >= set(report.checks), messages
        elif report.outcome == "passes":
            assert not failed, messages
            assert run.coverage.seen.get("outputs") or run.coverage.seen.get("ops"), run.coverage
        assert failed or run.coverage.seen or not run.of(Verdict.PASS), "a pass of a run that did not happen"
        assert all(len(finding.message) < 5_000 for finding in run.findings)
    assert state == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype())
