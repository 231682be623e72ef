"""Training in recipes: what a user is promised of `whatif` of a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Subject
from ampcheck.whatif import measure_training, whatif
from ampcheck.whatif.recipes import Recipe

STEPS = 4
EXACT = Recipe("nothing", None)


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        hidden = checkpoint(self.middle, hidden, use_reentrant=False) if self.checkpoints else self.middle(hidden)
        return self.last(hidden.relu())


def trainer(
    *,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    rate: float = 0.1,
    checkpoints: bool = False,
    data: Callable[[int], torch.Tensor] = lambda step: torch.randn(8, 16),
    scaled: bool = False,
    steps: int = STEPS,
) -> Callable[[], None]:
    def main() -> None:
        model = Net(checkpoints).to(dtype)
        steps_by = optimizer(model.parameters(), rate)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(steps):
            steps_by.zero_grad()
            loss = model(data(step).to(dtype)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(steps_by)
            scaler.update()

    return main


def mapping() -> dict[str, Any]:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.full((8, 16), 1.0 + number)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return {"model": model, "optimizer": optimizer, "step": step}


def test_float32_training_stays_with_float64_and_narrower_formats_go_further() -> None:
    what = measure_training(trainer(), ["rowwise", "nvfp4"])
    rowwise, nvfp4 = (loss for loss in what.losses if not loss.kept)
    assert what.own.drift < 1e-5 < rowwise.drift < nvfp4.drift < 1
    assert len(what.exact) == len(rowwise.losses) == STEPS
    assert what.own.losses == pytest.approx(what.exact, rel=1e-5)


def test_the_losses_of_float64_are_those_of_a_run_in_float64() -> None:
    losses: list[float] = []

    def double() -> None:
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16).double()).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()

    torch.manual_seed(0)
    double()
    what = measure_training(trainer(), [EXACT])
    assert what.exact == pytest.approx(losses, rel=1e-9)


def test_a_recipe_that_narrows_nothing_is_the_training_itself() -> None:
    what = measure_training(trainer(), [EXACT])
    assert all(loss.losses == what.own.losses and loss.drift == what.own.drift for loss in what.losses)


def test_the_first_and_the_last_layer_are_kept_in_a_run_of_their_own() -> None:
    what = measure_training(trainer(), ["nvfp4"])
    assert [loss.kept for loss in what.losses] == [(), ("first", "last")]
    assert what.losses[1].drift < what.losses[0].drift


def test_a_loss_scale_is_in_no_loss() -> None:
    plain, scaled = (measure_training(trainer(scaled=scaled), [EXACT]) for scaled in (False, True))
    assert scaled.exact == pytest.approx(plain.exact)
    assert scaled.own.losses == pytest.approx(plain.own.losses)


def test_a_step_that_a_scaler_skips_has_a_loss_of_its_own() -> None:
    def data(step: int) -> torch.Tensor:
        return torch.full((8, 16), 1e30 if step == 1 else 1.0)

    what = measure_training(trainer(scaled=True, data=data), [EXACT])
    assert len(what.exact) == STEPS
    assert what.exact[1] > 1e30


def test_checkpointed_layers_run_in_the_recipe_when_they_run_again() -> None:
    plain, again = (measure_training(trainer(checkpoints=c), ["mxfp8"]) for c in (False, True))
    assert [loss.drift for loss in again.losses] == [loss.drift for loss in plain.losses]


def test_a_random_recipe_gives_an_interval() -> None:
    what = measure_training(trainer(), ["te-nvfp4", "nvfp4"])
    random, plain = (next(loss for loss in what.losses if loss.recipe == name) for name in ("te-nvfp4", "nvfp4"))
    assert random.runs == 3
    assert random.drifts[0] < random.drifts[1]
    assert (plain.runs, plain.drifts) == (1, ())


def test_delayed_scales_saturate_where_data_grow() -> None:
    def data(step: int) -> torch.Tensor:
        return torch.ones(8, 16) * 4.0**step

    what = measure_training(trainer(data=data, rate=1e-6), ["delayed", "current"])
    delayed, current = (loss for loss in what.losses if not loss.kept)
    assert delayed.saturated[:2] == ("first", "forward")
    assert delayed.saturated[2] == 1.0
    assert current.saturated[2] <= 1 / 8  # the largest elements are at the end of the format


def test_bfloat16_weights_that_lose_their_updates_are_counted() -> None:
    what = measure_training(trainer(dtype=torch.bfloat16, rate=1e-4), [EXACT])
    assert what.own.still > 0.9
    assert what.own.drift == pytest.approx(1.0, abs=0.1)  # as far from float64 as weights that were not trained
    assert measure_training(trainer(rate=1e-4), [EXACT]).own.still < 0.1


def test_the_mapping_of_a_loop_is_trained_and_left_as_it_was() -> None:
    parts = mapping()
    before = [parameter.clone() for parameter in parts["model"].parameters()]
    what = measure_training(parts, ["rowwise"], steps=3)
    assert len(what.exact) == 3
    assert all(map(torch.equal, before, parts["model"].parameters()))


def test_long_training_is_ended_after_its_steps() -> None:
    assert len(measure_training(trainer(steps=1000), ["rowwise"], steps=2).exact) == 2


def test_a_run_has_the_losses_by_step_and_a_table() -> None:
    run = whatif(Subject(trainer(), name="main"), "rowwise", steps=3)
    assert [finding.check for finding in run.findings] == ["format-drift"] * 2
    (table,), (chart,) = run.tables, run.charts
    assert [row[0] for row in table.rows] == ["float64", "own precision", "rowwise", "rowwise but for first, last"]
    assert [series.label for series in chart.series] == ["float64", "own precision", "rowwise"]
    assert all(len(series.x) == 3 for series in chart.series)


def without_a_step() -> None:
    Net()(torch.ones(2, 16)).sum().backward()


def raises() -> None:
    raise ValueError("no data")


_MODEL = Net()


def trains_what_is_there() -> None:
    optimizer = torch.optim.SGD(_MODEL.parameters(), 0.1)
    for _ in range(3):
        _MODEL(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (without_a_step, "must run a backward pass and step an optimizer"),
        (raises, "raised ValueError: no data"),
        (trains_what_is_there, "build model and optimizer inside the function"),
        ((Net(), (torch.ones(2, 16),)), "must train; found a subject of kind forward"),
    ],
)
def test_what_cannot_be_trained_is_refused(subject: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_training(subject, ["rowwise"])


def test_a_budget_is_for_models() -> None:
    with pytest.raises(UsageError, match="budget"):
        whatif(trainer(), "rowwise", budget=8)


def test_losses_that_are_not_finite_leave_the_drift_infinite() -> None:
    def data(step: int) -> torch.Tensor:
        return torch.full((8, 16), math.nan if step == 2 else 1.0)

    what = measure_training(trainer(data=data), ["rowwise"])
    assert math.isnan(what.exact[2])
    assert what.losses[0].drift == math.inf
