"""Promise: code that catches every exception does not run for ever; its user reads why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.core.run import Verdict

CATCHES = """
import torch
import ampcheck

def main():
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)

    def train():
        while True:
            try:
                (weight - 1).square().sum().backward()
                optimizer.step()
            except BaseException:
                pass

{}

print(ampcheck.audit(main, steps=2).coverage)
"""


@pytest.mark.slow
def test_code_that_catches_every_exception_twice_ends_with_a_sentence() -> None:
    code = CATCHES.format(
        "    while True:\n        try:\n            train()\n        except BaseException:\n            pass"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 2
    assert "catch Exception, not BaseException" in ended.stderr


def _bare() -> None:
    step = _steps()
    while True:
        try:  # noqa: SIM105
            step()
        except:  # noqa: E722, PERF203
            pass


def _named() -> None:
    step = _steps()
    while True:
        try:
            step()
        except (Exception, BaseException) as error:  # noqa: BLE001, PERF203
            str(error)
            continue


def _inside_a_function() -> None:
    step = _steps()

    def tried() -> bool:
        try:
            step()
        except BaseException:  # noqa: BLE001
            return False
        return True

    while True:
        tried()


def _with_a_file() -> None:
    step = _steps()
    while True:
        try:
            with open(__file__, encoding="utf-8"):
                step()
        except BaseException:  # noqa: BLE001, PERF203
            pass
        finally:
            str(step)


def _steps() -> Callable[[], None]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    return step


# Python 3.10 closes no file where a line event comes between the block of `with` and the call of `__exit__`.
UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "main",
    [
        _bare,
        _named,
        _inside_a_function,
        pytest.param(_with_a_file, marks=[UNCLOSED] if sys.version_info < (3, 11) else []),
    ],
)
def test_code_that_catches_every_exception_is_ended(main: Callable[[], None]) -> None:
    tracer, frame = sys.gettrace(), sys._getframe()
    own = frame.f_trace
    run = ampcheck.audit(main, steps=4)
    assert run.coverage.seen["steps"] == 4
    assert not [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
    assert sys.gettrace() is tracer
    assert frame.f_trace is own


def test_code_that_tries_again_a_few_times_is_ended() -> None:
    def main() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        caught = 0
        while caught < 5:
            try:
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            except BaseException:  # noqa: BLE001, PERF203
                caught += 1

    run = ampcheck.audit(main, steps=4)
    assert run.coverage.seen["steps"] == 4
    assert not [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
