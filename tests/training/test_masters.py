"""16-bit weights that are written beside their float32 masters, and masters that get gradients of another step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.core.run import Verdict

Write = Callable[[nn.Module, list[torch.Tensor]], None]

LOADED = {"weight": torch.eye(8, dtype=torch.bfloat16)}


def load(model: nn.Module, masters: list[torch.Tensor]) -> None:
    model.load_state_dict(LOADED)


def load_both(model: nn.Module, masters: list[torch.Tensor]) -> None:
    load(model, masters)
    _copy(masters, model.parameters())


def clamp(model: nn.Module, masters: list[torch.Tensor]) -> None:
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)


def look_at_an_average(model: nn.Module, masters: list[torch.Tensor]) -> None:
    """Weights that are exchanged for an evaluation, and put back."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    load(model, masters)
    model(torch.ones(1, 8, dtype=torch.bfloat16))
    model.load_state_dict(kept)


def nothing(model: nn.Module, masters: list[torch.Tensor]) -> None:
    pass


def _copy(into: Any, of: Any) -> None:
    with torch.no_grad():
        for target, source in zip(into, of, strict=True):
            target.copy_(source)


def with_masters(write: Write, at: int) -> tuple[dict[str, Any], Callable[[int], float]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False).bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    data = torch.randn(64, 8).bfloat16()

    def step(number: int) -> float:
        if number == at:
            write(model, masters)
        model.zero_grad()
        loss = (model(data).float() - data.float()).square().mean()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        _copy(model.parameters(), masters)
        return loss.item()

    return {"model": model, "optimizer": optimizer, "masters": masters}, step


def with_a_target() -> tuple[dict[str, Any], Callable[[int], float]]:
    """A 16-bit network without gradients that takes over the weights of the online one now and then."""
    torch.manual_seed(0)
    online, target = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False).bfloat16()
    optimizer = torch.optim.SGD(online.parameters(), lr=1e-3)
    data = torch.randn(64, 8)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = (online(data) - target(data.bfloat16()).detach().float()).square().mean()
        loss.backward()
        optimizer.step()
        if number % 3 == 2:
            _copy(target.parameters(), online.parameters())
        return loss.item()

    return {"online": online, "target": target, "optimizer": optimizer}, step


def looking_ahead() -> tuple[dict[str, Any], Callable[[int], float]]:
    """Fast 16-bit weights that an optimizer steps, and slow ones in float32 to which they return."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False).bfloat16()
    slow = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    fast, outer = torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(slow, lr=0.1)
    data = torch.randn(64, 8).bfloat16()

    def step(number: int) -> float:
        fast.zero_grad()
        loss = (model(data).float() - data.float()).square().mean()
        loss.backward()
        fast.step()
        if number % 4 == 3:
            for weight, parameter in zip(slow, model.parameters(), strict=True):
                weight.grad = weight.detach() - parameter.detach().float()
            outer.step()
            _copy(model.parameters(), slow)
        return loss.item()

    return {"model": model, "fast": fast, "outer": outer, "slow": slow}, step


def judged(parts: dict[str, Any], step: Callable[[int], float], *, call: bool) -> dict[int | None, str]:
    def trains() -> None:
        for number in range(8):
            step(number)

    run = ampcheck.audit(trains if call else {**parts, "step": step}, steps=8, checks=["master-weights"])
    return {f.where.step: f.message for f in run.of(Verdict.FAIL) if f.check == "master-weights"}


@pytest.mark.every(4)
@pytest.mark.parametrize("call", [False, True], ids=["mapping", "call"])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("write", [load, clamp])
def test_weights_that_are_written_beside_their_masters_fail(write: Write, at: int, call: bool) -> None:
    found = judged(*with_masters(write, at), call=call)
    assert list(found) == [at]
    assert "weight" in found[at]


@pytest.mark.every(4)
@pytest.mark.parametrize("write", [nothing, load_both, look_at_an_average])
@pytest.mark.parametrize("at", [0, 4])
def test_weights_that_go_with_their_masters_pass(write: Write, at: int) -> None:
    assert not judged(*with_masters(write, at), call=False)


@pytest.mark.parametrize("make", [with_a_target, looking_ahead])
def test_other_copies_of_weights_pass(make: Callable[[], tuple[dict[str, Any], Callable[[int], float]]]) -> None:
    assert not judged(*make(), call=False)


# --- gradients of masters


Copy = Callable[[torch.Tensor, torch.Tensor], None]


def where_there_is_one(master: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.grad is not None:
        master.grad = weight.grad.float()


def once(master: torch.Tensor, weight: torch.Tensor) -> None:
    if master.grad is None and weight.grad is not None:
        master.grad = weight.grad.float()


def in_each_step(master: torch.Tensor, weight: torch.Tensor) -> None:
    master.grad = None if weight.grad is None else weight.grad.float()


def in_one_buffer(master: torch.Tensor, weight: torch.Tensor) -> None:
    """As apex does: written through `.data`, which no version counts."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    master.grad.data.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)


def freed_after_copy(master: torch.Tensor, weight: torch.Tensor) -> None:
    in_one_buffer(master, weight)
    weight.grad = None


def accumulated(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Of two steps: a half of the gradient is that of the step before."""
    if weight.grad is not None:
        master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad
        weight.grad = None


def with_heads(
    copy: Copy, *, heads: int = 2, clip: float | None = None, linear: bool = False
) -> tuple[dict[str, Any], Callable[[int], float]]:
    """heads: that are trained in turn. linear: a loss whose gradient never changes."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(8, 16), **{f"head{n}": nn.Linear(16, 1) for n in range(heads)}}).bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    data = torch.randn(8, 32, 8, generator=torch.Generator().manual_seed(1))

    def step(number: int) -> float:
        model.zero_grad()
        batch = data[0 if linear else number % 8]
        out = model[f"head{number % heads}"](torch.tanh(model["body"](batch.bfloat16()))).float()
        loss = 1e-3 * out.sum() if linear else (out - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            copy(master, parameter)
        if clip is not None:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        _copy(model.parameters(), masters)
        return loss.item()

    return {"model": model, "optimizer": optimizer, "masters": masters}, step


@pytest.mark.parametrize(("copy", "heads", "step"), [(where_there_is_one, 2, 1), (once, 1, 1)])
def test_masters_that_are_stepped_with_the_gradient_of_an_earlier_step_fail(copy: Copy, heads: int, step: int) -> None:
    found = judged(*with_heads(copy, heads=heads), call=False)
    assert list(found) == [step]
    assert ("head0.weight" if heads == 2 else "body.weight") in found[step]
    assert "gradient" in found[step]


def test_a_clip_that_clips_nothing_does_not_hide_a_stale_gradient() -> None:
    assert list(judged(*with_heads(where_there_is_one, clip=1e4), call=True)) == [1]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("copy", "linear"), [(in_each_step, False), (in_one_buffer, True), (freed_after_copy, True), (accumulated, True)]
)
def test_masters_that_get_the_gradients_of_their_step_pass(copy: Copy, linear: bool) -> None:
    assert not judged(*with_heads(copy, linear=linear), call=False)
