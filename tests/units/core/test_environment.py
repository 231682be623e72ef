"""A verdict says what it depends on besides the model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from ampcheck.core.environment import environment


def test_versions_threads_and_the_flags_that_change_precision_are_read() -> None:
    known = environment()
    assert known["torch"] == torch.__version__
    assert known["threads"] == torch.get_num_threads()
    assert known["float32 matmul precision"] == torch.get_float32_matmul_precision()
    assert {"TF32 in matmul", "TF32 in cuDNN", "deterministic algorithms", "default dtype", "python"} <= set(known)
    assert json.loads(json.dumps(known)) == known


def test_a_changed_flag_is_seen() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
        assert environment()["float32 matmul precision"] != before
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_device_is_named_with_its_hardware() -> None:
    assert str(environment("cpu")["device"]).startswith("cpu (")


@pytest.mark.usefixtures("warm_processes")
def test_flags_that_torch_refuses_to_read_are_told_as_such() -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    script = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.backends.fp32_precision = 'ieee';"
        "from ampcheck.core.environment import environment; print(environment()['TF32 in matmul'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
