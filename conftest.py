"""Shared by every test: pytester, the profiles of Hypothesis, and skips for missing hardware."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from importlib.metadata import version

import budget
import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

pytest_plugins = ["pytester"]

# Workers of xdist share the cores: threads that wait for each other on a core that is taken multiply the time by four.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))  # torch is not imported yet
if "OMP_NUM_THREADS" in os.environ:  # a sweep sets both for its children, which start warm where neither differs
    os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

# Deadlines measure the machine, not the code; these machines are shared. A CI job draws the same examples each time.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.register_profile(
    "ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True, max_examples=200
)
settings.register_profile("nightly", parent=settings.get_profile("default"), derandomize=False, max_examples=2000)
settings.load_profile("default")


# Instruction sets that the processor names need no trial: Inductor would build and load a library for each, again in
# each process and in each empty cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# What tests run must not report to the CI job that runs the tests. And they start hundreds of interpreters, each of
# which would compile the package again where no bytecode is written.
for _name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(_name, None)


# A shell that starts the tests in the background has them ignore Ctrl-C, and so the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def warm_processes() -> Iterator[None]:
    """Processes of Python that the test starts have torch imported."""
    from warm_processes import warm

    with warm():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-budget", action="store_true", help="measure what runs, and write tests/budget.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-budget"):
        if config.getoption("numprocesses", None) or any("::" in argument for argument in config.args):
            raise pytest.UsageError("--write-budget measures whole files, in one process: leave out -n and node ids")
        config.pluginmanager.register(budget.Recorder())


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is marked slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    budget.choose(config, items)
    _skip_other_releases(items)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False"))


def pytest_collection_finish() -> None:
    """Leave out of each later collection of garbage what lives as long as the process: it took 5 % of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def _skip_other_releases(items: list[pytest.Item]) -> None:
    """Skip what `needs_torch` and `until_torch` say is not true of the installed release."""
    installed = Version(Version(version("torch")).base_version)
    for item in items:
        for marker in item.iter_markers("needs_torch"):
            release, reason = marker.args
            if installed < Version(release):
                item.add_marker(pytest.mark.skip(reason=f"needs torch {release}: {reason}; this is {installed}"))
        for marker in item.iter_markers("until_torch"):
            release, reason = marker.args
            if installed >= Version(release):
                item.add_marker(pytest.mark.skip(reason=f"until torch {release}: {reason}; this is {installed}"))
