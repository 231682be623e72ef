"""`--ampcheck-device`, its ini twin and the fixture. In subprocesses, where a stand-in for torch is the only one."""

from __future__ import annotations

import pytest

SUITE = """
import sys

def test_it(ampcheck_device):
    print("device", ampcheck_device, "torch" in sys.modules)

def test_again(ampcheck_device):
    print("device", ampcheck_device, "torch" in sys.modules)
"""

TORCH = """
from types import SimpleNamespace

__version__ = "9.9"
cuda = xpu = SimpleNamespace(is_available=lambda: {there}, device_count=lambda: 2)
backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: {there}))
"""
"""A torch that has the accelerators or lacks them, and is imported in no time."""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Two tests that print their device and whether torch was imported."""
    pytester.makepyfile(SUITE)
    return pytester


def test_the_default_is_the_cpu_and_imports_no_torch(suite: pytest.Pytester, spread: str) -> None:
    result = suite.runpytest_subprocess(spread, "-rP")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["device cpu False", "device cpu False"])


def test_the_ini_twin_and_the_option_over_it(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nampcheck_device = cuda:1\n")
    suite.makepyfile(torch=TORCH.format(there=True))
    suite.runpytest_subprocess("-n0", "-rP").stdout.fnmatch_lines(["device cuda:1 True", "device cuda:1 True"])
    suite.runpytest_subprocess("-n0", "-rP", "--ampcheck-device=cpu").stdout.fnmatch_lines(["device cpu False"])


def test_the_header_names_the_device(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess(
        "-n0", "--ampcheck", "--ampcheck-device=cuda:3", "--deselect=x", "-k", "not test"
    )
    result.stdout.fnmatch_lines(["ampcheck: *, device cuda:3"])


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "xpu:0", "mps"])
def test_a_device_that_is_there(suite: pytest.Pytester, device: str) -> None:
    suite.makepyfile(torch=TORCH.format(there=True))
    result = suite.runpytest_subprocess("-n0", "-rP", f"--ampcheck-device={device}")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"device {device} True"])


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "xpu", "mps"])
def test_a_device_that_is_not_there(suite: pytest.Pytester, device: str) -> None:
    suite.makepyfile(torch=TORCH.format(there=False))
    result = suite.runpytest_subprocess("-n0", f"--ampcheck-device={device}")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        [f"E *UsageError: --ampcheck-device={device}: PyTorch 9.9 finds no such device here, use cpu"]
    )


def test_an_index_beyond_the_devices(suite: pytest.Pytester) -> None:
    suite.makepyfile(torch=TORCH.format(there=True))
    result = suite.runpytest_subprocess("-n0", "--ampcheck-device=cuda:2")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["E *UsageError: --ampcheck-device=cuda:2: this machine has 2 of them, *cuda:0"])


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cpu:0", "mps:1", "", "cuda:1 "])
def test_a_string_that_is_no_device_is_a_usage_error(pytester: pytest.Pytester, device: str) -> None:
    result = pytester.runpytest("-n0", f"--ampcheck-device={device}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines[0] == (
        f"ERROR: --ampcheck-device={device} is no device: choose one of cpu, cuda, cuda:N, xpu, xpu:N, mps"
    )


def test_the_string_is_judged_without_torch(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import sys\ndef pytest_unconfigure(): print('torch' in sys.modules)")
    result = pytester.runpytest_subprocess("-n0", "--ampcheck-device=gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "torch" not in result.stdout.str()
    assert pytester.runpytest_subprocess("-n0", "--ampcheck-device=cuda").outlines[-1] == "False"


def test_two_workers_are_told_too(suite: pytest.Pytester) -> None:
    suite.makepyfile(torch=TORCH.format(there=True))
    result = suite.runpytest_subprocess("-n2", "-rP", "--ampcheck-device=cuda:1")
    result.stdout.fnmatch_lines(["device cuda:1 True", "device cuda:1 True"])


def test_the_real_torch_is_asked(suite: pytest.Pytester) -> None:
    import torch

    asked = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    device = next(name for name, backend in asked.items() if not backend.is_available())
    result = suite.runpytest_subprocess("-n0", f"--ampcheck-device={device}")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        [f"E *UsageError: --ampcheck-device={device}: PyTorch {torch.__version__} finds no such *"]
    )


@pytest.mark.cuda
def test_the_real_cuda_device_is_found(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-n0", "-rP", "--ampcheck-device=cuda:0")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["device cuda:0 True"])
