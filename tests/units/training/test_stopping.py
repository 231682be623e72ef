"""Promise: code that catches every exception is judged by its observed steps, and its user reads what it caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck import Finding, Run, Verdict


def _loop(steps: int) -> Callable[[], None]:
    """A loop that leaves out the batches which raise."""

    def main() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(steps):
            try:
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            except BaseException:  # noqa: BLE001, PERF203
                continue

    return main


def _loud(run: Run) -> list[Finding]:
    return [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN, Verdict.INCOMPLETE)]


@pytest.mark.parametrize("steps", [8, 100])
def test_code_that_leaves_out_what_raises_comes_to_its_end(steps: int) -> None:
    run = ampcheck.audit(_loop(steps), steps=4)
    assert run.coverage.seen["steps"] == 4
    assert not _loud(run)


def test_code_that_catches_every_exception_runs_on_and_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampcheck.training.stopping._CAUGHT", 10)
    run = ampcheck.audit(_loop(30), steps=4)
    assert run.coverage.seen["steps"] == 4
    (found,) = _loud(run)
    assert (found.check, found.verdict) == ("coverage", Verdict.INCOMPLETE)
    assert "caught every exception" in found.message
    assert "catch Exception, not BaseException" in found.hint
