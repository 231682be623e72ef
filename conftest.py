"""Shared by every test: pytester, the profiles of Hypothesis, slow tests, and skips for hardware that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

# Deadlines measure the machine, not the code; these machines are shared. A CI job draws the same examples each time.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.register_profile(
    "ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True, max_examples=200
)
settings.register_profile("nightly", parent=settings.get_profile("default"), derandomize=False, max_examples=2000)
settings.load_profile("default")

THOROUGH = ("ci", "nightly")
"""Profiles in which slow tests run."""

SLOW = Path(__file__).parent / "tests" / "slow.txt"
"""The slow tests, besides those that are marked so themselves."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _without_slow_tests(config, items)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False"))


def _without_slow_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless a thorough profile, the marker or a test by name is asked for."""
    listed = set(SLOW.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:  # one set of arguments, or all of them
            item.add_marker("slow")
    named = config.option.keyword or any("::" in str(argument) for argument in config.args)
    if named or "slow" in config.option.markexpr or config.getoption("--hypothesis-profile") in THOROUGH:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
