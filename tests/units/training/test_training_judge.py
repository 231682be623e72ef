"""The whole judgement of a training loop: what is asked is judged, everything is told, and nothing is left changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import amp_loop, mlp, state_of

from ampcheck import audit
from ampcheck.core.errors import UsageError
from ampcheck.core.plan import Plan
from ampcheck.core.progress import Listener, listening
from ampcheck.core.run import Run, Verdict, collect
from ampcheck.core.subject import Kind, Subject
from ampcheck.training.judge import CHECKS, assert_training, judge_training


def good_loop() -> dict[str, Any]:
    """A loop in which nothing is wrong, with what real loops have: a scheduler, an EMA, a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    ema = [parameter.detach().clone() for parameter in model.parameters()]

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        data, wanted = torch.randn(16, 16, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(data).float(), wanted)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        for shadow, parameter in zip(ema, model.parameters(), strict=True):
            shadow.lerp_(parameter.detach(), 0.01)
        return loss.item()

    def save() -> dict[str, Any]:
        owners = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
        return {
            **{name: owner.state_dict() for name, owner in owners.items()},
            "ema": ema,
            "random": torch.get_rng_state(),
        }

    def load(checkpoint: dict[str, Any]) -> None:
        for name, owner in {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}.items():
            owner.load_state_dict(checkpoint[name])
        for mine, kept in zip(ema, checkpoint["ema"], strict=True):
            mine.copy_(kept)
        torch.set_rng_state(checkpoint["random"])

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "ema": ema}
    return {**parts, "step": step, "save": save, "load": load}


@pytest.fixture(scope="module")
def whole() -> tuple[Run, Any, Any, list[tuple[str, int, int]]]:
    shape, told = good_loop(), []
    before = state_of(shape)
    with listening(Listener(lambda *stage: told.append(stage))):
        run = audit(Subject(shape, name="loop"), steps=6)
    return run, before, state_of(shape), told


def test_a_healthy_loop_has_no_failure_and_no_warning(whole):
    run = whole[0]
    bad = [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
    assert not bad, str(run)


def test_every_check_says_something_of_a_whole_loop(whole):
    assert {finding.check for finding in whole[0].findings} >= {*CHECKS, "coverage"}
    judged = {finding.check for finding in whole[0].of(Verdict.PASS)}
    needed = {"gradient-underflow", "loss-scale", "scaler-protocol", "scheduler-skip", "scale-invariance", "resume"}
    assert judged >= needed, str(whole[0])


def test_everything_is_afterwards_as_it_was_to_the_bit(whole):
    assert whole[1] == whole[2]


def test_progress_is_told_in_order_to_the_end(whole):
    told = whole[3]
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert {total for _, _, total in told} == {len(told) - 1}
    assert told[-1][0] == "loop: done"


def test_a_run_is_kept_and_read_as_it_was(whole):
    run = whole[0]
    again = Run.from_json(json.loads(json.dumps(run.to_json(), allow_nan=False)))
    assert again.to_json() == run.to_json()
    assert str(again) == str(run)
    assert [f.check for f in again.findings] == [f.check for f in run.findings]


def test_a_run_reads_as_text_and_states_its_evidence(whole):
    run = whole[0]
    text = str(run)
    assert "gradient-underflow" in text
    assert "looked at" in text
    assert run.title == "audit of loop"
    assert run.environment
    assert run.coverage.seen["steps"] == 6
    assert {table.check for table in run.tables} >= {"gradient-underflow"}
    assert all(len(row) == len(table.columns) for table in run.tables for row in table.rows)


@pytest.mark.parametrize("slug", CHECKS)
def test_what_is_not_asked_for_is_not_told(slug):
    run = judge_training(Plan.of(Subject(amp_loop()), checks=[slug], steps=3))
    assert {finding.check for finding in run.findings} <= {slug, "coverage"}
    assert {finding.check for finding in run.findings} >= {"coverage"}


def test_a_guard_alone_runs_no_shadow():
    told: list[str] = []
    listener = Listener(lambda name, *_: told.append(name))
    judge_training(Plan.of(Subject(amp_loop()), checks=["autocast-scope"], steps=2), listener)
    assert not [name for name in told if "gradients" in name]


def test_unknown_checks_and_other_subjects_are_usage_errors():
    with pytest.raises(UsageError, match=r"checks must be one of .*; found 'gradient-overflow'"):
        audit(amp_loop(), checks=["gradient-overflow"])
    with pytest.raises(UsageError, match=r"checks must be one of .*; found 'gradient-overflow'"):
        assert_training(amp_loop(), checks=["gradient-overflow"])
    with pytest.raises(UsageError, match="'step'"):
        assert_training((mlp(), (torch.ones(1, 16),)))


@pytest.mark.parametrize("steps", [0, -1, True, "three", 1.5])
def test_steps_must_be_a_whole_number(steps):
    with pytest.raises(UsageError, match="whole number"):
        judge_training(Plan.of(Subject(amp_loop(steps=steps))))


@pytest.mark.parametrize("steps", [0, -3])
def test_steps_that_are_asked_for_must_be_one_or_more(steps):
    with pytest.raises(UsageError, match="steps"):
        audit(amp_loop(), checks=["loss-scale"], steps=steps)


def test_the_steps_of_the_mapping_are_observed_unless_others_are_asked_for():
    assert judge_training(Plan.of(Subject(amp_loop(steps=4)), checks=["scaler-protocol"])).coverage.seen["steps"] == 4
    assert (
        judge_training(Plan.of(Subject(amp_loop(steps=4)), checks=["scaler-protocol"], steps=2)).coverage.seen["steps"]
        == 2
    )


def test_assert_training_raises_with_every_failure_and_emits_the_run():
    def clip(scaler, optimizer, model):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    checks = ["scaler-protocol", "scale-invariance"]
    with collect() as runs, pytest.raises(AssertionError) as raised:
        assert_training(amp_loop(between=clip), checks=checks, steps=2)
    assert "scaler-protocol" in str(raised.value)
    assert "scale-invariance" in str(raised.value)
    assert len(runs) == 1
    assert runs[0].failed


def test_assert_training_returns_the_run_of_a_healthy_loop():
    run = assert_training(amp_loop(), checks=["scaler-protocol"], steps=2)
    assert not run.failed


def test_limits_come_from_the_subject_too():
    subject = Subject(amp_loop(init_scale=1.0), limits={"underflow": 1e-9})
    assert subject.kind is Kind.TRAINING
    strict = judge_training(Plan.of(subject, checks=["gradient-underflow"], steps=1))
    lax = judge_training(Plan.of(Subject(amp_loop(init_scale=1.0)), checks=["gradient-underflow"], steps=1))
    assert {f.limit for f in strict.findings if f.limit} == {1e-9}
    assert not lax.failed


def test_two_audits_of_one_loop_say_the_same():
    shape = amp_loop()
    first, second = (judge_training(Plan.of(Subject(shape, name="loop"), steps=3)) for _ in range(2))
    assert [(f.check, f.verdict, f.message) for f in first.findings] == [
        (f.check, f.verdict, f.message) for f in second.findings
    ]


def test_a_loop_that_began_is_judged_from_where_it_is():
    shape = amp_loop()
    for number in range(5):
        shape["step"](number)
    before = state_of(shape)
    judge_training(Plan.of(Subject(shape), steps=3))
    assert state_of(shape) == before


def test_a_scaler_that_the_machine_switched_off_is_told():
    shape = amp_loop(scaled=False)
    step, model = shape["step"], shape["model"]
    found = [
        f
        for f in judge_training(Plan.of(Subject(shape), checks=["tf32"], steps=2)).of(Verdict.WARN)
        if f.check == "coverage"
    ]
    assert found == []  # float16 ran: there is something to judge

    def plain(number):
        loss = model(torch.ones(2, 16)).square().mean()
        shape["scaler"].scale(loss).backward()
        shape["scaler"].step(shape["optimizer"])
        return float(loss.detach())

    assert not judge_training(Plan.of(Subject({**shape, "step": plain}), checks=["tf32"], steps=2)).of(
        Verdict.WARN
    )  # by choice
    shape["scaler"] = torch.amp.GradScaler("xpu", enabled=False)
    (told,) = judge_training(Plan.of(Subject({**shape, "step": plain}), checks=["tf32"], steps=2)).of(Verdict.WARN)
    assert "scaler is disabled" in told.message
    assert step is not plain


def test_a_loop_that_changes_nothing_is_told():
    shape = amp_loop(scaled=False, step=lambda scaler, optimizer: None)
    (told,) = judge_training(Plan.of(Subject(shape), checks=["tf32"], steps=2)).of(Verdict.WARN)
    assert "no optimizer applied a gradient and no weight changed" in told.message


def test_an_iterator_that_ends_is_told_as_what_it_is():
    items = iter(range(2))
    shape = amp_loop(scaled=False)
    step = shape["step"]

    def one(number):
        next(items)
        return step(number)

    (told,) = judge_training(Plan.of(Subject({**shape, "step": one}), checks=["tf32"], steps=4)).of(Verdict.FAIL)
    assert "draws on an iterator that ends" in told.hint


def test_an_overflow_that_was_made_for_a_trial_is_told_as_one():
    shape = amp_loop()
    scheduler = torch.optim.lr_scheduler.StepLR(shape["optimizer"], 1)
    step = shape["step"]

    def one(number):
        loss = step(number)
        scheduler.step()
        return loss

    run = judge_training(
        Plan.of(Subject({**shape, "scheduler": scheduler, "step": one}), checks=["scheduler-skip"], steps=4)
    )
    (told,) = [f for f in run.of(Verdict.FAIL) if f.check == "scheduler-skip"]
    assert "in a run of its own, in which the gradient of step 1 was made infinite" in told.message


@pytest.mark.parametrize("checks", ["coverage", "tf32", ["autocast-scope", "resume"]])
def test_assert_training_takes_every_check_of_a_loop_and_a_name(checks):
    run = assert_training(amp_loop(), checks=checks, name="mine", steps=1)
    wanted = {checks} if isinstance(checks, str) else {*checks}
    assert {finding.check for finding in run.findings} == {*wanted, "coverage"}
    assert run.title == "audit of mine"
