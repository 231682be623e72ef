"""A suite of speed tests whose clock is simulated, so that its verdicts are the same on every machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy.random  # noqa: F401  # pytester forgets what is imported first inside it; numpy and its parts come but once
import pytest

import ampcheck.speed.benchmark
import ampcheck.speed.steps  # noqa: F401

CLOCKS = '''
"""Steps that say how long they take, and a clock that believes them."""
import math
from random import Random

class Clock:
    def __init__(self, noise=0.01, seed=0):
        self.random, self.noise = Random(seed), noise

    def prepare(self, call):
        pass

    def block(self, call, calls):
        return sum(call() for _ in range(calls)) * math.exp(self.noise * self.random.gauss(0, 1))

    def conditions(self):
        return {"load": 1.0}

    def effort(self):
        return None

called = []

def taking(seconds, name=""):
    def step():
        called.append(name)
        return seconds
    return step

def arms(compiled=0.01, **more):
    return {name: taking(s, name) for name, s in {"eager": 0.02, "compiled": compiled, **more}.items()}
'''

CONFTEST = """
import pytest

@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info(config):
    return {"node": "here"}  # the real one tells the clock rate of the moment, and a change of it is warned of
"""

HEADER = """
import pytest
from clocks import Clock, arms, called

pytestmark = pytest.mark.filterwarnings("error")
"""

PAYS = """
def test_pays(speed):
    speed(arms(), at_least=1.2, budget=1, clock=Clock())
"""

Suite = Callable[..., pytest.Pytester]


@pytest.fixture
def speedy(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Makes a suite of the tests that it is given, by default one that passes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(text: str = PAYS) -> pytest.Pytester:
        pytester.makepyfile(clocks=CLOCKS, test_speeds=HEADER + text)
        pytester.makeconftest(CONFTEST)
        return pytester

    return make


def benchmarks(pytester: pytest.Pytester, path: str = "saved.json") -> dict[str, dict[str, Any]]:
    """What pytest-benchmark wrote, by the name of the test."""
    data = json.loads(pytester.path.joinpath(path).read_text(encoding="utf-8"))
    return {benchmark["name"]: benchmark for benchmark in data["benchmarks"]}


def findings(pytester: pytest.Pytester, check: str = "", path: str = "run.json") -> list[dict[str, Any]]:
    """What ampcheck wrote, by default of all checks."""
    data = json.loads(pytester.path.joinpath(path).read_text(encoding="utf-8"))
    return [finding for finding in data["findings"] if check in ("", finding["check"])]
