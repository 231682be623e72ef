"""Promise: float32 weights that are rounded to 16 bits between steps are found, where updates get lost by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import mlp

import ampcheck
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.training.protocol.events import Act, Event, Rounded
from ampcheck.training.protocol.rounded import check_rounded

STEPS = 6
Change = Callable[[nn.Module, int], Any]


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, between: Change) -> list[torch.Tensor]:
    """The weights after some steps. between: what is done to the model after each."""
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        between(model, number)
    return [parameter.detach().clone() for parameter in model.parameters()]


def of_blocks(make: Callable[[], tuple[nn.Module, Any]], between: Change) -> list[Finding]:
    model, optimizer = make()
    with ampcheck.watch(fail_on="never") as seen:
        trained(optimizer, model, between)
    return stagnation(seen)


def of_monitors(make: Callable[[], tuple[nn.Module, Any]], between: Change) -> list[Finding]:
    model, optimizer = make()
    with ampcheck.watch(model, optimizer, every=10, fail_on="never") as seen:
        trained(optimizer, model, between)
    return stagnation(seen)


def stagnation(seen: Any) -> list[Finding]:
    bad = (Verdict.FAIL, Verdict.WARN)
    return [finding for finding in seen.run.findings if finding.check == "stagnation" and finding.verdict in bad]


def adam(rate: float = 1e-5) -> tuple[nn.Module, Any]:
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), rate)


def from_checkpoint(rate: float) -> Callable[[], tuple[nn.Module, Any]]:
    """Weights of a checkpoint in bfloat16, trained in float32."""

    def make() -> tuple[nn.Module, Any]:
        model = mlp().bfloat16().float()
        return model, torch.optim.AdamW(model.parameters(), rate)

    return make


def cast_and_back(model: nn.Module, number: int) -> None:
    model.half()
    model.float()


def rounded_by_hand(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def nothing(model: nn.Module, number: int) -> None:
    pass


ways = pytest.mark.parametrize("judged", [of_blocks, of_monitors])


@ways
@pytest.mark.parametrize(("between", "dtype"), [(cast_and_back, "float16"), (rounded_by_hand, "bfloat16")])
def test_a_cast_between_steps_that_undoes_them_is_named_at_the_step(judged, between, dtype):
    (finding,) = judged(adam, between)
    assert finding.verdict is Verdict.FAIL
    assert f"were rounded to {dtype} before the next step" in finding.message
    assert finding.code == "optimizer.step()"


def test_the_loss_of_updates_is_real():
    """The weights go hardly any of the way that they go without the casts, beyond what one rounding moves them."""
    start = torch.cat([parameter.detach().flatten() for parameter in adam()[0].parameters()])
    ends = []
    for between in (nothing, cast_and_back):
        model, optimizer = adam()
        ends.append(torch.cat([weight.flatten() for weight in trained(optimizer, model, between)]).double())
    way = ends[0] - start.double()
    gone = (ends[1] - start.half().double()) @ way / (way @ way)
    assert gone < 0.3


@ways
@pytest.mark.parametrize(
    ("make", "between"),
    [
        pytest.param(adam, nothing, id="plain"),
        pytest.param(adam, lambda model, number: copy.deepcopy(model).half(), id="a copy is cast"),
        pytest.param(adam, lambda model, number: number == 2 and cast_and_back(model, 2), id="one checkpoint"),
        pytest.param(from_checkpoint(1e-3), nothing, id="weights of a checkpoint"),
        pytest.param(from_checkpoint(0.0), nothing, id="a learning rate of zero"),
        pytest.param(from_checkpoint(1e-12), nothing, id="updates below the spacing of float32"),
        pytest.param(lambda: adam(0.05), cast_and_back, id="updates that survive"),
    ],
)
def test_weights_that_keep_their_updates_are_no_finding(judged, make, between):
    assert not judged(make, between)


@pytest.mark.parametrize(("lost", "found"), [(95, True), (50, False), (0, False)])
def test_the_share_that_gets_lost_decides(lost, found):
    events = [
        Event(Act.OPTIMIZER_STEP, step, rounded=(Rounded("0.weight", "float16", 100, lost),)) for step in range(2)
    ]
    assert bool(check_rounded(events, "loop", Limits())) is found
    assert not check_rounded(events, "loop", Limits(), reported=["0.weight"])
    assert not check_rounded(events[:1], "loop", Limits())
