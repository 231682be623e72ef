"""The loops run each case as it stands: the same result, and a sound model beside it."""

import pytest
import torch
from handwritten import CASES
from handwritten.loops import Step, as_callable, batches, train, train_with_island
from handwritten.oracle import tensors

BY_NAME = {case.name: case for case in CASES}
SOME = [BY_NAME[name] for name in ("rms_norm_eps_1e8", "bce_by_hand", "voxel_keys", "gradient_noise_scale")]

some_cases = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)


@some_cases
def test_loop_gives_the_case_its_result(case):
    trained = train(case, torch.float16, steps=2)
    for result, alone in zip(trained.results, tensors(case.function(torch.float16)), strict=True):
        assert torch.equal(result.nan_to_num(), alone.nan_to_num())


@some_cases
def test_loop_of_the_twin_trains(case):
    trained = train(case, torch.float32, steps=4)
    assert len(trained.losses) == 4
    assert all(torch.tensor(trained.losses).isfinite())
    assert all(weight.isfinite().all() for weight in trained.model.parameters())


def test_fault_reaches_the_weights():
    trained = train(BY_NAME["rms_norm_eps_1e8"], torch.float16)
    assert not all(weight.isfinite().all() for weight in trained.model.parameters())


def test_callable_has_a_name():
    call = as_callable(BY_NAME["rms_norm_eps_1e8"], torch.bfloat16)
    assert call.__name__ == "rms_norm_eps_1e8_bfloat16"
    assert call().dtype == torch.bfloat16


def test_loop_with_an_island():
    assert all(torch.tensor(train_with_island(SOME[0], torch.float16).losses).isfinite())


def test_loader_draws_the_same_batches():
    for (left, _), (right, _) in zip(batches(), batches(), strict=True):
        assert torch.equal(left, right)


def test_module_carries_the_case():
    assert not Step(SOME[0], torch.float16)(torch.randn(2, 6)).isfinite().all()
    assert Step(SOME[0], torch.float32)(torch.randn(2, 6)).isfinite().all()
