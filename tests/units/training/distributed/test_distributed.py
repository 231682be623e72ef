"""Two and four processes on gloo."""

import functools
import json
from pathlib import Path

import pytest
from ranks import has_gloo, run_ranks

if not has_gloo:
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from ampcheck.core.run import Run, Verdict

HERE = Path(__file__).parent

LAUNCHES = {
    2: "ungrouped_runs,ddp,fsdp,ddp_bf16_hook@384,ddp_bf16_hook,ddp_fp16_hook_flushes,ddp_fp16_hook_overflows,"
    "fsdp_bf16_reduce@384,fsdp_float32_reduce@384,fsdp_bf16_norm,by_hand_bf16@384,rank_autocast,tensor_parallel,raises,ddp_clips,"
    "fsdp_clips,runs",
    4: "ddp,fsdp,hybrid,ddp_bf16_hook,fsdp_bf16_reduce@384,fsdp_bf16_norm,rank_autocast,runs",
}


FSDP = pytest.mark.needs_torch("2.9", "FSDP2 runs on the CPU")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What rank 0 wrote about each case, by the number of ranks; each is launched once."""

    @functools.cache
    def launch(ranks):
        result = tmp_path_factory.mktemp("distributed") / "found.json"
        run_ranks(HERE / "distributed_worker.py", LAUNCHES[ranks], str(result), ranks=ranks)
        return json.loads(result.read_text(encoding="utf-8"))

    return launch


@pytest.fixture(params=[2, 4])
def launched(request, results):
    """The number of ranks, and what was found on them."""
    return request.param, results(request.param)


def case(launched, name):
    _, found = launched
    return found[name]


def each(*names):
    """A test of these cases, on every number of ranks on which they are run."""
    pairs = [
        pytest.param(ranks, name, marks=[FSDP] if "fsdp" in name else [])
        for name in names
        for ranks, cases in LAUNCHES.items()
        if name in cases.split(",")
    ]
    return pytest.mark.parametrize(("launched", "name"), pairs, indirect=["launched"])


on_two_ranks = pytest.mark.parametrize("launched", [2], indirect=True)


def findings(found, check="reduce-precision"):
    return [one for one in Run.from_json(found["findings"]).findings if one.check == check]


def verdicts(found, check="reduce-precision"):
    return {one.verdict for one in findings(found, check)}


@each("ddp", "fsdp", "hybrid", "fsdp_float32_reduce@384", "ddp_clips", "fsdp_clips")
def test_float32_reductions_pass_and_the_loop_is_as_it_was(launched, name):
    found = case(launched, name)
    assert verdicts(found) == {Verdict.PASS}
    assert verdicts(found, "autocast-state") == {Verdict.PASS}
    assert found["restored"]
    assert found["coverage"]["sums over ranks"] > 0
    assert {one["format"] for one in found["collectives"]} == {"float32"}


@each("ddp_bf16_hook@384", "fsdp_bf16_reduce@384", "by_hand_bf16@384")
def test_a_bfloat16_reduction_fails_at_the_world_size_that_the_user_names(launched, name):
    found = case(launched, name)
    assert verdicts(found) == {Verdict.FAIL}
    (one,) = findings(found)
    assert "384 processes" in one.message
    assert "bfloat16" in one.message
    assert one.observed > 4
    assert one.where.file.endswith("distributed_worker.py")
    assert found["restored"]


def test_a_bfloat16_hook_that_holds_here_warns_where_it_would_not(launched):
    found = case(launched, "ddp_bf16_hook")
    assert verdicts(found) == {Verdict.WARN}
    (seen,) = found["collectives"]
    assert seen["cast"]
    assert seen["divided"]
    assert seen["phase"] == "backward"
    assert seen["world"] == launched[0]
    assert 0 < seen["ratio"] < 4


@on_two_ranks
def test_a_hook_that_flushes_gradients_to_zero_is_found_with_the_share(launched):
    (one,) = findings(case(launched, "ddp_fp16_hook_flushes"))
    assert one.verdict is Verdict.FAIL
    assert "become zero" in one.message
    assert "cast for the collective" in one.message
    assert one.observed > 0.1


@on_two_ranks
def test_a_hook_whose_sum_overflows_is_found(launched):
    (one,) = findings(case(launched, "ddp_fp16_hook_overflows"))
    assert one.verdict is Verdict.FAIL
    assert "infinite" in one.message


@FSDP
def test_a_bfloat16_norm_over_shards_is_found_beside_the_float64_norm(launched):
    found = case(launched, "fsdp_bf16_norm")
    (norm,) = [one for one in findings(found) if "total norm" in one.message]
    assert norm.verdict is Verdict.FAIL
    assert "shards" in norm.message
    value, exact, grouped, sharded = found["norms"][0]
    assert grouped
    assert sharded
    assert abs(value - exact) / exact < 0.02


@on_two_ranks
def test_the_norm_of_shards_is_put_together_from_what_each_rank_knows(launched):
    for name in ("ddp_clips", "fsdp_clips"):
        for value, exact, _, sharded in case(launched, name)["norms"]:
            assert value == pytest.approx(exact, rel=1e-6)
            assert sharded == name.startswith("fsdp")


def test_a_rank_with_another_autocast_state_is_found_and_named(launched):
    found = case(launched, "rank_autocast")
    (one,) = findings(found, "autocast-state")
    assert one.verdict is Verdict.FAIL
    assert "on in bfloat16 on rank 1" in one.message
    assert "off on rank" in one.message


@on_two_ranks
def test_a_16_bit_sum_in_a_forward_is_measured_and_not_predicted(launched):
    found = case(launched, "tensor_parallel")
    assert verdicts(found) == {Verdict.PASS}
    assert ("forward", "bfloat16") in {(one["phase"], one["format"]) for one in found["collectives"]}
    assert found["restored"]


@on_two_ranks
def test_a_step_that_raises_on_one_rank_ends_on_all(launched):
    found = case(launched, "raises")
    assert verdicts(found) == {Verdict.SKIP}
    assert "rank 1 has had enough" in findings(found)[0].message
    assert found["restored"]


def test_runs_of_all_ranks_become_one(launched):
    ranks, _ = launched
    run = Run.from_json(case(launched, "runs"))
    same, flush, overflow = run.findings
    assert same.message == "the same everywhere"
    assert flush.message == f"flushes {ranks} of 10 [on all {ranks} ranks; the numbers are those of rank {ranks - 1}]"
    assert flush.observed == ranks
    assert overflow.message == "only here [on rank 1]"
    assert run.coverage.seen == {"ops": 3 * ranks}
    assert len(run.tables) == 1
    assert run.environment["ranks"] == ranks
    assert run.environment["device (rank 1)"] == "cpu 1"


@on_two_ranks
def test_runs_are_gathered_where_the_program_made_no_group(launched):
    run = Run.from_json(case(launched, "ungrouped_runs"))
    assert [one.message for one in run.findings] == ["m"]
