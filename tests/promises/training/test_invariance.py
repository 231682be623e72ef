"""What depends on the loss scale and must not is found; what merely looks so is not."""

from __future__ import annotations

import io
import linecache
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import amp_loop, mlp, state_of

import ampcheck
from ampcheck import Finding, Verdict

DATA = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def judged(shape: dict[str, Any]) -> list[Finding]:
    before = state_of(shape)
    run = ampcheck.audit(shape, checks=["scale-invariance"], steps=6)
    assert state_of(shape) == before
    return [found for found in run.findings if found.check == "scale-invariance"]


def line_of(found: Finding) -> str:
    """The source at which a finding is."""
    assert found.where.file.endswith("test_invariance.py")
    return linecache.getline(__file__, found.where.line).strip()


def failed(shape: dict[str, Any]) -> list[Finding]:
    return [found for found in judged(shape) if found.verdict is Verdict.FAIL]


def parts(model: nn.Module | None = None, **how: Any) -> tuple[nn.Module, Any, Any]:
    model = model or mlp()
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **how})
    return model, torch.optim.SGD(model.parameters(), lr=0.01), scaler


def loop_of(model: nn.Module, optimizer: Any, scaler: Any, step: Any, **more: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, **more}


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_usual_step_does_not_depend_on_its_scale(dtype):
    (found,) = judged(amp_loop(dtype=dtype))
    assert found.verdict is Verdict.PASS


def test_a_clip_before_unscale_depends_on_the_scale():
    (found,) = failed(amp_loop(between=lambda scaler, optimizer, model: clip(model)))
    assert "the optimizer sees" in found.message
    assert "unscale" in found.hint
    assert "clip_grad_norm_" in line_of(found)


def test_a_clip_after_unscale_does_not():
    def between(scaler, optimizer, model):
        scaler.unscale_(optimizer)
        clip(model)

    assert judged(amp_loop(between=between))[0].verdict is Verdict.PASS


def test_a_clip_by_a_bound_that_knows_the_scale_does_not():
    def between(scaler, optimizer, model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01 * scaler.get_scale(), error_if_nonfinite=False)

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is Verdict.PASS, found.message


def test_noise_added_to_scaled_gradients_depends_on_the_scale():
    def between(scaler, optimizer, model):
        for parameter in model.parameters():
            parameter.grad.add_(1e-3)

    assert failed(amp_loop(between=between))


@pytest.mark.parametrize("good", [True, False])
def test_a_penalty_on_scaled_gradients_is_found_at_its_line(good):
    model, optimizer, scaler = parts()

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().square().mean()
        grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        if good:
            grads = [grad / scaler.get_scale() for grad in grads]
        loss = loss + sum(grad.square().sum() for grad in grads).sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    found = failed(loop_of(model, optimizer, scaler, step))
    assert bool(found) is not good
    if found:
        gradient = next(f for f in found if "optimizer sees" in f.message)
        assert "torch.autograd.grad" in gradient.hint
        assert "test_invariance.py" in gradient.hint


@pytest.mark.parametrize("good", [True, False])
def test_a_small_difference_that_comes_from_weights_is_found(good):
    """A temperature that no optimizer steps: its update by hand divides by the scale of the next step."""
    model, optimizer, scaler = parts(growth_interval=1)
    temperature = nn.Parameter(torch.tensor(1.0))

    def step(number):
        optimizer.zero_grad()
        temperature.grad = None
        with torch.autocast("cpu", torch.float16):
            loss = (temperature * model(DATA).float()).square().mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            temperature.sub_(1e-2 * temperature.grad / (scale if good else scaler.get_scale()))
        return loss.item()

    found = failed({**loop_of(model, optimizer, scaler, step), "temperature": temperature})
    assert [line_of(finding).startswith("temperature.sub_") for finding in found] == [True] * (not good)


def test_a_scale_that_was_that_of_two_updates_is_not_judged():
    """Nothing shows by which of them the temperature is divided."""
    model, optimizer, scaler = parts()
    temperature = nn.Parameter(torch.tensor(1.0))

    def step(number):
        optimizer.zero_grad()
        temperature.grad = None
        loss = (temperature * model(DATA).float()).square().mean()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        grown = scaler.get_scale() > before
        with torch.no_grad():
            temperature.sub_(1e-2 * temperature.grad / scaler.get_scale())
        return loss.item() + grown

    (found,) = judged({**loop_of(model, optimizer, scaler, step), "temperature": temperature})
    assert found.verdict is Verdict.INCOMPLETE
    assert line_of(found).startswith("temperature.sub_")


@pytest.mark.parametrize("good", [True, False])
def test_a_second_loss_that_is_not_scaled_is_found(good):
    model, optimizer, scaler = parts()

    def step(number):
        optimizer.zero_grad()
        first, second = model(DATA).square().mean(), model(DATA * 2).mean()
        scaler.scale(first).backward()
        (scaler.scale(second) if good else second).backward()
        scaler.step(optimizer)
        scaler.update()
        return first.item()

    assert bool(failed(loop_of(model, optimizer, scaler, step))) is not good


@pytest.mark.parametrize("good", [True, False])
def test_an_update_between_two_optimizers_is_found(good):
    one, two = mlp(seed=1), mlp(seed=2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number):
        first.zero_grad()
        second.zero_grad()
        loss = one(DATA).square().mean() + two(DATA).square().mean()
        scaler.scale(loss).backward()
        scaler.step(first)
        if not good:
            scaler.update()
        scaler.step(second)
        scaler.update()
        return loss.item()

    shape = {"models": [one, two], "optimizers": [first, second], "scaler": scaler, "step": step}
    found = failed(shape)
    assert bool(found) is not good
    if found:
        assert "before and after scaler.update()" in found[0].message
        assert line_of(found[0]) == "scaler.step(second)"


@pytest.mark.parametrize("good", [True, False])
def test_a_loss_that_is_divided_by_the_new_scale_is_found_as_a_value(good):
    model, optimizer, scaler = parts(growth_interval=2)

    def step(number):
        optimizer.zero_grad()
        loss = scaler.scale(model(DATA).square().mean())
        loss.backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return loss.item() / (before if good else scaler.get_scale())

    found = failed(loop_of(model, optimizer, scaler, step))
    assert bool(found) is not good
    if found:
        assert "what the step returns" in found[0].message
        assert found[0].where.module == ""


@pytest.mark.parametrize("every", [2, 4])
def test_accumulated_gradients_pass(every):
    model, optimizer, scaler = parts()

    def step(number):
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().square().mean() / every
        scaler.scale(loss).backward()
        if number % every == every - 1:
            scaler.unscale_(optimizer)
            clip(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.item()

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is Verdict.PASS, found.message


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_that_accumulate_across_an_update_are_found(every):
    """One optimizer steps in every step, and the scale may change; the other gathers gradients over `every` steps."""
    often, seldom = mlp(seed=1), mlp(seed=2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (often, seldom))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number):
        loss = often(DATA).square().mean() + seldom(DATA).square().mean()
        scaler.scale(loss).backward()
        scaler.step(first)
        first.zero_grad()
        if number % every == every - 1:
            scaler.step(second)
            second.zero_grad()
        scaler.update()
        return loss.item()

    shape = {"models": [often, seldom], "optimizers": [first, second], "scaler": scaler, "step": step}
    assert bool(failed(shape)) is (every > 1)


def test_dropout_a_scheduler_and_adam_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.LayerNorm(32), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA + torch.randn(8, 16)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        return loss.item()

    (found,) = judged(loop_of(model, optimizer, scaler, step, scheduler=scheduler))
    assert found.verdict is Verdict.PASS, found.message


def test_a_gradient_that_is_zero_in_mathematics_passes():
    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return (self.q(x) @ self.k(x).T).softmax(-1) @ x

    torch.manual_seed(0)
    model, optimizer, scaler = parts(Keys())

    def step(number):
        optimizer.zero_grad()
        loss = model(DATA).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is Verdict.PASS, found.message


@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_that_vanish_at_scale_1_change_no_branch_of_later_steps(scaled):
    """A loss so small that at scale 1 no weight moves, and steps so large that signs in a ReLU turn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.Adam(model.parameters(), lr=0.03, eps=1e-16)

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().sub(1).square().mean() * 1e-8
        if scaled or number < 1:
            scaler.scale(loss).backward()
        else:
            (scaler.scale(loss) * 0.99 + loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is (Verdict.PASS if scaled else Verdict.FAIL), found.message


def test_without_a_scaler_nothing_is_judged():
    run = ampcheck.audit(amp_loop(scaled=False), steps=2)
    assert [f.verdict for f in run.findings if f.check == "scale-invariance"] == [Verdict.SKIP]


def test_a_loop_that_does_not_repeat_itself_is_judged_by_its_one_run():
    model, optimizer, scaler = parts()
    batches = iter(torch.randn(100, 8, 16))

    def step(number):
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is Verdict.PASS, found.message


def test_a_step_that_raises_is_not_judged():
    def between(scaler, optimizer, model):
        raise ZeroDivisionError

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is Verdict.INCOMPLETE
    assert "coverage" in found.message


@pytest.mark.parametrize("reads", ["norm", "scale"])
def test_what_a_scaled_number_decides_is_not_judged_and_its_line_is_named(reads):
    """A comparison of the scale with that of before is how code sees that a step was skipped."""
    model, optimizer, scaler = parts()

    def step(number):
        optimizer.zero_grad()
        loss = model(DATA).square().mean()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        norm = model[0].weight.grad.norm().item() if reads == "norm" else 0.0
        if norm < 1e6:
            scaler.step(optimizer)
        scaler.update()
        return loss.item() + (scaler.get_scale() < before)

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is (Verdict.INCOMPLETE if reads == "norm" else Verdict.PASS), found.message
    if reads == "norm":
        assert line_of(found).startswith("norm = ")
        assert "unscale" in found.hint


@pytest.mark.parametrize("returned", ["scaled", "unscaled", "divided"])
def test_a_scaled_loss_that_a_step_returns_is_found_unless_it_is_divided(returned):
    model, optimizer, scaler = parts()

    def step(number):
        optimizer.zero_grad()
        loss = model(DATA).square().mean()
        scaled = scaler.scale(loss)
        scaled.backward()
        value = loss.item() if returned == "unscaled" else scaled.item()
        value = value / scaler.get_scale() if returned == "divided" else value
        scaler.step(optimizer)
        scaler.update()
        return value

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is (Verdict.FAIL if returned == "scaled" else Verdict.PASS), found.message
    if returned == "scaled":
        assert "what the step returns is multiplied by the scale" in found.message
        assert line_of(found).startswith("value = ")


@pytest.mark.parametrize("low", [1e-9, 1e-3])
def test_a_limit_that_only_another_scale_reaches_is_no_pass(low):
    """Nothing is above it in this run; a guard far below the values is none."""

    def between(scaler, optimizer, model):
        for parameter in model.parameters():
            norm = parameter.grad.norm()
            parameter.grad.div_(norm.clamp(min=low)).mul_(norm)

    (found,) = judged(amp_loop(between=between, init_scale=2.0**20 if low < 1e-6 else 1.0))
    assert found.verdict is not Verdict.FAIL, found.message
    assert (found.verdict is Verdict.PASS) is (low < 1e-6), found.message


def test_gradients_that_a_scaler_left_out_count_where_another_scale_serves():
    (found,) = judged(amp_loop(init_scale=2.0**60))
    assert found.verdict is Verdict.PASS, found.message
    (found,) = judged(amp_loop(factor=float("nan")))
    assert found.verdict is Verdict.INCOMPLETE
    assert "not finite" in found.message


@pytest.mark.parametrize(
    ("make", "verdict"),
    [
        (lambda scale: torch.tensor(1.0 / scale), Verdict.PASS),
        (lambda scale: torch.full((1,), 1.0 / scale), Verdict.PASS),
        (lambda scale: torch.tensor(scale).reciprocal(), Verdict.PASS),
        (lambda scale: torch.tensor(0.7131 / scale), Verdict.INCOMPLETE),  # it may be made of the scale
        (lambda scale: torch.tensor(0.5), Verdict.FAIL),
    ],
)
def test_a_tensor_that_code_makes_of_the_scale_counts_as_the_scale(make, verdict):
    def between(scaler, optimizer, model):
        factor = make(scaler.get_scale())
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            parameter.grad.div_(factor)

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is verdict, found.message


def test_gradients_that_are_never_cleared_are_found_where_the_scale_is_read_too():
    def between(scaler, optimizer, model):
        scaler.unscale_(optimizer)
        assert scaler.get_scale() > 0

    (found,) = failed(amp_loop(between=between, clear=False))
    assert "a sum of parts" in found.message
    assert found.where.line


def test_a_bucket_of_gradients_that_every_step_fills_again_is_judged_by_what_it_holds_now() -> None:
    model, optimizer, scaler = parts(growth_interval=1)
    sizes = [parameter.numel() for parameter in model.parameters()]
    bucket = torch.zeros(sum(sizes))

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().square().mean()
        scaler.scale(loss).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient, piece in zip(gradients, bucket.split(sizes), strict=True):
            torch.mul(gradient.view(-1), torch.ones(()), out=piece)
        bucket.mul_(1.0)  # as a sum over processes writes all of it
        for gradient, piece in zip(gradients, bucket.split(sizes), strict=True):
            gradient.view(-1).copy_(piece)
        scaler.step(optimizer)
        scaler.update()
        return float(loss)

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is Verdict.PASS


def gradients_of(model: nn.Module) -> Any:
    return [parameter.grad for parameter in model.parameters()]


def by_numpy(gradient: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gradient.numpy().copy())


def by_list(gradient: torch.Tensor) -> torch.Tensor:
    return torch.tensor(gradient.tolist())


def by_file(gradient: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("leave", [by_numpy, by_list, by_file])
def test_gradients_that_leave_the_run_and_come_back_are_not_judged_and_the_line_is_named(leave) -> None:
    def between(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        for gradient in gradients_of(model):
            gradient.copy_(leave(gradient))

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is Verdict.INCOMPLETE
    assert "def by_" not in line_of(found)
    assert "gradient" in line_of(found)


def test_a_constant_that_happens_to_equal_the_scale_is_a_constant() -> None:
    model, optimizer, scaler = parts(init_scale=65536.0)

    def step(number: int) -> float:
        optimizer.zero_grad()
        scaler.get_scale()  # for the log
        with torch.autocast("cpu", torch.float16):
            output = model(DATA).float()
        loss = output.square().sum() * 256.0 / 65536.0
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss)

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is Verdict.PASS


def test_a_scaled_loss_that_is_returned_as_a_tensor_is_found_where_it_was_scaled() -> None:
    model, optimizer, scaler = parts()

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().square().mean()
        loss = scaler.scale(loss)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    (found,) = failed(loop_of(model, optimizer, scaler, step))
    assert line_of(found) == "loss = scaler.scale(loss)"


def test_a_limit_that_every_element_reaches_is_one_finding_at_its_line() -> None:
    def between(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        for number, gradient in enumerate(gradients_of(model)):
            gradient.clamp_(max=-1e6 if number else 1.0)

    (found,) = failed(amp_loop(between=between))
    assert line_of(found).startswith("gradient.clamp_")


def test_gradients_that_are_chosen_by_their_size_name_the_line() -> None:
    def between(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.where(parameter.grad.abs() > 1.0, parameter.grad.sign(), parameter.grad)

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is Verdict.INCOMPLETE
    assert "torch.where" in line_of(found)


def test_a_warm_up_whose_parts_are_eighths_is_a_schedule() -> None:
    model, _, scaler = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: (number + 1) / 8)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().square().mean()
        scaler.scale(loss).backward()
        scaler.get_scale()  # for the log
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return float(loss)

    (found,) = judged(loop_of(model, optimizer, scaler, step))
    assert found.verdict is Verdict.PASS


def test_a_part_of_a_gradient_that_code_overwrites_is_no_pass() -> None:
    def between(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        gradient = gradients_of(model)[0]
        gradient[0].copy_(torch.ones_like(gradient[0]))

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is not Verdict.PASS


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.16])
def test_a_rate_that_code_sets_without_the_scale_is_none_of_it(rate: float) -> None:
    def between(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if rate != 0.16 else rate
        optimizer.param_groups[0]["weight_decay_of_ours"] = rate

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is Verdict.PASS


def test_a_size_that_equals_the_scale_is_no_constant_of_its_line() -> None:
    model, optimizer, scaler = parts(init_scale=16.0)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().square().mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        for gradient in gradients_of(model):
            gradient.view(-1, 1)[:16].div_(scale), gradient.view(-1, 1)[16:].div_(scale)
        optimizer.step()
        return float(loss)

    assert [f.verdict for f in judged(loop_of(model, optimizer, scaler, step))] == [Verdict.PASS]
