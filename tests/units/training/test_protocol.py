"""The order of calls around a GradScaler: each breach is found, each healthy pattern is left alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import amp_loop, mlp

import ampcheck
from ampcheck.checks.training.scaler_protocol import check as check_protocol
from ampcheck.checks.training.scheduler_skip import check as check_scheduler_skip
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.protocol import Act, Event, ProtocolStats, StepError
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.protocol.recorder import Recorder


def observed(shape: dict[str, Any], steps: int = 4, **how: Any) -> tuple[list[Event], StepError | None]:
    loop = TrainingLoop(Subject(shape, name="loop"))
    recorder = Recorder(loop, **how)
    with loop.preserved(), recorder.listening():
        for taken in recorder.run(steps):
            if isinstance(taken, StepError):
                return recorder.events, taken
    return recorder.events, None


def recorded(shape: dict[str, Any], steps: int = 4, lost: float | None = None) -> list[Finding]:
    events, stopped = observed(shape, steps)
    return check_protocol(ProtocolStats("loop", tuple(events), steps, lost, stopped), Limits())


def monitored(shape: dict[str, Any], steps: int = 4) -> list[Finding]:
    optimizers = shape.get("optimizers") or [shape["optimizer"]]
    parts = shape.get("model"), *optimizers, shape["scaler"]
    with suppress(Exception), ampcheck.watch(*parts, every=10, fail_on="never") as seen:
        for number in range(steps):
            shape["step"](number)
    return [finding for finding in seen.run.findings if finding.check == "scaler-protocol"]


Judge = Callable[..., list[Finding]]


@pytest.fixture(params=[recorded, monitored], ids=["audit", "watch with a scaler"])
def judged(request) -> Judge:
    """The two ways in which a user hands over a loop with a scaler."""
    return request.param


@pytest.fixture
def failures(judged: Judge) -> Callable[..., str]:
    def messages(shape: dict[str, Any], steps: int = 4) -> str:
        return " | ".join(f.message for f in judged(shape, steps) if f.verdict is Verdict.FAIL)

    return messages


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def clip_with_norm(model: nn.Module) -> None:
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)


@pytest.mark.parametrize("clipping", [clip, clip_values, clip_with_norm])
def test_a_clip_before_unscale_is_found_at_its_line(judged, clipping):
    (found,) = [f for f in judged(amp_loop(between=lambda s, o, m: clipping(m))) if f.verdict is Verdict.FAIL]
    assert "unscaled before they are clipped" in found.message
    assert "1024 times too large" in found.message
    assert found.where.file.endswith("test_protocol.py")


def test_a_clip_after_unscale_passes(judged):
    def between(scaler, optimizer, model):
        scaler.unscale_(optimizer)
        clip(model)

    (found,) = judged(amp_loop(between=between))
    assert found.verdict is Verdict.PASS


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another, as Accelerate makes them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


def test_an_optimizer_that_is_wrapped_once_it_has_a_name_is_one_optimizer():
    """As in diffusers' scripts: a scheduler names it, then `accelerator.prepare` puts it in a list."""
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]
    loop = TrainingLoop(Subject(shape))
    recorder = Recorder(loop)
    loop.optimizers["accelerator._optimizers"] = Wrapped(optimizer)
    recorder.name_parts()
    with recorder.listening():
        scaler.scale(model(torch.ones(8, 16)).square().mean()).backward()
        scaler.unscale_(optimizer)
        clip(model)
    assert {name for event in recorder.events for name in event.optimizers} == {"optimizer"}


def test_gradients_that_are_kept_and_unscaled_again_in_the_next_step_are_found(failures):
    model = torch.nn.Linear(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(16, 8)

    def step(i):
        loss = model(x).square().mean()
        if i == 0:
            for p, g in zip(
                model.parameters(), torch.autograd.grad(scaler.scale(loss), list(model.parameters())), strict=True
            ):
                p.grad = g
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    assert "unscaled once" in failures({"model": model, "optimizer": optimizer, "scaler": scaler, "step": step})


def test_unscale_twice_is_found_though_the_scaler_raises(failures):
    def between(scaler, optimizer, model):
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)

    assert "unscaled once" in failures(amp_loop(between=between))


def test_unscale_for_each_micro_batch_is_found(failures):
    shape = amp_loop(clear=False)
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]
    data = torch.randn(8, 16)

    def step(number):
        if number % 4 == 0:
            optimizer.zero_grad()
        loss = model(data).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if number % 4 == 3:
            scaler.step(optimizer)
        scaler.update()
        return loss.item()

    assert "unscaled already" in failures({**shape, "step": step})


def test_accumulation_over_micro_batches_passes(judged):
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]
    data = torch.randn(8, 16)

    def step(number):
        loss = model(data).square().mean() / 4
        scaler.scale(loss).backward()
        if number % 4 == 3:
            scaler.unscale_(optimizer)
            clip(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.item()

    assert [f.verdict for f in judged({**shape, "step": step}, steps=8)] == [Verdict.PASS]


def test_an_update_that_is_missing_is_found(failures):
    only_step = amp_loop(step=lambda scaler, optimizer: scaler.step(optimizer))
    assert "never called" in failures(only_step, steps=1)
    assert "update" in failures(only_step, steps=3)


def test_a_step_of_the_optimizer_itself_is_found(failures):
    def direct(scaler, optimizer):
        optimizer.step()

    assert "called directly, on gradients that are 1024 times too large" in failures(amp_loop(step=direct))


def test_a_step_of_the_optimizer_itself_after_unscale_is_found(failures):
    def direct(scaler, optimizer):
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()

    assert "did not look at for infinities" in failures(amp_loop(step=direct))


def test_a_loss_that_was_not_scaled_is_found(failures):
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).mean()
        scaler.scale(loss)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    assert "must be scaled before backward" in failures({**shape, "step": step})


def test_one_of_two_losses_that_was_not_scaled_is_found(failures):
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 16)).mean()).backward()
        model(torch.zeros(2, 16)).mean().backward()
        scaler.step(optimizer)
        scaler.update()
        return 0.0

    assert "must be scaled before backward" in failures({**shape, "step": step})


def test_gradients_that_are_not_cleared_after_the_step_are_found(failures):
    assert "stepped with and not cleared" in failures(amp_loop(clear=False))


@pytest.mark.parametrize("between", [True, False])
def test_an_update_between_two_optimizers_is_found_and_one_after_both_is_not(failures, between):
    one, two = mlp(seed=1), mlp(seed=2)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number):
        first.zero_grad()
        second.zero_grad()
        for model in (one, two):
            scaler.scale(model(torch.ones(2, 16)).mean()).backward()
        scaler.step(first)
        if between:
            scaler.update()
        scaler.step(second)
        scaler.update()
        return 0.0

    found = failures({"models": [one, two], "optimizers": [first, second], "scaler": scaler, "step": step})
    assert ("between a backward pass and the step" in found) is between


@pytest.mark.parametrize("scale_of_second", [1024.0, 64.0])
@pytest.mark.parametrize("shared", [True, False])
def test_a_second_scaler_of_a_shared_encoder_is_named_as_the_cause(failures, scale_of_second, shared):
    encoder, heads = nn.Linear(16, 4), [nn.Linear(4, 1), nn.Linear(4, 1)]
    first = torch.optim.SGD([*encoder.parameters(), *heads[0].parameters()], lr=0.1)
    second = torch.optim.SGD(heads[1].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    other = torch.amp.GradScaler("cpu", init_scale=scale_of_second)

    def step(number):
        first.zero_grad()
        second.zero_grad()
        hidden = encoder(torch.ones(2, 16))
        scaler.scale(heads[0](hidden).mean()).backward(retain_graph=True)
        other.scale(heads[1](hidden if shared else hidden.detach()).mean()).backward()
        scaler.step(first)
        other.step(second)
        scaler.update()
        other.update()
        return 0.0

    parts = {"models": [encoder, *heads], "optimizers": [first, second], "scalers": [scaler, other], "scaler": scaler}
    found = failures({**parts, "step": step})
    assert ("by the scaler that scaled their loss" in found) is shared
    assert "update() came" not in found


def test_a_gan_whose_generator_leaves_gradients_in_the_discriminator_passes(judged):
    """The generator's loss goes through the discriminator; its gradients there are cleared and never used."""
    generator, discriminator = mlp(seed=1), mlp(seed=2)
    widen = nn.Linear(1, 16)
    of_g = torch.optim.SGD([*generator.parameters(), *widen.parameters()], lr=0.1)
    of_d = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def step(number):
        of_d.zero_grad()
        scaler.scale(discriminator(torch.ones(2, 16)).mean()).backward()
        scaler.step(of_d)
        scaler.update()
        of_g.zero_grad()
        scaler.scale(discriminator(widen(generator(torch.ones(2, 16)))).mean()).backward()
        scaler.step(of_g)
        scaler.update()
        return 0.0

    modules = nn.ModuleList([generator, discriminator, widen])
    shape = {"model": modules, "optimizers": [of_g, of_d], "scaler": scaler, "step": step}
    assert [f.verdict for f in judged(shape)] == [Verdict.PASS]


def test_float16_parameters_with_a_scaler_are_found_by_name(failures):
    shape = amp_loop()
    shape["model"].half()
    assert "4 of optimizer are float16: 0.weight, 0.bias" in failures(shape)


@pytest.mark.parametrize(
    ("lost", "verdict"),
    [(1.0, Verdict.FAIL), (0.5, Verdict.FAIL), (0.01, Verdict.WARN), (0.0, Verdict.WARN), (None, Verdict.WARN)],
)
def test_float16_without_a_scaler_fails_where_gradients_vanish_and_warns_elsewhere(lost, verdict):
    (found,) = recorded(amp_loop(scaled=False), lost=lost)
    assert found.verdict is verdict
    assert "float16 autocast needs a GradScaler" in found.message
    assert ("up to 100% of a tensor's gradient" in found.message) == (lost == 1.0)


def test_bfloat16_without_a_scaler_is_not_judged(judged):
    assert all(f.verdict is Verdict.SKIP for f in judged(amp_loop(scaled=False, dtype=torch.bfloat16)))


def test_a_normal_back_off_is_no_breach(judged):
    (found,) = judged(amp_loop(init_scale=2.0**30), steps=24)
    assert found.verdict is Verdict.PASS


def test_a_loss_divided_after_it_was_scaled_counts_as_scaled(judged):
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number):
        optimizer.zero_grad()
        (scaler.scale(model(torch.ones(2, 16)).mean()) / 4).backward()
        scaler.step(optimizer)
        scaler.update()
        return 0.0

    assert [f.verdict for f in judged({**shape, "step": step})] == [Verdict.PASS]


def scheduled(careful: bool) -> dict[str, Any]:
    shape = amp_loop()
    scheduler = torch.optim.lr_scheduler.StepLR(shape["optimizer"], 1)

    def step(scaler, optimizer):
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not careful or scaler.get_scale() >= before:
            scheduler.step()

    return amp_loop_with(shape, step, scheduler)


def amp_loop_with(shape: dict[str, Any], step: Any, scheduler: Any) -> dict[str, Any]:
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def one(number):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 16)).mean()).backward()
        step(scaler, optimizer)
        return 0.0

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "step": one}


@pytest.mark.parametrize("careful", [True, False])
def test_a_scheduler_that_goes_on_over_a_skipped_step_is_found(careful):
    events, stopped = observed(scheduled(careful), overflow_from=1)
    assert stopped is None
    (found,) = check_scheduler_skip(ProtocolStats("loop", tuple(events), 4), Limits())
    assert found.verdict is (Verdict.PASS if careful else Verdict.FAIL)


@pytest.mark.parametrize("careful", [True, False])
def test_a_monitored_scheduler_that_goes_on_over_a_skipped_step_is_found(careful):
    shape, factors = scheduled(careful), iter([1.0, float("inf")])
    shape["model"][0].weight.register_hook(lambda gradient: gradient * next(factors, 1.0))
    with ampcheck.watch(shape["model"], shape["optimizer"], shape["scaler"], every=10, fail_on="never") as seen:
        for number in range(4):
            shape["step"](number)
    (found,) = [f for f in seen.run.findings if f.check == "scheduler-skip"]
    assert found.verdict is (Verdict.PASS if careful else Verdict.FAIL)


def test_a_monitor_records_calls_in_the_first_steps_alone():
    shape, original = amp_loop(), torch.autograd._engine_run_backward
    with ampcheck.watch(shape["model"], shape["optimizer"], shape["scaler"], every=10, fail_on="never") as seen:
        for number in range(23):
            shape["step"](number)
        assert torch.autograd._engine_run_backward is not original
        for number in range(200):
            shape["step"](number)
            assert torch.autograd._engine_run_backward is original
    assert max(event.step for event in seen.stats.training.calls.events) == 23
    assert [f.verdict for f in seen.run.findings if f.check == "scaler-protocol"] == [Verdict.PASS]


def test_the_injected_overflow_skips_one_step_and_names_the_parameter():
    events, _ = observed(amp_loop(), overflow_from=2)
    skipped = [e for e in events if e.act is Act.SCALER_STEP and e.skipped]
    assert [(e.step, e.nonfinite) for e in skipped] == [(2, ("0.weight",))]


def test_nothing_is_left_behind():
    originals = (torch.amp.GradScaler.step, torch.autograd._engine_run_backward, torch.save)
    with pytest.raises(ZeroDivisionError), Recorder(TrainingLoop(Subject(amp_loop()))).listening():
        raise ZeroDivisionError
    assert originals == (torch.amp.GradScaler.step, torch.autograd._engine_run_backward, torch.save)


def test_a_loop_that_is_listened_to_gives_the_same_bits():
    plain, heard = amp_loop(), amp_loop()
    losses = [plain["step"](number) for number in range(3)]
    recorder = Recorder(TrainingLoop(Subject(heard)))
    with recorder.listening():
        assert losses == [heard["step"](number) for number in range(3)]
    for one, other in zip(plain["model"].parameters(), heard["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_the_users_own_step_of_a_scheduler_is_recorded():
    shape = amp_loop()
    optimizer, schedules = shape["optimizer"], torch.optim.lr_scheduler

    def step(number):
        inner = [schedules.StepLR(optimizer, 1), schedules.StepLR(optimizer, 1)]
        optimizer.step()
        schedules.SequentialLR(optimizer, inner, [4]).step()
        return 0.0

    events, stopped = observed({**shape, "step": step}, 1)
    assert stopped is None
    assert [event.act for event in events].count(Act.SCHEDULER_STEP) == 1
