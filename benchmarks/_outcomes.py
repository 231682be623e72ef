"""A pytest plugin that writes the outcome of each test as a line of JSON to the file that `OUTCOMES` names.

A JUnit file would do, but ampcheck's own plugin is on where one is asked for, and some tests are of a process without.
"""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """One line for a test that failed in any phase, was skipped, or passed; expected failures count as skipped."""
    if report.failed or report.skipped or report.when == "call":
        _write(report)


def pytest_collectreport(report: Any) -> None:
    """One line for a file that cannot be collected."""
    if report.failed:
        _write(report)


def _write(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # which reports to the process that writes
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = (
        report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", report.longreprtext)
    )
    line = {"test": report.nodeid, "outcome": report.outcome, "message": message, "text": report.longreprtext}
    with open(os.environ["OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
