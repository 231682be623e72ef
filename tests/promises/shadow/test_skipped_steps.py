"""A step that a `GradScaler` skips and makes at a lower scale is no finding; steps that are never made are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampcheck import Run, Verdict, watch


def trained(
    scale: float,
    steps: int,
    *,
    fused: bool = False,
    damage: Callable[[nn.Module], None] | None = None,
    growth: int = 2000,
) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    inputs, targets = torch.randn(64, 8), torch.randn(64, 4)
    with watch(fail_on="never") as watched:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            if damage is not None:
                damage(model)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return watched.run


def problems(run: Run) -> set[str]:
    return {f.check for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)}


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_that_begins_too_high_and_is_lowered_is_silent(fused: bool) -> None:
    assert not problems(trained(2.0**24, 12, fused=fused))


@pytest.mark.parametrize("steps", range(4, 9))
def test_a_run_may_end_in_a_step_that_is_skipped(steps: int) -> None:
    """With a scale that doubles after each step, every other step or so is skipped, also the last."""
    assert not problems(trained(2.0**20, steps, growth=1))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_are_never_made_fail(fused: bool) -> None:
    assert "overflow" in problems(trained(2.0**30, 4, fused=fused))


def test_an_overflow_that_reaches_the_weights_in_spite_of_the_scaler_fails() -> None:
    def apply_by_hand(model: nn.Module) -> None:
        with torch.no_grad():
            model[2].bias -= 1e-9 * model[2].weight.grad.half().sum()  # overflows at scale 2^24, before any unscaling

    assert "overflow" in problems(trained(2.0**24, 12, damage=apply_by_hand))


def test_gradients_that_overflow_to_minus_infinity_alone_are_no_mask() -> None:
    layer = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    with watch(fail_on="never") as watched:
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = -layer(torch.ones(1, 4)).float().mean()  # the gradient of every weight is -1
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not problems(watched.run)


def test_a_product_that_overflows_to_minus_infinity_is_no_mask_and_fails() -> None:
    with watch(fail_on="never") as watched:
        logits = torch.full((2, 16), -200.0).half() @ torch.full((16, 4), 30.0).half()
        assert bool(logits.isneginf().all())
    (finding,) = (f for f in watched.run.findings if f.verdict is Verdict.FAIL)
    assert finding.check == "overflow"


def test_gradients_that_another_loss_leaves_behind_are_silent() -> None:
    """A generator's loss adds to the gradients of its discriminator; nothing reads them before they are discarded."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
    sides = [(torch.optim.Adam(m.parameters()), torch.amp.GradScaler("cpu")) for m in (generator, discriminator)]
    with watch(fail_on="never") as watched:
        for _ in range(6):
            real, noise = torch.randn(16, 8), torch.randn(16, 4)
            for optimizer, scaler in sides:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    fake = generator(noise)
                    if optimizer is sides[0][0]:
                        loss = -discriminator(fake).mean()
                    else:
                        loss = discriminator(fake.detach()).mean() - discriminator(real).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert "overflow" not in problems(watched.run)
