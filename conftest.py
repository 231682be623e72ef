"""Shared by every test: pytester, the profiles of Hypothesis, and skips for missing hardware."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False"))
