"""A rank that raises, or has nothing to give, leaves no other waiting: every rank ends with a run."""

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ampcheck.core.run import Run, Verdict
from ampcheck.training.distributed.ranks import is_failed_collective

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

WORKER = Path(__file__).parent / "unequal_ranks.py"


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """The runs of both ranks by their number, and the seconds until they ended."""

    @functools.cache
    def launch(case):
        folder = tmp_path_factory.mktemp(case)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[4])}
        begun = time.monotonic()
        command += [str(WORKER), case, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        found = {int(path.stem): Run.load(path) for path in folder.glob("*.json")}
        assert 0 in found, done.stderr[-3000:]
        return found, time.monotonic() - begun

    return launch


def told(run, check):
    return [(finding.verdict, finding.message) for finding in run.findings if finding.check == check]


def test_a_checkpoint_that_only_rank_0_saves_is_loaded_on_all(runs_of):
    found, _ = runs_of("saves_on_first")
    for rank in (0, 1):
        ((verdict, message),) = told(found[rank], "resume")
        assert verdict is Verdict.PASS, message


def test_a_checkpoint_of_rank_0_without_the_scaler_fails(runs_of):
    found, _ = runs_of("forgets_the_scaler")
    ((verdict, message),) = told(found[0], "resume")
    assert verdict is Verdict.FAIL
    assert "scaler" in message


@pytest.mark.parametrize(("case", "what"), [("save_raises", "save() raised OSError"), ("load_raises", "KeyError")])
def test_what_one_rank_raises_in_save_or_load_is_told_on_both(runs_of, case, what):
    found, _ = runs_of(case)
    for rank in (0, 1):
        ((verdict, message),) = told(found[rank], "resume")
        assert verdict is Verdict.FAIL
        assert what in message
    assert "on rank 1, " in told(found[0], "resume")[0][1]
    assert "on rank 1" not in told(found[1], "resume")[0][1]


@pytest.mark.parametrize(
    ("case", "what"), [("raises_after", "ValueError: rank 1 cannot log"), ("value_on_first", "None")]
)
def test_a_rank_that_ends_a_step_in_an_error_ends_it_for_all_in_that_step(runs_of, case, what):
    found, _ = runs_of(case)
    for rank in (0, 1):
        ((verdict, message),) = told(found[rank], "coverage")
        assert verdict is Verdict.FAIL
        assert what in message
    assert "on rank 1" in told(found[0], "coverage")[0][1]
    assert found[0].coverage.seen.get("steps") == found[1].coverage.seen.get("steps")


def test_a_rank_that_raises_before_a_collective_ends_the_audit_with_its_name(runs_of):
    found, seconds = runs_of("raises_before")
    for rank in (0, 1):
        ((verdict, message),) = told(found[rank], "coverage")
        assert verdict is Verdict.FAIL
        assert "step 2: rank 1 raised ValueError: rank 1 has no data; rank 0 waited for it" in message
        assert {v for v, _ in told(found[rank], "stagnation")} == {Verdict.SKIP}
        assert not found[rank].of(Verdict.PASS)
    assert seconds < 60


def test_a_rank_that_dies_leaves_a_run_on_the_other(runs_of):
    found, _ = runs_of("dies")
    ((verdict, message),) = told(found[0], "coverage")
    assert verdict is Verdict.FAIL
    assert "rank" in message


def test_a_loss_that_is_nan_on_one_rank_alone_does_not_part_them(runs_of):
    found, seconds = runs_of("nan_on_second")
    assert set(found) == {0, 1}
    for rank in (0, 1):
        assert {verdict for verdict, _ in told(found[rank], "coverage")} == {Verdict.PASS}
    assert seconds < 60


def test_only_failed_collectives_are_taken_for_lost_ranks():
    assert is_failed_collective("RuntimeError: [unbound_buffer.cc:78] Timed out waiting 6000ms for recv")
    assert is_failed_collective("RuntimeError: Application timeout caused pair closure")
    assert is_failed_collective("DistBackendError: NCCL error in: x")
    assert not is_failed_collective("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert not is_failed_collective("ValueError: nccl is no word for a number")
