"""Weights in a reentrant checkpoint that cuts their gradients off are found; other checkpoints are not reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampcheck
from ampcheck.core.run import Finding, Verdict


class Adapted(nn.Module):
    """A frozen embedding and layer, with an adapter that is trained, and a head."""

    def __init__(self, *, reentrant: bool, needs: bool = False, beside: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8).requires_grad_(False)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8).requires_grad_(not frozen)
        self.head, self.unused = nn.Linear(8, 16), nn.Linear(8, 16)
        self.reentrant, self.needs, self.beside = reentrant, needs, beside

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(hidden) + self.adapter(hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        if self.needs:
            hidden.requires_grad_()
        out = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(out + self.adapter(hidden) if self.beside else out)  # type: ignore[no-any-return]


def training(model: nn.Module, *, evaluates: bool = False) -> Callable[[], None]:
    def train() -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        tokens = torch.arange(64) % 16
        for _ in range(6):
            optimizer.zero_grad()
            # Until PyTorch 2.10, casts that the cache keeps from a checkpoint cut gradients off by themselves.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                logits = model(tokens)
            nn.functional.cross_entropy(logits.float(), (tokens + 1) % 16).backward()
            optimizer.step()
            if evaluates:
                with torch.no_grad():
                    model(tokens)

    return train


def found(call: Callable[[], None]) -> list[Finding]:
    run = ampcheck.audit(call, steps=6)
    return [finding for finding in run.of(Verdict.FAIL) if "reentrant" in finding.message]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_weights_whose_checkpoint_cuts_their_gradients_are_found():
    (finding,) = found(training(Adapted(reentrant=True)))
    assert finding.check == "coverage"
    assert "adapter.weight" in finding.message
    assert not any(name in finding.message for name in ("head", "unused", "base"))
    assert "use_reentrant=False" in finding.hint
    assert finding.where.file.endswith("test_cut_gradients.py")


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "model",
    [
        lambda: Adapted(reentrant=False),
        lambda: Adapted(reentrant=True, needs=True),
        lambda: Adapted(reentrant=True, beside=True),
        lambda: Adapted(reentrant=True, frozen=True),
    ],
    ids=["not reentrant", "an input with a gradient", "a gradient on another way", "frozen"],
)
def test_weights_that_get_a_gradient_or_need_none_are_not(model):
    assert found(training(model())) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_an_evaluation_in_a_reentrant_checkpoint_cuts_nothing_off():
    assert found(training(Adapted(reentrant=True, needs=False, beside=True), evaluates=True)) == []


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_loop_that_is_handed_over_by_its_parts_is_judged_alike():
    model = Adapted(reentrant=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tokens = torch.arange(64) % 16

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 16)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    run = ampcheck.audit({"model": model, "optimizer": optimizer, "step": step}, steps=4)
    assert any("reentrant" in finding.message for finding in run.of(Verdict.FAIL))
