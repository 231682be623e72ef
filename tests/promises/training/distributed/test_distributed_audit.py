"""`ampcheck audit` under torchrun: every rank takes part, one run is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ampcheck import Run, Verdict

LOOPS = Path(__file__).parent / "distributed_loops.py"

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


def audited(loop: str, folder: Path, ranks: int = 2) -> tuple[int, Run, str]:
    path = folder / "run.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, "-m", "ampcheck", "audit", f"{LOOPS}:{loop}", "--steps", "4", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder)
    assert path.is_file(), done.stderr[-2000:]
    return done.returncode, Run.load(path), f"{done.stdout}\n{done.stderr[-3000:]}"


def test_a_sound_loop_under_ddp_passes_and_is_told_once(tmp_path):
    code, run, out = audited("ddp", tmp_path)
    assert code == 0, out
    checks = {finding.check for finding in run.of(Verdict.PASS)}
    assert {"gradient-underflow", "loss-scale", "scale-invariance", "scaler-protocol", "master-weights"} <= checks
    assert out.count("audit of") == 1


def test_sums_in_bfloat16_under_fsdp2_fail_for_the_number_of_processes_that_was_named(tmp_path):
    code, run, out = audited("fsdp_in_bfloat16", tmp_path)
    assert code != 0
    assert {finding.check for finding in run.of(Verdict.FAIL)} == {"reduce-precision"}
    assert "384" in out


def test_sums_in_float32_under_fsdp2_pass(tmp_path):
    code, run, out = audited("fsdp", tmp_path)
    assert code == 0, out
    assert {"reduce-precision", "gradient-underflow"} <= {finding.check for finding in run.of(Verdict.PASS)}


def test_gradients_that_vanish_in_float16_under_fsdp2_fail(tmp_path):
    code, run, out = audited("fsdp_in_float16_flushes", tmp_path)
    assert code != 0, out
    assert "gradient-underflow" in {finding.check for finding in run.of(Verdict.FAIL)}
    assert "scale-invariance" in {finding.check for finding in run.of(Verdict.PASS)}


def test_replicas_that_part_fail_once_at_the_line_under_no_sync(tmp_path):
    code, run, out = audited("syncs_first_micro_batch", tmp_path)
    assert code == 1, out
    (finding,) = run.of(Verdict.FAIL)
    assert finding.check == "reduce-precision"
    assert "no_sync" in finding.hint
    line = LOOPS.read_text(encoding="utf-8").splitlines()[finding.where.line - 1]
    assert line.strip() == "loss.backward()"


def test_replicas_of_a_function_that_leaves_its_group_are_compared(tmp_path):
    code, run, out = audited("trains", tmp_path)
    assert code == 1, out
    (finding,) = run.of(Verdict.FAIL)
    assert "the learning rate is 0.001 on rank 0 and 0.002 on rank 1" in finding.message
