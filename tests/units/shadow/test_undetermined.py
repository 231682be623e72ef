"""Gradients that are zero by mathematics: an optimizer makes whole updates of their noise, which is no finding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampcheck import Run, Verdict, audit, watch
from ampcheck.shadow import Shadow


class Attention(nn.Module):
    """The softmax does not depend on the bias of the keys, so its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(16, 48)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).mean(1))


def trained(dtype: torch.dtype, steps: int = 24, *, flushed: bool = False, closure: bool = False) -> Run:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    inputs, targets = torch.randn(16, 8, 16), torch.randint(4, (16,))
    with watch(fail_on="never") as watched:
        for _ in range(steps):

            def backward() -> torch.Tensor:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype):
                    loss = F.cross_entropy(model(inputs).float(), targets)
                (loss * (1e-5 if flushed else 1.0)).backward()
                return loss

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
    return watched.run


def failures(run: Run) -> set[str]:
    return {f.check for f in run.findings if f.verdict is Verdict.FAIL}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bias_of_the_keys_may_wander(dtype: torch.dtype, closure: bool) -> None:
    assert not failures(trained(dtype, closure=closure))


def test_gradients_that_the_data_determine_may_not_vanish() -> None:
    assert {"flush", "silent-zero"} & failures(trained(torch.float16, 4, flushed=True))


@pytest.mark.parametrize(("dtype", "pure"), [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_elements_of_which_nothing_is_left_but_rounding_may_step_the_other_way(dtype: torch.dtype, pure: bool) -> None:
    """The first step of Adam is as long for a gradient that cancels as for any other, and its sign is rounding."""
    for seed in (3, 11, 15, 17, 33, 35, 37, 39):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
        model.to(dtype if pure else torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        with Shadow() as shadow:
            for _ in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype, enabled=not pure):
                    model(torch.randn(16, 32).to(dtype if pure else torch.float32)).float().square().mean().backward()
                optimizer.step()
        assert shadow.judge is not None
        assert not [fault for fault in shadow.judge.faults if fault.reaches and fault.where.phase == "update"], seed


def lost_near_zero(numbers: int, share: float) -> list[str]:
    """What a shadow finds in differences of which `share` is left of their terms."""
    torch.manual_seed(0)
    layer, data = nn.Linear(32, numbers), torch.randn(1, 32)
    expected = layer(data).detach() * (1 - share)

    def differences() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores = layer(data)
        return scores.float() - expected

    return [str(f) for f in audit(differences, checks=["precision-loss"]).findings if f.verdict is Verdict.FAIL]


def test_one_number_that_is_near_zero_by_chance_is_silent() -> None:
    """A mean of advantages, a correlation or a critic's difference has either sign, so now and then it is near zero."""
    assert not lost_near_zero(1, 2e-3)


def test_numbers_that_cancel_together_are_lost() -> None:
    assert lost_near_zero(16, 2e-3)


def test_one_number_of_which_nothing_is_left_is_lost() -> None:
    assert lost_near_zero(1, 2e-4)


def lost_logits(numbers: int, share: float) -> list[str]:
    """What an audit finds in a model of one row, of whose outputs `share` of their terms is left."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, numbers)), torch.randn(1, 16)
    with torch.no_grad():
        model[2].bias -= (1 - share) * model(data)[0]
    run = audit((model, (data,)), compile=False, checks=["precision-loss"])
    return [str(f) for f in run.findings if f.verdict is Verdict.FAIL]


def test_one_logit_that_is_near_zero_by_chance_is_silent() -> None:
    assert not lost_logits(1, 2e-3)


def test_logits_that_cancel_together_are_lost() -> None:
    assert lost_logits(16, 2e-3)


CONSTANT = {
    "groups of one element": torch.randn(8, 1, generator=torch.Generator().manual_seed(0)) * 3,
    "constant rows": (torch.randn(8, 1, generator=torch.Generator().manual_seed(0)) * 3).repeat(1, 64),
    "all equal": torch.full((8, 64), 3.8),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONSTANT)
def test_equal_values_less_their_mean_are_zero_and_have_no_digits_to_lose(name: str, dtype: torch.dtype) -> None:
    """A layer norm makes 1e-5 of it in the run: its own float32, divided by the root of eps."""
    x = CONSTANT[name].to(dtype)

    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, x.shape[-1:])

    with Shadow() as shadow:
        normal = Norm()(x)
        normal.sum().item()
        F.group_norm(x, 1).abs().max().item()
        F.layer_norm(x.float(), x.shape[-1:]).to(dtype).square().mean().item()
    assert float(normal.abs().max()) < 1e-3
    assert not shadow.exact(normal).any()
    assert shadow.faults == ()


def test_values_that_rounding_makes_equal_have_digits_to_lose() -> None:
    """The same rows, of which the third digit differs."""
    generator = torch.Generator().manual_seed(0)
    x = 100 + 0.1 * torch.randn(8, 64, generator=generator)
    layer = nn.Linear(64, 64, bias=False)
    nn.init.eye_(layer.weight)
    run = audit((nn.Sequential(layer, nn.LayerNorm(64)), (x,)), dtype="bfloat16", compile=False)
    assert "precision-loss" in failures(run)


def trained_on_itself(dtype: torch.dtype | None, head: bool) -> Run:
    """A student whose first targets are what it gives itself in float32; head: beside another that learns."""
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1e-2)
    inputs = torch.randn(64, 8)
    targets = model(inputs).detach()

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.mse_loss(model(inputs).float(), targets)
            loss = loss + (F.mse_loss(other(inputs).float(), inputs[:, :1]) if head else 0.0)
        loss.backward()
        optimizer.step()
        return loss.item()

    return audit({"model": model, "other": other, "optimizer": optimizer, "step": step})


@pytest.mark.parametrize("head", [False, True], ids=["alone", "beside a head that learns"])
def test_float32_gradients_that_cancel_to_zero_are_no_underflow(head: bool) -> None:
    assert "gradient-underflow" not in failures(trained_on_itself(None, head))


class Difference(nn.Module):
    """A slope by differences: the bias of the last layer cancels to the last bit in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 64), nn.Softplus(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            steps = torch.eye(3) * 1e-3
            slope = torch.cat([self.layers(x + s) - self.layers(x - s) for s in steps], -1) / 2e-3
        return F.normalize(slope, dim=-1)


def test_a_gradient_that_is_exactly_zero_in_float64_is_the_rounding_of_float32() -> None:
    torch.manual_seed(0)
    run = audit((Difference(), (torch.rand(200, 3) * 2 - 1,)), dtype=torch.bfloat16, autocast=True, compile=False)
    assert not failures(run)
