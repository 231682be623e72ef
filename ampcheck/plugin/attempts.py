"""Further runs of a test in the session, of which nothing shows in it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest


def tear_down(session: pytest.Session, item: pytest.Item | None) -> None:
    """Tear down the fixtures that a test does not need, quietly: what they print and raise is known from the first
    pass, or due to AMP."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    captures = capture is not None and session.items
    with (
        warnings.catch_warnings(record=True),
        capture.item_capture("teardown", item or session.items[-1]) if captures else nullcontext(),
    ):
        pytest.CallInfo.from_call(
            lambda: session._setupstate.teardown_exact(item),
            when="teardown",
            reraise=(pytest.exit.Exception, KeyboardInterrupt),
        )


@contextmanager
def unreported(item: pytest.Item) -> Iterator[list[pytest.TestReport]]:
    """Collect the reports of a test, its subtests' too, and keep them and its warnings out of the session."""
    reports: list[pytest.TestReport] = []
    dropped: dict[str, Any] = {
        name: lambda **_: None for name in ("pytest_runtest_logstart", "pytest_runtest_logfinish")
    }
    dropped["pytest_runtest_logreport"] = lambda report: reports.append(report)
    dropped["pytest_warning_recorded"] = SimpleNamespace(call_historic=lambda **_: None)
    with pytest.MonkeyPatch.context() as patch:
        for hooks in (item.ihook, item.config.hook):
            for name, stand_in in dropped.items():
                patch.setattr(hooks, name, stand_in)
        yield reports
