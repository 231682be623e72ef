"""Replicas that part are found at the call that sets them apart; ranks that differ on purpose are not."""

import json
from pathlib import Path

import pytest
from ranks import has_gloo, run_ranks

if not has_gloo:
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from replica_loops import CASES

from ampcheck.core.run import Run
from ampcheck.records.protocol import Act
from ampcheck.training.distributed.replicas import Layout, RankReplicas, ReplicaStep, find_drift

HERE = Path(__file__).parent

BAD = {
    "syncs_first_micro_batch": ("reduce-precision", "under no_sync()", "loss.backward()"),
    "averages_first_micro_batch_by_hand": ("reduce-precision", "averaged and then changed", "loss.backward()"),
    "calls_the_module_inside": ("reduce-precision", "were not averaged", "loss.backward()"),
    "rate_by_rank": ("reduce-precision", "the learning rate is 0.1 on rank 0 and 0.05 on rank 1", "optimizer.step()"),
    "noise_by_rank": ("reduce-precision", "averaged and then changed", "loss.backward()"),
    "momentum_by_rank": ("reduce-precision", "its gradients are equal on both ranks", "optimizer.step()"),
    "scale_by_rank": (
        "scaler-protocol",
        "the loss scale is 4096 on rank 0 and 512 on rank 1",
        "scaler.step(optimizer)",
    ),
    "skips_on_one_rank": ("scaler-protocol", "skipped the optimizer on rank 1 alone", "scaler.step(optimizer)"),
    "shards_with_a_scale_by_rank": ("scaler-protocol", "the loss scale is 4096", "scaler.step(optimizer)"),
    "shards_with_a_rate_by_rank": ("reduce-precision", "the learning rate is 0.1 on rank 0", "optimizer.step()"),
}
ALONE = ("local_sgd_that_averages_later", "experts")
"""Values that begin equal and part; a warning where no collective runs."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What rank 0 wrote about each case; all run in one launch."""
    result = tmp_path_factory.mktemp("replicas") / "found.json"
    run_ranks(HERE / "replica_loops.py", ",".join(CASES), str(result))
    return json.loads(result.read_text(encoding="utf-8"))


def findings(results, name):
    return Run.from_json(results[name]["findings"]).findings


@pytest.mark.parametrize("name", BAD)
def test_replicas_that_part_fail_at_the_call_that_sets_them_apart(results, name):
    check, what, line = BAD[name]
    (finding,) = findings(results, name)
    assert finding.check == check
    assert what in finding.message
    assert line in (HERE / "replica_loops.py").read_text(encoding="utf-8").splitlines()[finding.where.line - 1]


def test_the_step_that_set_them_apart_is_named(results):
    for name, step in (("noise_by_rank", 2), ("skips_on_one_rank", 3), ("rate_by_rank", 1)):
        (finding,) = findings(results, name)
        assert finding.where.step == step


@pytest.mark.parametrize("name", [name for name in CASES if name not in BAD])
def test_ranks_that_meet_again_or_hold_other_parts_are_silent(results, name):
    assert findings(results, name) == ()
    assert results[name]["alone"] == (name in ALONE)


def test_a_pass_counts_the_parameters_that_were_compared(results):
    assert results["ddp"]["coverage"] == {"replicated parameters": 4}
    assert results["pipeline"]["coverage"] == {"replicated parameters": 4}


def rank_of(values, gradients=(), *, shape=(32,), varied=True, averaged=()):
    steps = {
        number: ReplicaStep(
            {"w": value}, {"w": list(gradients)} if gradients else {}, {"w": averaged} if averaged else {}
        )
        for number, value in enumerate(values)
    }
    return RankReplicas({"w": Layout(shape, "float32", ())}, {"w"} if varied else set(), (), steps)


def test_equal_values_after_an_update_prove_replicas_where_they_are_no_chance():
    drift = find_drift([rank_of([1, 2, 3]), rank_of([1, 2, 4])])
    assert drift is not None
    assert (drift.step, drift.proven) == (1, True)
    small = {"shape": (1,), "varied": False}
    assert find_drift([rank_of([1, 2, 3], **small), rank_of([1, 2, 4], **small)]) is None


def test_one_of_many_ranks_that_parts_is_named():
    ranks = [rank_of([1, 2, 3], [7]) for _ in range(5)]
    ranks[3] = rank_of([1, 2, 9], [7])
    drift = find_drift(ranks)
    assert drift is not None
    assert drift.ranks == (0, 3)
    assert drift.act is Act.OPTIMIZER_STEP


def test_values_that_begin_apart_are_no_replicas():
    assert find_drift([rank_of([1, 2, 3], [7]), rank_of([5, 6, 7], [7])]) is None
