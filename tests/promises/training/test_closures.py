"""Steps that call their closure again: a line search decides by losses of nearly equal value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampcheck import Verdict, audit


def fit(seed: int, search: str | None, *, by_squares: bool = False) -> None:
    """LBFGS on a small regression. by_squares: the loss has a variance as the difference of two large means."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
    x = torch.randn(64, 4)
    y = x.sin().sum(1, keepdim=True)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        if by_squares:
            far = (out + 100).bfloat16()
            loss = loss + ((far * far).mean() - far.mean() ** 2).float()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)


def failures(*args: object, **kwargs: bool) -> set[str]:
    run = audit(lambda: fit(*args, **kwargs), compile=False, checks=["precision-loss"])
    return {f"{f.check} {f.where.op}" for f in run.of(Verdict.FAIL)}


@pytest.mark.parametrize(("seed", "search"), [(0, "strong_wolfe"), (2, None)])
def test_a_search_among_losses_of_nearly_equal_value_is_no_error(seed, search):
    assert failures(seed, search) == set()


def test_a_loss_that_loses_its_digits_in_a_closure_is_found():
    assert "precision-loss aten::sub.Tensor" in failures(2, None, by_squares=True)


def test_a_search_in_float32_after_training_under_amp_divides_nothing_by_the_scale() -> None:
    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
        adam, search = torch.optim.Adam(model.parameters(), 1e-3), torch.optim.LBFGS(model.parameters(), max_iter=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x = torch.randn(64, 4)
        y = x.sin().sum(1, keepdim=True)
        for _ in range(4):
            adam.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()

        def closure() -> torch.Tensor:
            search.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(4):
            search.step(closure)

    found = audit(train, checks=["scaler-protocol", "scale-invariance"]).findings
    assert {f.verdict for f in found if f.check != "coverage"} == {Verdict.PASS}
