"""Training goes on after a step that the scaler skipped; what a loop keeps does not keep the infinity."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_loops import amp_loop

from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training

Shape = dict[str, Any]


def judged(shape: Shape, steps: int = 8) -> Run:
    return judge_training(Subject(shape), ["scaler-protocol"], steps=steps)


def bad(run: Run) -> list[Finding]:
    return [finding for finding in run.findings if finding.verdict in (Verdict.FAIL, Verdict.WARN)]


def norm_of(scaler: Any, optimizer: Any, model: nn.Module, limit: float = math.inf) -> torch.Tensor:
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def loop_that_keeps(keep: Callable[[torch.Tensor], object], **options: Any) -> Shape:
    """keep: is called with the norm of the unscaled gradients of each step."""
    return amp_loop(between=lambda s, o, model: keep(norm_of(s, o, model)), keep=keep, **options)


# --- what stops training


def clears_where_the_scale_did_not_fall() -> Shape:
    def step(scaler: Any, optimizer: Any) -> None:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            optimizer.zero_grad()

    return amp_loop(clear=False, step=step)


def clears_in_a_hook_of_the_optimizer() -> Shape:
    shape = amp_loop(clear=False)
    shape["optimizer"].register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())
    return shape


def weights_its_loss_by_a_norm() -> Shape:
    share = torch.full((), 0.5)

    def keep(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        norm = norm_of(scaler, optimizer, model)
        share.lerp_(norm / (1 + norm), 0.1)

    return amp_loop(between=keep, factor=share)  # type: ignore[arg-type]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (clears_where_the_scale_did_not_fall, "the gradients of the skipped step were not cleared"),
        (clears_in_a_hook_of_the_optimizer, "the gradients of the skipped step were not cleared"),
        (weights_its_loss_by_a_norm, "holds the infinity"),
    ],
)
def test_a_skipped_step_after_which_every_step_is_skipped_fails(loop: Callable[[], Shape], cause: str) -> None:
    (finding,) = bad(judged(loop()))
    assert finding.verdict is Verdict.FAIL
    assert "skipped the next 2 steps of optimizer as well" in finding.message
    assert cause in finding.message
    assert "the gradient of step 2 was made infinite" in finding.message
    assert finding.where.step == 3


def limits_by_an_average() -> Shape:
    average = torch.ones(())

    def clip(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        norm = norm_of(scaler, optimizer, model)
        average.lerp_(norm, 0.1)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_((average / norm).clamp(max=1.0))

    return amp_loop(between=clip, average=average)


def averages_unscaled_gradients() -> Shape:
    averages: dict[nn.Parameter, torch.Tensor] = {}

    def add_average(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            assert parameter.grad is not None
            averages[parameter] = averages.get(parameter, parameter.grad.clone()).lerp(parameter.grad, 0.1)
            parameter.grad.copy_(averages[parameter])

    return amp_loop(between=add_average, averages=averages)


class Careless(torch.optim.SGD):
    """Takes over the scaler's part, as a fused optimizer does, and does not look at what it found."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad / self.grad_scale, alpha=-group["lr"])  # type: ignore[attr-defined]


def with_optimizer(make: Callable[..., Any]) -> Shape:
    shape = amp_loop()
    inner, one = shape["optimizer"], shape["step"]
    cell = next(c for c in one.__closure__ if c.cell_contents is inner)
    cell.cell_contents = make(shape["model"].parameters(), lr=0.01)
    return {**shape, "optimizer": cell.cell_contents}


def takes_over_and_does_not_look() -> Shape:
    return with_optimizer(Careless)


@pytest.mark.every(3)
@pytest.mark.parametrize("loop", [limits_by_an_average, averages_unscaled_gradients, takes_over_and_does_not_look])
def test_a_skipped_step_that_spoils_the_weights_fails(loop: Callable[[], Shape]) -> None:
    (finding,) = bad(judged(loop()))
    assert finding.verdict is Verdict.FAIL
    assert "0.weight" in finding.message
    assert "became infinite or NaN" in finding.message


# --- what is kept


class Limit:
    """The limit of a norm by its moving average."""

    def __init__(self) -> None:
        self.mean = 8.0

    def __call__(self, norm: torch.Tensor) -> None:
        self.mean += 0.1 * (float(norm) - self.mean)


def number_in_a_mapping() -> Shape:
    kept = {"norm": 8.0}
    return loop_that_keeps(lambda norm: kept.update(norm=0.9 * kept["norm"] + 0.1 * float(norm)))


def tensor_of_one_element() -> Shape:
    kept = torch.full((), 8.0)
    return loop_that_keeps(lambda norm: kept.lerp_(norm, 0.1))


@pytest.mark.every(3)
@pytest.mark.parametrize("loop", [lambda: loop_that_keeps(Limit()), number_in_a_mapping, tensor_of_one_element])
def test_an_average_that_keeps_the_infinity_of_a_skipped_step_is_a_warning(loop: Callable[[], Shape]) -> None:
    (finding,) = bad(judged(loop()))
    assert finding.verdict is Verdict.WARN
    assert re.search("= (inf|nan) since then, also after 2 more steps", finding.message)
    assert "isfinite" in finding.hint


class Clip:
    """Clips by the running mean of norms, which a norm that is not finite spoils for good.

    guarded: against such a norm: `always`, `never`, or once there is a mean (`later`)."""

    def __init__(self, mean: float | None, guarded: str) -> None:
        self.mean, self.guarded = mean, guarded

    def __call__(self, scaler: Any, optimizer: Any, model: nn.Module) -> None:
        norm = float(norm_of(scaler, optimizer, model))
        if not math.isfinite(norm) and (self.guarded == "always" or (self.guarded == "later" and self.mean)):
            return
        self.mean = norm if self.mean is None else 0.9 * self.mean + 0.1 * norm
        if norm > 0.5 * self.mean:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5 * self.mean)


def clips_by_a_mean(guarded: str, *, mean: float | None = 1.0, init_scale: float = 1024.0) -> Shape:
    clip = Clip(mean, guarded)
    return amp_loop(between=clip, clip=clip, init_scale=init_scale)


@pytest.mark.slow
def test_a_mean_that_keeps_the_infinity_and_that_training_goes_by_fails() -> None:
    (finding,) = bad(judged(clips_by_a_mean("never")))
    assert finding.verdict is Verdict.FAIL
    assert "mean = inf since then" in finding.message
    assert finding.where.step == 3


@pytest.mark.slow
def test_a_mean_that_begins_with_the_infinity_of_the_first_steps_fails() -> None:
    """The scaler skips the first steps by itself, as it does from 65536 on: the mean never was finite."""
    (finding,) = bad(judged(clips_by_a_mean("later", mean=None, init_scale=2.0**20)))
    assert finding.verdict is Verdict.FAIL
    assert "the scaler skipped the steps up to 2 by itself" in finding.message
    assert finding.where.step == 3


# --- what an optimizer counts


class Counting(torch.optim.SGD):
    """Takes over the scaler's part, leaves the weights alone, and counts the step all the same."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", torch.zeros(())) + 1
                if not self.found_inf:  # type: ignore[attr-defined]
                    parameter.data.add_(parameter.grad / self.grad_scale, alpha=-group["lr"])  # type: ignore[attr-defined]


def counts_in_its_state() -> Shape:
    return with_optimizer(Counting)


def counted_by_the_loop() -> Shape:
    shape = amp_loop()
    (group,) = shape["optimizer"].param_groups
    group["t"] = 0

    def one(number: int) -> float:
        group["t"] += 1
        return float(shape["step"](number))

    return {**shape, "step": one}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("loop", "count"), [(counts_in_its_state, "optimizer.state.0.step"), (counted_by_the_loop, "param_groups.0.t")]
)
def test_an_optimizer_whose_count_advances_at_a_skipped_step_is_a_warning(
    loop: Callable[[], Shape], count: str
) -> None:
    (finding,) = bad(judged(loop(), steps=12))
    assert finding.verdict is Verdict.WARN
    assert f"{count}" in finding.message
    assert "advanced at a step that the scaler skipped too" in finding.message


@pytest.mark.every(3)
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_counts_of_pytorchs_optimizers_do_not_advance_at_a_skipped_step(options: dict[str, bool]) -> None:
    assert bad(judged(with_optimizer(lambda parameters, lr: torch.optim.AdamW(parameters, lr, **options)), 12)) == []


# --- healthy neighbours


class Meter:
    """The meter of many training scripts."""

    def __init__(self) -> None:
        self.val = self.sum = self.count = 0.0
        self.avg = 9.0

    def __call__(self, norm: torch.Tensor) -> None:
        self.val, self.sum, self.count = float(norm), self.sum + float(norm), self.count + 1
        self.avg = self.sum / self.count


class Guarded(Limit):
    def __call__(self, norm: torch.Tensor) -> None:
        if torch.isfinite(norm):
            super().__call__(norm)


class Largest:
    def __init__(self) -> None:
        self.largest = self.last = 0.0

    def __call__(self, norm: torch.Tensor) -> None:
        self.largest, self.last = max(self.largest, float(norm)), float(norm)


class Warming:
    """Clips by the largest norm of late; after an infinite one by nothing, until it has seen three steps again."""

    def __init__(self) -> None:
        self.limit, self.seen = 8.0, 3

    def __call__(self, scaler: Any, optimizer: Any, model: nn.Module) -> None:
        norm = float(norm_of(scaler, optimizer, model, self.limit))
        if not math.isfinite(norm):
            self.limit, self.seen = math.inf, 0
        self.seen += 1
        if self.seen > 3:
            self.limit = 0.5 * norm


def history(size: int | None) -> Shape:
    kept: deque[float] = deque([9.0, 8.0], maxlen=size)
    return loop_that_keeps(lambda norm: kept.append(float(norm)))


def only_where_the_step_was_taken() -> Shape:
    kept, seen = {"norm": 8.0}, {"norm": 0.0}

    def step(scaler: Any, optimizer: Any) -> None:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            kept["norm"] = 0.9 * kept["norm"] + 0.1 * seen["norm"]

    return amp_loop(between=lambda s, o, m: seen.update(norm=float(norm_of(s, o, m))), step=step)


def averaged_weights() -> Shape:
    shape = amp_loop()
    average = AveragedModel(shape["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def one(number: int) -> float:
        loss = float(shape["step"](number))
        average.update_parameters(shape["model"])
        return loss

    return {**shape, "average": average, "step": one}


def schedule_by_hand() -> Shape:
    shape, taken = amp_loop(), {"steps": 0}

    def one(number: int) -> float:
        taken["steps"] += 1
        for group in shape["optimizer"].param_groups:
            group["lr"] = 0.01 * 0.9 ** taken["steps"]
        return float(shape["step"](number))

    return {**shape, "step": one}


def tries_a_batch_again() -> Shape:
    """An overflow repeats the batch, until the scaler does not skip it."""
    shape = with_optimizer(torch.optim.Adam)
    scaler = shape["scaler"]

    def one(number: int) -> float:
        for _ in range(8):
            before = scaler.get_scale()
            loss = float(shape["step"](number))
            if scaler.get_scale() >= before:
                break
        return loss

    return {**shape, "step": one}


def accumulates() -> Shape:
    model = nn.Linear(16, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = torch.ones(8, 16)

    def one(number: int) -> float:
        with torch.autocast("cpu", torch.float16):
            loss = model(data).float().square().mean() / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": one}


def two_optimizers() -> Shape:
    first, second = nn.Linear(16, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (first, second)]
    scaler, data = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.ones(8, 16)

    def one(number: int) -> float:
        for optimizer in optimizers:
            with torch.autocast("cpu", torch.float16):
                loss = second(first(data)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return {"first": first, "second": second, "optimizers": optimizers, "scaler": scaler, "step": one}


def raises_at_an_infinity() -> Shape:
    def keep(norm: torch.Tensor) -> None:
        if not torch.isfinite(norm):
            raise RuntimeError("the norm is not finite")

    return loop_that_keeps(keep)


HEALTHY: dict[str, Callable[[], Shape]] = {
    "plain": amp_loop,
    "clips": lambda: amp_loop(between=lambda s, o, m: norm_of(s, o, m, 1.0)),
    "a scale that falls first": lambda: amp_loop(init_scale=2.0**20),
    "a list": lambda: history(None),
    "a full deque": lambda: history(2),
    "a meter": lambda: loop_that_keeps(Meter()),
    "a maximum": lambda: loop_that_keeps(Largest()),
    "a guarded average": lambda: loop_that_keeps(Guarded()),
    "an average of steps that were taken": only_where_the_step_was_taken,
    "averaged weights": averaged_weights,
    "a schedule by hand": schedule_by_hand,
    "accumulation": accumulates,
    "a batch again": tries_a_batch_again,
    "two optimizers": two_optimizers,
    "raises": raises_at_an_infinity,
    "clips by a guarded mean": lambda: clips_by_a_mean("always"),
    "a guarded mean, and a scale that falls first": lambda: clips_by_a_mean("always", mean=None, init_scale=2.0**20),
    "a meter, and a scale that falls first": lambda: loop_that_keeps(Meter(), init_scale=2.0**20),
    "a limit that comes back": lambda: amp_loop(between=(clip := Warming()), clip=clip),
}


@pytest.mark.every(32)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_loop_that_recovers_passes(name: str) -> None:
    run = judged(HEALTHY[name](), steps=12 if name == "a batch again" else 8)
    assert [finding.message for finding in bad(run)] == []
    assert any(f.check == "scaler-protocol" and f.verdict is Verdict.PASS for f in run.findings)


@pytest.mark.slow
def test_a_loop_is_restored_after_its_step_was_skipped() -> None:
    shape = number_in_a_mapping()
    before = {name: tensor.clone() for name, tensor in shape["model"].state_dict().items()}
    judged(shape)
    assert shape["scaler"].get_scale() == 1024.0
    assert all(torch.equal(before[name], tensor) for name, tensor in shape["model"].state_dict().items())
    assert bad(judged(shape)) != []
