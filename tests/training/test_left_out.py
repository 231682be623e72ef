"""Parameters that get gradients and that no optimizer trains are found; those that are left out on purpose are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampcheck
from ampcheck.core.run import Finding, Verdict

Parts = tuple[nn.Module, torch.optim.Optimizer]


class Adapter(nn.Module):
    def __init__(self, dtype: torch.dtype, *, frozen: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(not frozen)
        self.a = nn.Parameter(torch.randn(4, 8, dtype=dtype) / 4)
        self.b = nn.Parameter(torch.zeros(8, 4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()) + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


class OnlyInput(torch.autograd.Function):
    """x @ weight.T, with a gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].float() @ ctx.saved_tensors[0], None


class Quantised(nn.Module):
    """A codebook that averages move, or nothing."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.layer, self.codebook, self.moves = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), moves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x).float()
        if self.moves:
            with torch.no_grad():
                self.codebook.lerp_(hidden[:8].detach(), 0.1)
        return OnlyInput.apply(hidden, self.codebook)  # type: ignore[no-any-return, no-untyped-call]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def stepped_first(optimizer_first: bool) -> Parts:
    model = net()
    built = torch.optim.AdamW(model.parameters(), 1e-2)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    return model, built if optimizer_first else torch.optim.AdamW(model.parameters(), 1e-2)


def probe(dtype: torch.dtype = torch.float32) -> Parts:
    model = net()
    model[0].to(dtype)
    return model, torch.optim.AdamW(model[2].parameters(), 1e-2)


def by_hand() -> Parts:
    """A head that steps itself, beside an optimizer that holds a parameter of its shape which is not used."""
    model, spare = net(), nn.Parameter(torch.zeros(2, 16))

    def step(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight -= 1e-2 * weight.grad
            weight.grad = None

    model[2].weight.register_post_accumulate_grad_hook(step)
    return model, torch.optim.AdamW([*model[0].parameters(), spare], 1e-2)


def tied_late() -> Parts:
    """One weight for two layers, tied after the optimizer was built."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model[1].weight = model[0].weight
    return model, optimizer


def adapters(dtype: torch.dtype, *, frozen: bool = True, everything: bool = False) -> Parts:
    model = nn.Sequential(Adapter(dtype, frozen=frozen), nn.ReLU(), nn.Linear(8, 2))
    trained = [p for p in model.parameters() if p.requires_grad and (everything or p.dtype is torch.float32)]
    return model, torch.optim.AdamW(trained, 1e-2)


def quantised(*, moves: bool, frozen: bool = False) -> Parts:
    model = nn.Sequential(Quantised(moves=moves), nn.Linear(8, 2))
    model[0].codebook.requires_grad_(not frozen)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def coverage(make: Callable[[], Parts], *, call: bool) -> list[Finding]:
    torch.manual_seed(0)
    model, optimizer = make()
    data, labels = torch.randn(16, 8), torch.arange(16) % 2

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(data).float(), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def trains() -> None:
        for number in range(6):
            step(number)

    run = ampcheck.audit(trains if call else {"model": model, "optimizer": optimizer, "step": step}, steps=6)
    return [f for f in run.findings if f.check == "coverage" and f.verdict in (Verdict.FAIL, Verdict.WARN)]


@pytest.mark.every(4)
@pytest.mark.parametrize("call", [False, True], ids=["mapping", "call"])
@pytest.mark.parametrize(
    ("make", "verdict", "names"),
    [
        (lambda: stepped_first(True), Verdict.FAIL, ["2.weight"]),
        (lambda: adapters(torch.bfloat16), Verdict.WARN, ["0.a", "0.b"]),
        (lambda: quantised(moves=False), Verdict.WARN, ["0.codebook"]),
    ],
    ids=["an optimizer that was built too early", "an optimizer for float32 alone", "a backward without gradient"],
)
def test_a_parameter_that_nothing_trains_is_named(
    make: Callable[[], Parts], verdict: Verdict, names: list[str], call: bool
) -> None:
    (finding,) = coverage(make, call=call)
    assert finding.verdict is verdict
    assert all(name in finding.message for name in names)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "make",
    [
        lambda: stepped_first(False),
        probe,
        lambda: probe(torch.bfloat16),
        by_hand,
        tied_late,
        lambda: adapters(torch.float32),
        lambda: adapters(torch.bfloat16, everything=True),
        lambda: adapters(torch.bfloat16, frozen=False),
        lambda: quantised(moves=True),
        lambda: quantised(moves=False, frozen=True),
    ],
)
def test_parameters_that_are_left_out_on_purpose_are_no_finding(make: Callable[[], Parts]) -> None:
    assert not coverage(make, call=False)
