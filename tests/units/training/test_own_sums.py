"""Promise: a running sum is compared with the float64 sum of the same addends, whatever their error and shape."""

from __future__ import annotations

import pytest
import torch
from measured_sums import measure_reductions
from torch import nn

from ampcheck.audit import audit
from ampcheck.checks.training.reduce_precision import check as check_reductions
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict

BF16 = torch.bfloat16


def verdict(function):
    (finding,) = check_reductions(measure_reductions(function), Limits())
    return finding.verdict


def accumulated(dtype, count):
    """Gradients that cancel in part: each is known to few digits, and their sum in the format to fewer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).to(dtype)
    for _ in range(count):
        (model(torch.arange(16)).float() - 3).square().mean().div(10 * count).backward()


def test_addends_that_are_known_to_few_digits_do_not_excuse_their_sum():
    stats = measure_reductions(lambda: accumulated(BF16, 64))
    assert all(total.ratio > 0 for total in stats.sums)
    assert any(finding.verdict is Verdict.FAIL for finding in check_reductions(stats, Limits()))
    assert verdict(lambda: accumulated(torch.float32, 64)) is Verdict.PASS


def test_the_reported_error_is_measured():
    """Eight addends are few enough to pass, and their sum has an error all the same."""
    stats = measure_reductions(lambda: accumulated(BF16, 8))
    (finding,) = check_reductions(stats, Limits())
    assert finding.verdict is Verdict.PASS
    assert finding.observed == max(total.ratio for total in stats.sums) > 0.5


def test_addends_that_were_rounded_before_do_not_accuse_a_sum_that_is_exact():
    """The losses are off by percents, as the model runs in bfloat16; powers of two add up without an error."""
    torch.manual_seed(0)
    model, x = nn.Linear(512, 1).to(BF16), torch.randn(8, 512).to(BF16)

    def run():
        total = torch.zeros(8, dtype=BF16)
        with torch.no_grad():
            for _ in range(8):
                total += torch.exp2(model(x)[:, 0].log2().nan_to_num(0.0).round())
            return total

    assert verdict(run) is Verdict.PASS


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4,)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_sum_of_losses_is_followed_whatever_its_shape(shape, dtype):
    def run():
        total = torch.zeros(shape, dtype=dtype)
        for loss in torch.linspace(0.5, 1.0, 200).to(dtype):
            total += loss
        return total

    assert verdict(run) is (Verdict.FAIL if dtype is BF16 else Verdict.PASS)


def test_a_sum_grows_with_the_shape_of_its_first_addend():
    def run():
        total = torch.zeros((), dtype=BF16)
        for _ in range(100):
            total = total + torch.full((3,), 0.9, dtype=BF16)
        return total

    assert verdict(run) is Verdict.FAIL


def test_views_of_one_sum_and_other_orders_in_memory_are_the_same_sum():
    addends = torch.rand(40, 6, 5).to(BF16).transpose(1, 2)

    def run():
        total = torch.zeros(5, 6, dtype=torch.float32)
        for n, addend in enumerate(addends):
            wide = addend.float() if n % 2 else addend.float().contiguous()
            total.view(-1).add_(wide.reshape(-1)) if n % 3 else total.add_(wide)
        return total

    stats = measure_reductions(run)
    assert stats.sums
    assert max(total.error for total in stats.sums) < 1e-6


def test_a_number_and_a_list_of_a_number_are_added_as_without_a_watch() -> None:
    def total() -> torch.Tensor:
        areas = torch.tensor([2.0, 3.0]).half()
        return areas[0] + areas[1:] - areas[:1].sum()

    run = audit(total)
    assert not run.failed
    assert not any("followed through sums" in reason for reason in run.coverage.unseen)


def test_an_op_that_the_watch_of_sums_cannot_follow_is_counted_and_the_code_runs_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("ampcheck.training.reductions.sums.ReductionWatch.before", fails)
    run = audit(lambda: torch.ones(3).half() + 1)
    assert any("followed through sums" in reason for reason in run.coverage.unseen)
    assert not run.failed
