"""The order that training needs with or without a scaler: clear, backward, step, schedule; the names of its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck import Finding, Run, Verdict

DATA, TARGETS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.cross_entropy(model(DATA), TARGETS)


def bad(run: Run, check: str) -> list[Finding]:
    return [f for f in run.findings if f.check == check and f.verdict in (Verdict.FAIL, Verdict.WARN)]


def test_gradients_that_are_never_cleared_fail_at_the_backward_pass() -> None:
    def train() -> None:
        model, optimizer = parts()
        for _ in range(5):
            loss_of(model).backward()
            optimizer.step()

    (finding,) = bad(ampcheck.audit(train), "scaler-protocol")
    assert finding.verdict is Verdict.FAIL
    assert "gradients must be cleared after the step that used them" in finding.message
    assert finding.where.line == train.__code__.co_firstlineno + 3


@pytest.mark.parametrize("every", [2, 3])
def test_gradients_that_accumulate_over_micro_batches_do_not(every: int) -> None:
    def train() -> None:
        model, optimizer = parts()
        for number in range(12):
            (loss_of(model) / every).backward()
            if number % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()

    assert not bad(ampcheck.audit(train), "scaler-protocol")


def test_gradients_that_another_loss_leaves_behind_and_that_are_cleared_do_not() -> None:
    def train() -> None:
        generator, discriminator = nn.Linear(6, 6), nn.Linear(6, 3)
        of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
        of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        for _ in range(4):
            of_discriminator.zero_grad()
            loss_of(discriminator).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            discriminator(generator(DATA)).square().mean().backward()  # adds to the discriminator's as well
            of_generator.step()

    assert not bad(ampcheck.audit(train), "scaler-protocol")


def test_a_new_schedule_that_steps_before_its_optimizer_warns() -> None:
    def train(first: bool) -> None:
        model, optimizer = parts()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(4):
            if first:
                schedule.step()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if not first:
                schedule.step()

    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        (finding,) = bad(ampcheck.audit(lambda: train(True)), "scheduler-skip")
    assert finding.verdict is Verdict.WARN
    assert finding.where.line == train.__code__.co_firstlineno + 5
    assert not bad(ampcheck.audit(lambda: train(False)), "scheduler-skip")


@pytest.mark.parametrize("mistake", ["another model", "cleared before the step"])
def test_an_optimizer_that_never_gets_a_gradient_fails_at_its_step(mistake: str) -> None:
    def train() -> None:
        model, optimizer = parts()
        average = torch.optim.swa_utils.AveragedModel(model)
        if mistake == "another model":
            model = nn.Linear(6, 3)
        for _ in range(4):
            loss_of(model).backward()
            model.zero_grad() if mistake != "another model" else None
            optimizer.step()
            average.update_parameters(model)

    (finding,) = bad(ampcheck.audit(train), "coverage")
    assert finding.verdict is Verdict.FAIL
    assert "an optimizer must step weights that have gradients" in finding.message
    assert finding.where.line == train.__code__.co_firstlineno + 8


def test_a_scaler_that_is_made_again_in_each_epoch_is_another_one() -> None:
    def train() -> None:
        model, optimizer = parts()
        for _ in range(3):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model)).backward()
                scaler.step(optimizer)
                scaler.update()

    findings = bad(ampcheck.audit(train), "resume")
    assert findings
    assert findings[0].verdict is Verdict.FAIL
    assert "a scaler that takes over must load the state" in findings[0].message


def test_a_refused_call_is_no_second_finding_beside_the_breach_that_explains_it() -> None:
    def train() -> None:
        model, optimizer = parts()
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)

    (finding,) = bad(ampcheck.audit(train), "scaler-protocol")
    assert "scaler.update() must follow" in finding.message


def test_a_total_in_a_variable_is_named_at_the_statement_that_makes_it_anew() -> None:
    def train() -> None:
        model, optimizer = parts()
        total = torch.zeros((), dtype=torch.bfloat16)
        for _ in range(8):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            total = total + loss.detach().bfloat16()
        assert total > 0

    (finding,) = bad(ampcheck.audit(train), "stagnation")
    assert "total" in finding.message
    assert finding.where.line == train.__code__.co_firstlineno + 8


def test_a_total_in_an_attribute_of_a_module_is_followed_and_a_state_dict_is_no_second_copy() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))
            self.total = torch.zeros((), dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            self.total += 1
            return self.layer(x)

    def train() -> None:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            checkpoint = {"model": model.state_dict()}
        assert checkpoint

    findings = bad(ampcheck.audit(train), "stagnation")
    text = " ".join(f.message for f in findings)
    assert "total" in text
    assert "seen" in text
    assert "checkpoint" not in text
