"""What a watch says of narrow weights that hardly move, and the memory that it takes to see it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck import Finding, Run, Verdict


def stagnation(run: Run) -> list[Finding]:
    return [one for one in run.findings if one.check == "stagnation"]


class Kahan(torch.optim.Optimizer):
    """SGD that remembers what rounding dropped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rest = self.state[p].setdefault("rest", torch.zeros_like(p))
                step = rest - group["lr"] * p.grad
                after = p + step
                rest.copy_(step - (after - p))
                p.copy_(after)


class Own(torch.optim.Optimizer):
    """Signed steps of an optimizer that PyTorch knows nothing of, rounded to nearest or stochastically."""

    def __init__(self, params: Any, lr: float, *, stochastic: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.stochastic = stochastic

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                bits = (p.float() - group["lr"] * p.grad.float().sign()).view(torch.int32)
                noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
                bits = bits + (noise if self.stochastic else 1 << 15)
                p.copy_((bits & -(1 << 16)).view(torch.float32).bfloat16())


def _signed(optimizer: Any, steps: int) -> Run:
    (weight,) = optimizer.param_groups[0]["params"]
    torch.manual_seed(0)
    with ampcheck.watch(nn.Identity(), optimizer, exact=False, fail_on="never") as seen:
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    return seen.run


def _weights(count: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter((torch.rand(count) + 0.5).bfloat16())


@pytest.mark.parametrize("rate", [1e-5, 1e-4, 3e-4])
@pytest.mark.parametrize("steps", [3, 10, 40])
@pytest.mark.parametrize("count", [1, 64, 3000, 20000])
def test_stochastic_rounding_never_fails_however_seldom_it_moves_a_weight(count: int, steps: int, rate: float) -> None:
    run = _signed(Own([_weights(count)], rate, stochastic=True), steps)

    assert not run.of(Verdict.FAIL)
    if count == 20000 and rate * steps > 2e-4:
        assert not run.of(Verdict.WARN)


def test_an_optimizer_of_ones_own_that_drops_what_stochastic_rounding_would_not_fails() -> None:
    assert _signed(Own([_weights(3000)], 1e-4, stochastic=False), 10).of(Verdict.FAIL)


@pytest.mark.parametrize("steps", [3, 10, 40])
def test_a_compensation_that_has_not_yet_moved_a_weight_is_no_finding(steps: int) -> None:
    run = _signed(Kahan([_weights(3000)], {"lr": 1e-5}), steps)

    assert not run.of(Verdict.FAIL)
    assert not run.of(Verdict.WARN)


class Momentum(Own):
    """Rounds to nearest, and keeps the gradients of the past beside the weights, as narrow as these."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (weight,) = self.param_groups[0]["params"]
        past = self.state[weight].setdefault("past", torch.zeros_like(weight))
        past.mul_(0.9).add_(weight.grad, alpha=0.1)
        super().step(closure)


def test_a_narrow_momentum_is_no_compensation() -> None:
    assert _signed(Momentum([_weights(3000)], 1e-4, stochastic=False), 10).of(Verdict.FAIL)


def test_a_single_weight_that_stays_for_a_few_steps_is_a_warning() -> None:
    run = _signed(torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], lr=1e-5), 5)

    assert [one.verdict for one in stagnation(run)] == [Verdict.WARN]


_PEAK = """
import resource, sys, torch, ampcheck
peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weight = torch.nn.Parameter(torch.ones(1 << 25, dtype=getattr(torch, sys.argv[1])))
weight.grad = torch.ones_like(weight)
optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)
optimizer.step()
before = peak()
with ampcheck.watch(torch.nn.Identity(), optimizer) as seen:
    for _ in range(3):
        optimizer.step()
    print(peak() - before, weight.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the peak of the resident set in KiB")
@pytest.mark.parametrize(
    ("dtype", "most"),
    # As `watch` says: of narrow weights a copy for the step, one for the block, and a byte for each element.
    [("float32", 1.0), ("bfloat16", 2.5)],
)
def test_a_measured_step_takes_the_memory_that_is_told(dtype: str, most: float) -> None:
    command, at_once = [sys.executable, "-c", _PEAK, dtype], {"MALLOC_MMAP_THRESHOLD_": "4194304"}  # freed at once
    told = subprocess.run(command, env=os.environ | at_once, capture_output=True, text=True, check=True).stdout
    peak, weight = (
        int(number) for line in told.splitlines() if not line.startswith("ampcheck:") for number in line.split()
    )

    # A wide copy of all weights would be 128 MiB, and the change another; code that is imported takes some as well.
    assert peak <= most * weight + (96 << 20)


def test_pieces_of_a_weight_tell_what_the_whole_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats() -> Any:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(33, 70), nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)]).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with ampcheck.watch(model, optimizer, exact=False, fail_on="never") as seen:
            for _ in range(3):
                for one in model.parameters():
                    one.grad = torch.randn_like(one)
                optimizer.step()
        return seen.stats.training.parameters

    whole = stats()
    monkeypatch.setattr("ampcheck.training.monitor.updates.CHUNK", 1000)
    for one, other in zip(whole, stats(), strict=True):
        assert (one.update.moved, one.update.lost, one.still) == (other.update.moved, other.update.lost, other.still)
        assert one.update.squared_updates == pytest.approx(other.update.squared_updates)
        assert one.update.squared_values == pytest.approx(other.update.squared_values)


def test_weights_that_stand_still_are_named_at_the_line_that_steps_them() -> None:
    model = nn.Linear(16, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with ampcheck.watch(model, optimizer, exact=False, fail_on="never") as seen:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(8, 16, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
    found = stagnation(seen.run)
    assert found
    assert {finding.code for finding in found} == {"optimizer.step()"}


def test_an_optimizer_that_rounds_to_nearest_and_drops_most_updates_warns() -> None:
    weights = nn.Parameter(torch.cat([torch.full((70,), 1.0), torch.full((30,), 2.0**-7)]).bfloat16())
    (finding,) = stagnation(_signed(torch.optim.SGD([weights], lr=2.0**-12), 10))
    assert finding.verdict is Verdict.WARN
    assert "70 % changed nothing" in finding.message
    assert "(limit 50 %)" in finding.message
