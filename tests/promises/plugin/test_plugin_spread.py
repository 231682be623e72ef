"""What real asserts, markers and blocks find is the same report however pytest spreads the tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ampcheck import Run

REAL = """
import ampcheck
import pytest
import torch

@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)

class Overflows(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1e6

@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_well(width):
    ampcheck.assert_numerics(torch.nn.Linear(width, 2), (torch.ones(3, width),), compile=False)

def test_overflows():
    ampcheck.assert_numerics(Overflows(4, 4), (torch.ones(2, 4),), compile=False)

@pytest.mark.ampcheck("overflow")
def test_marked():
    torch.ones(3).half() * 2

def test_watched():
    with ampcheck.watch(fail_on="never"):
        torch.ones(3).half() * 40000

@pytest.mark.xfail(strict=True)
def test_known():
    ampcheck.assert_numerics(Overflows(4, 4), (torch.ones(2, 4),), compile=False, dtype="float16")
"""


@pytest.mark.usefixtures("warm_processes")
def test_one_process_and_two_workers_write_the_same_summary_json_and_page(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_real=REAL)
    reports = {}
    for spread in ("-n0", "-n2"):
        result = pytester.runpytest_subprocess(spread, "--ampcheck-json=run.json", "--ampcheck-html=run.html")
        result.assert_outcomes(passed=6, failed=1, xfailed=1)
        start = next(i for i, line in enumerate(result.outlines) if re.fullmatch("=+ ampcheck =+", line))
        end = next(i for i, line in enumerate(result.outlines[start:], start) if line.startswith("wrote "))
        files = ((pytester.path / name).read_bytes() for name in ("run.json", "run.html"))
        reports[spread] = (result.outlines[start:end], *files)
    assert reports["-n0"] == reports["-n2"]
    run = Run.load(pytester.path / "run.json")
    assert len(run.tables[0].rows) == 8
    assert {row[0] for row in run.tables[0].rows if row[4]} >= {"test_real.py::test_overflows"}


@pytest.mark.parametrize("spread", ["-n0", "-n2"])
def test_ctrl_c_leaves_the_report_of_the_tests_that_ended(sample: pytest.Pytester, spread: str) -> None:
    sample.makepyfile(
        """
        import time
        from pathlib import Path
        import pytest
        from sample import judge

        @pytest.mark.parametrize("number", range(4))
        def test_quick(number):
            judge("pass", 7)

        @pytest.mark.parametrize("number", range(2))
        def test_sleeps(number):
            Path("asleep").touch()
            time.sleep(600)
        """
    )
    command = [sys.executable, "-m", "pytest", spread, "--ampcheck-json=run.json", "--ampcheck-html=run.html"]
    process = subprocess.Popen(command, cwd=sample.path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not Path(sample.path, "asleep").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)  # the reports of the tests that ended reach the process that owns the terminal
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    run = Run.load(sample.path / "run.json")
    assert len(run.tables[0].rows) == len(run.findings) >= 2
    assert "test_quick" in (sample.path / "run.html").read_text()
