"""The test that runs now, as pytest names it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def current_test() -> str:
    """The id of the test, such as `tests/test_model.py::test_loss[cpu]`; empty outside of tests under pytest."""
    if "pytest" not in sys.modules:
        return ""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def pytest_command(test: str) -> str:
    """The command that runs a test alone from the working directory, which may lie below the root of the tests."""
    file, _, inside = test.partition("::")
    folder = Path.cwd()
    root = next((parent for parent in (folder, *folder.parents) if (parent / file).is_file()), folder)
    path = os.path.relpath(root / file, folder)
    return f"pytest {shlex.quote(f'{path}::{inside}' if inside else path)}"


def block_name(model: str) -> str:
    """Return what findings call a block of code that watches a model, by its class, or "" for none: its test comes
    first."""
    test = current_test()
    return f"{test} [{model}]" if test and model else test or model or "this block"
