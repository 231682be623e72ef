"""Promise: a sharded step is compared with one process on the whole batch; what is healthy passes."""

import re

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from sharded_steps import HEALTHY, PLANTED

from ampcheck import UsageError, assert_parity
from ampcheck.core.run import Verdict, Where
from ampcheck.records.reductions import CollectiveStats
from ampcheck.sharded import Gradients, Ranks, ShardedStep, assert_sharded, check_sums, check_whole, judge_sharded

GRADIENT = {"weight": torch.tensor([3.0, 4.0], dtype=torch.float64)}


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, Verdict.PASS), (2.0, Verdict.FAIL), (float("nan"), Verdict.FAIL)]
)
def test_a_factor_fails(factor, verdict):
    sharded = Gradients({"weight": factor * GRADIENT["weight"]}, 2.0**-24)
    assert check_whole(sharded, Gradients(GRADIENT, 2.0**-24), 2, "step").verdict is verdict


@pytest.mark.parametrize(
    ("lost", "form", "fails"), [(0.2, "bfloat16", True), (0.1, "bfloat16", False), (1.0, "float32", False)]
)
def test_a_sum_in_16_bits_that_loses_digits_fails(lost, form, fails):
    total = CollectiveStats(Where("update", op="allreduce"), form, 2, 1, 8, 8, 0.0, 0.0, lost)
    assert bool(check_sums([total], "step")) is fails


def test_a_parameter_without_gradient_on_several_ranks_fails():
    finding = check_whole(Gradients({}, 2.0**-24), Gradients(GRADIENT, 2.0**-24), 4, "step")
    assert finding.verdict is Verdict.FAIL
    assert "weight has no gradient on 4 ranks" in finding.message


def test_shards_that_are_clipped_by_norms_of_their_own_name_the_norm():
    exact = torch.arange(1.0, 9.0, dtype=torch.float64)
    clipped = torch.cat((1.2 * exact[:4], 1.9 * exact[4:]))
    finding = check_whole(Gradients({"weight": clipped}, 2.0**-24), Gradients({"weight": exact}, 2.0**-24), 2, "step")
    assert finding.verdict is Verdict.FAIL
    assert "factors of their own: 1.2, 1.9" in finding.message
    assert "clip by the norm of all shards" in finding.hint


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_pass(name):
    assert_sharded(HEALTHY[name])


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in PLANTED), ("undivided", 4), ("bf16", 4), ("fsdp_bf16", 4)]
)
def test_a_planted_defect_fails(name, ranks):
    step, text = PLANTED[name]
    messages = [finding.message for finding in judge_sharded(step, ranks=ranks).of(Verdict.FAIL)]
    assert any(text.format(ranks=ranks) in message for message in messages), messages


def test_ranks_are_a_circumstance_of_assert_parity():
    step, text = PLANTED["undivided"]
    with pytest.raises(AssertionError, match=re.escape(text.format(ranks=2))):
        assert_parity(step, Ranks(2))
    run = assert_parity(next(iter(HEALTHY.values())), Ranks(), name="step")
    assert [finding.subject for finding in run.by("reduce-precision")] == ["step"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: assert_parity(torch.cos, Ranks(2)), "a must be a ShardedStep"),
        (lambda: assert_parity(PLANTED["undivided"][0], Ranks(2), (1,)), "leave out args"),
        (lambda: assert_parity(PLANTED["undivided"][0], Ranks(2), relation="bitwise"), "leave out relation"),
        (lambda: Ranks(1), "count of Ranks must be"),
        (lambda: assert_parity(ShardedStep(lambda: None, len, len), Ranks(2)), "at the top of a module"),
    ],
)
def test_ranks_of_anything_else_get_one_sentence(call, text):
    with pytest.raises(UsageError, match=text):
        call()
