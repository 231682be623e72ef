"""Of the speed suites: their size, and a compiler that is reset in each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--size", default="small", choices=("small", "large"), help="of the workloads: for two cores, or a GPU"
    )


@pytest.fixture
def size(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--size"))


@pytest.fixture
def threads() -> Iterator[None]:
    """As many threads as OMP_NUM_THREADS allows; PyTorch has read it already, and a test may have changed it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", before)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh(threads: None) -> Iterator[None]:
    """Dynamo forgets the arms of other tests, which share the code of their modules and would fill its limit."""
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()
