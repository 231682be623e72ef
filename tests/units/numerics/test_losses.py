"""A loss counts by the dtype in which it was computed, whatever it was cast to afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.numerics.losses import computed_in

B, H = torch.bfloat16, torch.float16
TARGET = torch.arange(4)
WIDE = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
NARROW = WIDE.to(B)


def body() -> torch.Tensor:
    """The output of a bfloat16 model, (4, 5)."""
    torch.manual_seed(0)
    return nn.Linear(5, 5).to(B)(NARROW)


def single() -> torch.Tensor:
    """That of a model with one output for one row, (1, 1)."""
    torch.manual_seed(0)
    return nn.Linear(5, 1).to(B)(NARROW[:1])


LOW: dict[str, Callable[[], torch.Tensor]] = {
    "a mean, cast": lambda: body().mean().float(),
    "a cross entropy, cast": lambda: F.cross_entropy(body(), TARGET).float(),
    "times a float32 loss scale": lambda: body().square().sum() * torch.tensor(1024.0),
    "divided for accumulation": lambda: body().square().mean().float() / 4,
    "one part of a sum of losses": lambda: F.mse_loss(body().float(), WIDE) + 0.1 * body().square().mean(),
    "parts that are stacked": lambda: torch.stack([body().mean(), body().sum()]).float().sum(),
    "by rows, then a float32 mean": lambda: F.cross_entropy(body(), TARGET, reduction="none").float().mean(),
    "a mean by hand": lambda: (F.cross_entropy(body(), TARGET, reduction="none").sum() / 4).float(),
    "with logits": lambda: F.binary_cross_entropy_with_logits(body(), NARROW.sigmoid()).float(),
    "a divergence": lambda: F.kl_div(body().log_softmax(-1), NARROW.softmax(-1), reduction="batchmean").float(),
    "a norm": lambda: body().norm().float(),
    "a float32 loss that is rounded": lambda: F.mse_loss(body().float(), WIDE).to(B).float(),
    "never cast": lambda: body().square().mean(),
}


@pytest.mark.parametrize("name", LOW)
def test_a_loss_that_was_computed_in_16_bits_is_one_of_16_bits_whatever_it_is_cast_to(name):
    assert computed_in(LOW[name]()) == (B,)


def _under_autocast() -> torch.Tensor:
    with torch.autocast("cpu", B):
        return F.cross_entropy(nn.Linear(5, 5)(WIDE), TARGET)


HIGH: dict[str, Callable[[], torch.Tensor]] = {
    "output cast before the loss": lambda: F.cross_entropy(body().float(), TARGET),
    "autocast computes it in float32": _under_autocast,
    "summed in float32": lambda: body().square().mean(dtype=torch.float32),
    "a batch of one": lambda: (single().float() - 1).square().mean(),
    "a batch of one without its dimensions": lambda: -single().squeeze().float(),
    "a mean over a batch of one": lambda: single().mean(0).float().mean(),
    "a sum inside the model": lambda: (body() / body().sum()).float().square().mean(),
    "a softmax inside the model": lambda: body().softmax(-1).float().log().mean(),
    "a mean that is a prediction": lambda: F.mse_loss(body().mean(dim=(0, 1)).float(), torch.tensor(1.0)),
    "a learned weight": lambda: F.mse_loss(body().float(), WIDE) * nn.Parameter(torch.zeros((), dtype=B)).exp().float(),
    "sums over rows": lambda: body().sum(-1).float().mean(),
}


@pytest.mark.parametrize("name", HIGH)
def test_a_loss_of_a_16_bit_model_that_is_computed_in_float32_is_not_one_of_16_bits(name):
    assert computed_in(HIGH[name]()) == ()


class Model(nn.Module):
    """Returns its loss, which is cast to float32 `before` it is reduced, `after`, or never."""

    def __init__(self, cast: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.cast = nn.Linear(5, 4, dtype=dtype), cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x.to(self.linear.weight.dtype))
        loss = (hidden.float() if self.cast == "before" else hidden).square().mean()
        return loss.float() if self.cast == "after" else loss


class LossModule(nn.Module):
    """Has no parameters: its inputs have gradients."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).square().mean()


@pytest.mark.parametrize(
    ("module", "inputs", "verdict"),
    [
        (Model("before", B), (WIDE,), Verdict.PASS),
        (Model("after", B), (WIDE,), Verdict.WARN),
        (Model("never", B), (WIDE,), Verdict.WARN),
        (Model("after", H), (WIDE,), Verdict.WARN),
        (Model("after", torch.float32), (WIDE,), Verdict.WARN),
        (LossModule(), (NARROW, NARROW.flip(0)), Verdict.WARN),
    ],
)
def test_a_module_that_returns_its_loss_is_judged_by_what_computed_it(module, inputs, verdict):
    run = audit((module, inputs), dtype="bfloat16", compile=False, checks=["loss-dtype"])
    assert {finding.verdict for finding in run.findings if finding.check == "loss-dtype"} == {verdict}, str(run)
