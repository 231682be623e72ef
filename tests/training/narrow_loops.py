"""Loops whose weights, optimizer state, copies or sums are narrower than float32, healthy and not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampcheck.checks.training.stagnation import check as check_stagnation
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.protocol import StepError
from ampcheck.records.stagnation import StagnationStats
from ampcheck.training.following import Following
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.stagnation.stagnation import stagnation_stats
from ampcheck.training.stagnation.updates import UpdateWatch

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Change = Callable[[dict[str, Any], torch.Tensor, torch.Tensor, float], Any]


def net(dtype: torch.dtype = B16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 16, generator=generator).to(dtype), torch.randn(64, 4, generator=generator).to(dtype)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after: Callable[[int, torch.Tensor], Any] = lambda i, loss: None,
    **more: Any,
) -> dict[str, Any]:
    x, y = data(next(model.parameters()).dtype)

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        after(i, loss.detach())
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, **more}


def sgd(model: nn.Module, lr: float = 0.3, **more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **more)


def with_optimizer(change: Change, lr: float, dtype: torch.dtype = B16) -> dict[str, Any]:
    """A loop with an optimizer that does `change(state, parameter, gradient, lr)`."""

    class Custom(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    change(self.state[parameter], parameter, parameter.grad, group["lr"])

    model = net(dtype)
    return loop(model, Custom(model.parameters()))


def kahan(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    missing = state.setdefault("compensation", torch.zeros_like(p))
    missing.add_(g, alpha=-lr)
    old = p.clone()
    p.add_(missing)
    missing.add_(old.sub_(p))


def master(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    if "master" not in state:
        state["master"] = p.float().clone()
    state["master"].sub_(g.float(), alpha=lr)
    p.copy_(state["master"])


def stochastic_in_place(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    wide = p.float().sub_(g.float(), alpha=lr)
    bits = wide.view(torch.int32)
    bits.add_(torch.randint(0, 1 << 16, p.shape, dtype=torch.int32))
    bits.bitwise_and_(-65536)
    p.copy_(wide)


def stochastic_new(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    bits = (p.float() - lr * g.float()).view(torch.int32)
    p.copy_((bits + torch.randint(0, 1 << 16, p.shape, dtype=torch.int32) & -65536).view(F32))


def stochastic_by_noise(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    spacing = 2.0 ** (torch.floor(torch.log2(p.float().abs() + 1e-30)) - 7)
    p.copy_(p.float() - lr * g.float() + (torch.rand(p.shape) - 0.5) * spacing)


KEEP_UPDATES: tuple[Change, ...] = (kahan, master, stochastic_in_place, stochastic_new, stochastic_by_noise)
"""Ways to update weights of 16 bits that lose nothing."""


def random_update(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    p.copy_(p.float() - lr * torch.randn(p.shape))


def decoupled_decay(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    p.mul_(1 - 1e-4)
    p.add_(g, alpha=-lr)


def decay_by_itself(state: dict[str, Any], p: torch.Tensor, g: torch.Tensor, lr: float) -> None:
    p.add_(p, alpha=-1e-4)
    p.add_(g, alpha=-lr)


def ema_loop(
    follow: Callable[[list[torch.Tensor], list[torch.Tensor]], Any], dtype: torch.dtype = B16
) -> dict[str, Any]:
    """A float32 model and a copy of it that `follow(copies, weights)` moves after each step."""
    model = net(F32)
    ema = copy.deepcopy(model).to(dtype).requires_grad_(False)

    def after(i: int, loss: torch.Tensor) -> None:
        with torch.no_grad():
            follow(list(ema.parameters()), [p.detach().to(dtype) for p in model.parameters()])

    return loop(model, sgd(model, 0.1), after, ema=ema)


def ema_in_place(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for one, weight in zip(copies, weights, strict=True):
        one.mul_(0.999).add_(weight, alpha=0.001)


def ema_foreach(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    torch._foreach_lerp_(copies, weights, 0.001)


def ema_rebound(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for one, weight in zip(copies, weights, strict=True):
        one.data = 0.999 * one.data + 0.001 * weight


def ema_copied(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for one, weight in zip(copies, weights, strict=True):
        one.copy_(one * 0.999 + weight * 0.001)


def ema_inference(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        ema_in_place(copies, weights)


def ema_fast(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for one, weight in zip(copies, weights, strict=True):
        one.lerp_(weight, 0.1)


def hard_copy(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for one, weight in zip(copies, weights, strict=True):
        one.copy_(weight)


EMAS = [ema_in_place, ema_foreach, ema_rebound, ema_copied, ema_inference]


class Counting(nn.Module):
    """A model that counts its forwards in a buffer of a dtype; a floating one is cast with the model."""

    def __init__(self, dtype: torch.dtype, slices: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=dtype) if slices else torch.zeros((), dtype=dtype))
        self.slices = slices
        self.body = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slices:
            self.seen[1] += 1
            self.seen[2] += 2
        else:
            self.seen += 1
        return self.body(x)


def in_backward(lr: float) -> dict[str, Any]:
    """Each parameter is stepped by a hook as soon as its gradient is there."""
    model = net()
    x, y = data(B16)
    optimizers = {p: torch.optim.SGD([p], lr=lr) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def step(i: int) -> float:
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        return loss.item()

    return {"model": model, "optimizer": list(optimizers.values()), "step": step}


def measure_stagnation(loop: TrainingLoop, steps: int) -> StagnationStats:
    """The updates of the first steps; the loop is afterwards as it was. A step that raises ends them."""
    following, error = Following(loop, Recorder(loop)), ""
    following.updates = UpdateWatch(following.shadow, following.lineage, steps)
    with loop.preserved():
        for number in range(steps):
            with following.step(number):
                value = loop.take(number)
            if isinstance(value, StepError):
                error = f"step {value.step}: {value.message}"
                break
            following.ended(number, value)
        return stagnation_stats(loop, following.updates, error)


def measured(parts: dict[str, Any], steps: int = 4) -> StagnationStats:
    return measure_stagnation(TrainingLoop(Subject(parts, name="loop")), steps)


def judged(parts: dict[str, Any], steps: int = 4) -> list[Finding]:
    return check_stagnation(measured(parts, steps), Limits())


def failures(parts: dict[str, Any], steps: int = 4) -> list[Finding]:
    return [finding for finding in judged(parts, steps) if finding.verdict is Verdict.FAIL]
