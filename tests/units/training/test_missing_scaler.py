"""float16 losses that run backward without a scaler warn where no gradient vanishes and fail where one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_loops import mlp

from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training

HALF, WIDE, BRAIN = torch.float16, torch.float32, torch.bfloat16


def loop(
    autocast: torch.dtype, weights: torch.dtype, *, scaler: str = "", by_hand: bool = False, factor: float = 1.0
) -> dict[str, Any]:
    """scaler: `named` in the mapping or in the `closure` of the step; none scales a loss with it. by_hand: without an
    optimizer."""
    model = mlp().to(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    enabled = torch.amp.GradScaler("cpu")
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(weights)

    def step(number: int) -> float:
        model.zero_grad()
        with torch.autocast("cpu", autocast if autocast is not WIDE else BRAIN, enabled=autocast is not WIDE):
            output = model(data)
        loss = output.float().square().mean() * factor
        loss.backward()
        if by_hand:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
        else:
            optimizer.step()
        return loss.item()

    def logs(number: int) -> float:
        assert enabled.get_scale() > 0
        return step(number)

    shape = {"model": model, "step": logs if scaler == "closure" else step}
    return {
        **shape,
        **({} if by_hand else {"optimizer": optimizer}),
        **({"scaler": enabled} if scaler == "named" else {}),
    }


def judged(shape: dict[str, Any]) -> Finding:
    run = judge_training(Plan.of(Subject(shape, name="loop"), checks=["scaler-protocol"], steps=3))
    (finding,) = [one for one in run.findings if one.check == "scaler-protocol"]
    return finding


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(("autocast", "weights"), [(HALF, WIDE), (WIDE, HALF)])
def test_float16_without_a_scaler_warns_where_no_gradient_vanishes(autocast, weights, by_hand):
    finding = judged(loop(autocast, weights, by_hand=by_hand))
    assert finding.verdict is Verdict.WARN, finding
    assert "no gradient vanished in the measured step" in finding.message
    assert "torch.amp.GradScaler" in finding.hint
    assert finding.where.file.endswith("test_missing_scaler.py")


@pytest.mark.parametrize(("autocast", "weights"), [(BRAIN, WIDE), (WIDE, BRAIN), (WIDE, WIDE)])
def test_other_formats_need_no_scaler(autocast, weights):
    assert judged(loop(autocast, weights)).verdict is Verdict.SKIP
    unused = judged(loop(autocast, weights, scaler="named"))
    assert unused.verdict is Verdict.INCOMPLETE
    assert "no step of 3 uses it" in unused.message


@pytest.mark.parametrize("scaler", ["named", "closure"])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.WARN), (1e-7, Verdict.FAIL)])
def test_a_scaler_that_no_step_uses_in_float16_is_found_with_the_calls_to_write(scaler, factor, verdict):
    finding = judged(loop(HALF, WIDE, scaler=scaler, factor=factor))
    assert finding.verdict is verdict, finding
    assert "is enabled, and no step of 3 uses it" in finding.message
    for call in ("scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()"):
        assert call in finding.hint


def test_a_constant_loss_scale_is_silent() -> None:
    """Masters in float32 take the gradients of a float16 model, divided by the scale again."""
    model = mlp().half()
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.01)
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).half()

    def step(number: int) -> float:
        loss = model(data).float().square().mean()
        (loss * 1024.0).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float() / 1024.0, None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        return loss.item()

    assert judged({"model": model, "optimizer": optimizer, "step": step}).verdict is Verdict.SKIP
