"""Results that code tests and discards do no harm; what it returns, and what it writes to weights, does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck import Run, Verdict, audit

TESTS: dict[str, Callable[[Tensor], bool]] = {
    "isfinite": lambda x: bool(x.isfinite().all()),
    "isnan and isinf": lambda x: not bool(x.isnan().any() or x.isinf().any()),
    "compares": lambda x: bool((x.abs() < torch.inf).all()),
}


def _failed(run: Run) -> set[str]:
    return {finding.check for finding in run.of(Verdict.FAIL)}


@pytest.mark.parametrize("name", TESTS)
def test_a_product_that_overflows_and_is_repeated_in_float32_passes(name: str) -> None:
    def product(repeats: bool) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x, w = (60 * torch.randn(8, 64, generator=generator), 60 * torch.randn(64, 8, generator=generator))
        out = x.half() @ w.half()
        if not TESTS[name](out) and repeats:
            return x @ w
        return out

    assert not _failed(audit(lambda: product(repeats=True)))
    assert "overflow" in _failed(audit(lambda: product(repeats=False)))


def test_a_loop_that_leaves_out_every_batch_fails() -> None:
    def train() -> None:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
        with torch.no_grad():
            model[2].weight.mul_(1e5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(12):
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x).float(), x)
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert "overflow" in _failed(audit(train))


def test_results_that_are_tested_and_used_all_the_same_fail() -> None:
    def evaluate(keeps: Callable[[Tensor], object]) -> list[object]:
        torch.manual_seed(0)
        model, kept = nn.Linear(8, 8).half(), []
        with torch.no_grad():
            model.weight.mul_(8)
        for number in range(10):
            output = model(torch.randn(16, 8).half() * (1e4 if number < 4 else 1))
            bool(torch.isfinite(output).all())
            kept.append(keeps(output))
        return kept

    for keeps in (lambda y: y, lambda y: y.argmax(-1), lambda y: y.tolist()):
        assert "overflow" in _failed(audit(lambda keeps=keeps: evaluate(keeps)))


@pytest.mark.parametrize("repeated", [0, 1])
def test_results_of_which_some_are_never_computed_again_fail(repeated: int) -> None:
    def products() -> list[Tensor]:
        torch.manual_seed(0)
        kept = []
        for number in range(10):
            left, right = (torch.randn(8, 8) * (400 if number < 3 else 1)).half(), (torch.randn(8, 8) * 400).half()
            product = left @ right
            if torch.isfinite(product).all():
                kept.append(product)
            elif number < repeated:
                kept.append(left.float() @ right.float())
        return kept

    assert "overflow" in _failed(audit(products))


def test_batches_of_different_lengths_whose_norm_is_logged_pass() -> None:
    def train(scaler: torch.amp.GradScaler | None) -> list[float]:
        torch.manual_seed(0)
        model, norms, scale = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), [], 2.0**20
        with torch.no_grad():
            model[2].weight.mul_(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for length in range(7, 27, 2):
            x = torch.randn(length, 8)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x).float(), x)
            (loss * scale if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif norms[-1] == norms[-1] and norms[-1] != float("inf"):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= scale
                optimizer.step()
            else:
                scale /= 4
        return norms

    for scaler in (torch.amp.GradScaler("cpu", init_scale=2.0**20), None):
        run = audit(lambda scaler=scaler: train(scaler))
        assert "overflow" not in _failed(run), [f.message for f in run.of(Verdict.FAIL)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_nan_that_code_returns_fails_in_every_precision(dtype: torch.dtype) -> None:
    def normalise(guarded: bool) -> Tensor:
        x = torch.ones(4, 8).to(dtype)
        x[2] = 0
        rows = x / x.norm(dim=-1, keepdim=True)
        return rows.nan_to_num() if guarded else rows

    assert "nonfinite-reference" in _failed(audit(lambda: normalise(guarded=False)))
    assert not _failed(audit(lambda: normalise(guarded=True)))


@pytest.mark.parametrize("wide", [False, True], ids=["in half", "in float32"])
def test_an_update_that_vanishes_in_half_before_it_reaches_a_float32_weight_is_found(wide: bool) -> None:
    def train() -> None:
        torch.manual_seed(0)
        master, model = nn.Linear(8, 8), nn.Linear(8, 8).half()
        x = torch.randn(16, 8)
        for _ in range(6):
            model.zero_grad()
            (model(x.half()).float().square().mean() * 0.5).backward()
            with torch.no_grad():
                for weight, low in zip(master.parameters(), model.parameters(), strict=True):
                    assert low.grad is not None
                    gradient = low.grad.float() if wide else low.grad
                    weight.add_((gradient * -1e-5).float())
                    low.copy_(weight)

    found = _failed(audit(train)) & {"flush", "silent-zero"}
    assert bool(found) is not wide


def test_an_update_that_no_format_could_add_is_none() -> None:
    def decay() -> None:
        weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))
        with torch.no_grad():
            for _ in range(4):
                weight.sub_((weight.half() * 1e-9).float())

    assert not _failed(audit(decay))


@pytest.mark.parametrize("tests", [True, False])
def test_a_batch_that_float32_cannot_hold_and_that_the_run_leaves_out_is_a_warning(tests: bool) -> None:
    """Without the test, the loss is dropped unread, as of code that forgets its backward."""

    def train() -> None:
        torch.manual_seed(0)
        model, x, y = nn.Linear(8, 4), torch.randn(32, 8), torch.randn(32, 4)
        y[8:16] = 1e30
        for rows in (slice(0, 8), slice(8, 16), slice(16, 24)):
            with torch.autocast("cpu", torch.float16):
                output = model(x[rows])
            loss = nn.functional.mse_loss(output.float(), y[rows])
            if rows.start == 8 and (not tests or not torch.isfinite(loss)):
                continue
            loss.backward()

    assert audit(train).failed is not tests


def test_a_batch_that_float16_makes_infinite_is_a_failure_though_the_run_leaves_it_out() -> None:
    def train() -> None:
        torch.manual_seed(0)
        model, x = nn.Linear(8, 4), torch.randn(32, 8)
        x[8:16] = 3e4
        for rows in (slice(0, 8), slice(8, 16), slice(16, 24)):
            with torch.autocast("cpu", torch.float16):
                output = model(x[rows])
                loss = (output * 8).square().float().mean()
            if torch.isfinite(loss):
                loss.backward()

    assert audit(train).failed


def test_an_infinity_of_float32_that_a_rounding_to_float16_makes_is_a_failure_though_the_run_leaves_it_out() -> None:
    def train() -> None:
        torch.manual_seed(0)
        weight = torch.zeros(8, requires_grad=True)
        for offset in (0.0, 9.0, 0.0):
            p = (weight + offset + torch.rand(8)).sigmoid().half()
            loss = -torch.log(1 - p.float()).mean()
            if torch.isfinite(loss):
                loss.backward()

    assert audit(train).failed
