"""Gradients that vanish are found, with their true share; those that are zero anyway are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_loops import amp_loop, demo_loop, mlp, state_of

from ampcheck.checks.training.gradient_underflow import check as check_gradients
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.gradients import GradientLoss, GradientStats
from ampcheck.training.gradients.summary import gradient_table
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.observed import observe


def measured(shape: Any, steps: int = 1) -> GradientStats:
    loop = TrainingLoop(shape if isinstance(shape, Subject) else Subject(shape, name="loop"))
    with loop.preserved():
        stats = observe(loop, steps).gradients
    assert stats is not None
    return stats


def judged(shape: Any, **how: Any) -> Finding:
    (found,) = check_gradients(measured(shape, **how), Limits())
    return found


def of(stats: GradientStats, name: str) -> GradientLoss:
    return next(one for one in stats.gradients if one.name == name)


class Branches(nn.Module):
    """A main path, and a layer whose outputs are weighted from large to very small: its rows' gradients are, too."""

    def __init__(self, low: float = 2.0**-36.7, high: float = 2.0**-20.7) -> None:
        super().__init__()
        self.main, self.side, self.head = nn.Linear(16, 32), nn.Linear(16, 100), nn.Linear(32, 1)
        self.register_buffer(
            "weights",
            torch.logspace(float(torch.tensor(low).log10()), float(torch.tensor(high).log10()), 100)[
                torch.randperm(100)
            ],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.main(x).tanh()).squeeze(-1) + (self.side(x) * self.weights.to(x.dtype)).float().sum(-1)


def planted(scale: float, dtype: torch.dtype = torch.float16) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    data, wanted = torch.randn(32, 16), torch.randn(32)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = F.mse_loss(model(data).float(), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}, data, wanted


def truth(shape: dict[str, Any], data: torch.Tensor, wanted: torch.Tensor) -> dict[str, tuple[int, int]]:
    """By parameter: how many elements are nonzero in a converted model, and how many of these are zero in float16."""
    model, scale = shape["model"], shape["scaler"].get_scale() or shape["scaler"]._init_scale
    wide, narrow = copy.deepcopy(model).double(), copy.deepcopy(model)
    F.mse_loss(wide(data.double()), wanted.double()).backward()
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(narrow(data).float(), wanted)
    (loss * scale).backward()
    found = {}
    for (name, one), other in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        nonzero = one.grad != 0
        found[name] = int(nonzero.sum()), int((nonzero & (other.grad == 0)).sum())
    return found


SCALE = 64.0
"""At which a little more than half of the side's gradient vanishes."""


def test_a_layer_that_loses_half_of_its_gradient_while_all_else_looks_healthy_is_found():
    shape, data, wanted = planted(SCALE)
    known = truth(shape, data, wanted)
    lost = {name: gone / count for name, (count, gone) in known.items()}
    assert lost.pop("side.weight") == pytest.approx(0.56, abs=0.02)  # what is planted
    lost.pop("side.bias")
    assert max(lost.values()) < 0.01
    before = state_of(shape)
    value = shape["step"](0)
    assert torch.tensor(value).isfinite()
    grads = [parameter.grad for parameter in shape["model"].parameters()]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
    assert shape["scaler"].get_scale() == SCALE  # no step was skipped

    shape, data, wanted = planted(SCALE)
    stats = measured(shape)
    count, gone = known["side.weight"]
    one = of(stats, "side.weight")
    assert one.lost == pytest.approx(gone / count, abs=0.01)
    assert one.made_in == "float16"
    found = [f for f in check_gradients(stats, Limits()) if f.verdict is Verdict.FAIL]
    assert found[0].where.module == "side"
    assert "side.weight" in found[0].message
    assert found[0].observed == pytest.approx(gone / count, abs=0.01) or "side.bias" in found[0].message
    assert before != state_of(shape)


@pytest.mark.parametrize("scale", [2.0**0, 2.0**4, 2.0**8, 2.0**12, 2.0**16])
def test_the_share_is_that_of_a_converted_model_at_every_scale(scale):
    shape, data, wanted = planted(scale)
    known = truth(shape, data, wanted)
    stats = measured(shape)
    assert stats.scale == scale
    for name, (count, gone) in known.items():
        assert of(stats, name).lost == pytest.approx(gone / count, abs=0.01), name
    worst = max(gone / count for count, gone in known.values())
    (found,) = check_gradients(stats, Limits())
    assert found.verdict is (Verdict.FAIL if worst > 0.1 else Verdict.PASS)


def test_bfloat16_loses_nothing():
    found = judged(planted(1.0, torch.bfloat16)[0])
    assert found.verdict is Verdict.PASS


@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_the_demo_passes(dtype):
    stats = measured(demo_loop(dtype, scaled=dtype is torch.float16, layers=1, size=2))
    (found,) = check_gradients(stats, Limits())
    assert found.verdict is Verdict.PASS
    assert stats.format == ("" if dtype is None else str(dtype).removeprefix("torch."))
    assert not stats.coverage.unseen


def test_without_a_scaler_the_hint_is_to_scale_and_the_table_tells_the_worst_first():
    shape, *_ = planted(1.0)
    stats = measured(shape)
    found = check_gradients(stats, Limits())
    assert found[0].verdict is Verdict.FAIL
    assert "GradScaler" in found[0].hint
    (table,) = gradient_table(stats)
    assert str(table.rows[0][0]).startswith("side")


def trained(model: nn.Module, inputs: Any, scale: float = 65536.0, optimizer: Any = None) -> dict[str, Any]:
    """A step in float16 autocast; the loss is the mean square of what the model gives."""
    stepped = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.SGD(stepped, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(inputs).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


class KeyBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 4
        return scores.float().softmax(-1).to(x.dtype) @ self.v(x)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.unused, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(self.base(x).relu())


class Dead(nn.Module):
    """Most units of the first layer never fire: their gradient is zero in every format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 2)
        with torch.no_grad():
            self.first.bias[4:] = -100.0

    def forward(self, x):
        return self.head(self.first(x).relu())


class Tied(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(12, 16, sparse=sparse), nn.Linear(16, 16)
        self.head = nn.Linear(16, 12, bias=False)
        if not sparse:
            self.head.weight = self.table.weight

    def forward(self, x):
        places = (x[:, 0].abs() * 5).long() % 12
        return F.log_softmax(self.head(self.middle(self.table(places))).float(), -1)


HEALTHY = {
    "key bias": KeyBias,
    "frozen and unused": Frozen,
    "dead relu": Dead,
    "tied": Tied,
    "sparse": lambda: Tied(sparse=True),
    "dropout": lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(16, 8, bias=True), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)),
    "max pool": lambda: nn.Sequential(nn.Linear(16, 16), nn.Unflatten(1, (1, 16)), nn.MaxPool1d(4), nn.Flatten()),
    "deep": lambda: nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(16, 16), nn.GELU()))),
    "clamped": lambda: nn.Sequential(nn.Linear(16, 16), nn.Hardtanh(-0.1, 0.1), nn.Linear(16, 2)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_is_left_alone(name):
    torch.manual_seed(0)
    model = HEALTHY[name]()
    stats = measured(trained(model, torch.randn(64, 16), scale=4096.0))
    (found,) = check_gradients(stats, Limits())
    assert found.verdict is Verdict.PASS, found.message
    assert any(one.known for one in stats.gradients)


def test_a_gradient_that_is_zero_in_mathematics_is_not_known():
    torch.manual_seed(0)
    stats = measured(trained(KeyBias(), torch.randn(64, 16), scale=4096.0))
    assert of(stats, "k.bias").known <= 4
    assert of(stats, "q.bias").known == 16


def test_compiled_models_are_judged_by_their_parameters():
    torch.manual_seed(0)
    shape, *_ = planted(SCALE)
    inner = shape["model"]
    compiled = torch.compile(inner, backend="aot_eager")
    data, wanted, scaler, optimizer = torch.randn(32, 16), torch.randn(32), shape["scaler"], shape["optimizer"]

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(compiled(data).float(), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    loss = step(0)
    optimizer.zero_grad()
    stats = measured({**shape, "model": compiled, "step": step})
    assert loss == pytest.approx(loss)
    assert not stats.skipped
    found = check_gradients(stats, Limits())
    assert found[0].verdict is Verdict.FAIL
    assert "side" in found[0].message


def test_a_loop_that_does_not_repeat_itself_is_judged_as_it_runs():
    batches = iter([torch.randn(8, 16) for _ in range(50)])
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number):
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    assert judged({"model": model, "optimizer": optimizer, "step": step}).verdict is Verdict.PASS


def test_nothing_that_learns_is_not_judged():
    model = mlp()
    found = judged({"model": model, "step": lambda number: float(model(torch.ones(1, 16)).detach())})
    assert found.verdict is Verdict.INCOMPLETE
    assert "no backward pass" in found.message


def test_the_first_step_that_is_not_skipped_is_judged():
    shape = amp_loop(init_scale=2.0**20, factor=2.0**6)
    stats = measured(shape, steps=16)
    assert 0 < stats.step < 16
    assert [over for _, _, over in stats.attempts] == [True] * stats.step + [False]
    assert check_gradients(stats, Limits())[0].where.step == stats.step


def test_accumulated_micro_batches_count_each():
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    data = torch.randn(3, 8, 16)

    def step(number):
        optimizer.zero_grad()
        for part in data:
            with torch.autocast("cpu", torch.float16):
                loss = model(part).float().square().mean() / 3
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    stats = measured({"model": model, "optimizer": optimizer, "scaler": scaler, "step": step})
    assert of(stats, "weight").numel == 3 * 16
    assert check_gradients(stats, Limits())[0].verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("zero", "reverse", "verdict"), [(20, 0, Verdict.FAIL), (20, 15, Verdict.PASS), (10, 0, Verdict.PASS)]
)
def test_noise_is_taken_off_and_the_limit_itself_passes(zero, reverse, verdict):
    one = GradientLoss("a.weight", "float16", "float16", 200, 100, zero, reverse, 0, 0, 0.01, 1.0)
    (found,) = check_gradients(GradientStats("s", 0, "float16", 2.0, (one,)), Limits())
    assert found.verdict is verdict


class CastByHand(nn.Module):
    """Weights in float32 that the forward casts to float16, without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [p.half() for layer in (self.first, self.second) for p in (layer.weight, layer.bias)]
        return F.linear(F.linear(x.half(), *weights[:2]).relu(), *weights[2:]).float()


@pytest.mark.parametrize(("factor", "lost"), [(1.0, False), (1e-6, True)])
def test_gradients_of_float32_weights_that_code_casts_itself_are_of_float16(factor: float, lost: bool) -> None:
    torch.manual_seed(0)
    model, data = CastByHand(), torch.randn(8, 16)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = (model(data) * factor).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss)

    stats = measured({"model": model, "optimizer": optimizer, "scaler": scaler, "step": step})
    assert stats.format == "float16"
    assert (check_gradients(stats, Limits())[0].verdict is Verdict.FAIL) is lost
