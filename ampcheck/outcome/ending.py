"""The end of a watched block or training: its line, its findings, and whether they raise."""

from __future__ import annotations

from ampcheck.core.current_test import current_test
from ampcheck.core.run import FAIL_ON, Run, emit
from ampcheck.core.settings import load_settings
from ampcheck.outcome.accept import accept
from ampcheck.outcome.raising import raise_for, with_test
from ampcheck.report.ending import print_ending


def end(run: Run, fail_on: str | None, *, prints: bool = True, raises: bool = True) -> None:
    """Emit a run, print its line and the findings that do not raise; raise `AssertionError` as `fail_on` says.

    fail_on: a name of `FAIL_ON`; None is that of the settings in a test under pytest, and `never` elsewhere.
    """
    __tracebackhide__ = True
    settings = load_settings()
    run = with_test(accept(run, settings))
    verdicts = FAIL_ON[fail_on or (settings.fail_on if current_test() else "never")] if raises else ()
    emit(run)
    if prints:
        print_ending(run, verdicts)
    raise_for(run, verdicts)
