"""Verdicts become exceptions here, and nowhere else."""

from __future__ import annotations

from collections.abc import Collection

from ampcheck.core.run import FAIL_ON, Run, Verdict, describe_causes, emit
from ampcheck.core.settings import load_settings
from ampcheck.outcome.accept import accept


def verify(run: Run) -> Run:
    """Emit `run` without what the settings of the repository accept, then raise `AssertionError` with its failures.

    `fail-on` in `[tool.ampcheck]` is the mildest verdict that raises, by default `fail`.
    """
    __tracebackhide__ = True
    settings = load_settings()
    run = accept(run, settings)
    emit(run)
    raise_for(run, FAIL_ON[settings.fail_on])
    return run


def raise_for(run: Run, verdicts: Collection[Verdict]) -> None:
    """Raise `AssertionError` with the findings of these verdicts."""
    __tracebackhide__ = True
    if failures := [finding for verdict in verdicts for finding in run.of(verdict)]:
        raise AssertionError("\n\n".join(describe_causes(run.findings, failures)))
