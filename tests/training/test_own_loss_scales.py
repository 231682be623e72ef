"""Loss scales that code has of its own: a skipped step is no overflow, one that is made with infinities is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck.audit import audit
from ampcheck.core.run import Run, Verdict

Test = Callable[[Sequence[Tensor]], bool]

TESTS: dict[str, Test] = {
    "isfinite of each": lambda grads: all(bool(grad.isfinite().all()) for grad in grads),
    "isfinite of the norm": lambda grads: bool(torch.isfinite(torch.stack([g.norm() for g in grads]).norm())),
    "a number": lambda grads: math.isfinite(sum(float(grad.float().sum()) for grad in grads)),
    "isinf or isnan": lambda grads: not any(bool((g.isinf() | g.isnan()).any()) for g in grads),
    "compares": lambda grads: all(bool((g.abs() != torch.inf).all() and (g == g).all()) for g in grads),
}


def _train(test: Test, *, unscale_first: bool = False, skips: bool = True, backs_off: bool = True) -> Run:
    """Audit a loop with a dynamic loss scale by hand; the first scales overflow on the way to the weights."""

    def loop() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        x = torch.randn(64, 8)
        with torch.no_grad():
            model[2].weight.mul_(30)
        optimizer, scale = torch.optim.SGD(model.parameters(), lr=1e-4), 2.0**16
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x).float(), x.roll(1, 1)) * 4
            (loss * scale).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if unscale_first:
                for grad in grads:
                    grad.div_(scale)
            if skips and not test(grads):
                scale /= 16 if backs_off else 1
                continue
            if not unscale_first:
                for grad in grads:
                    grad.div_(scale)
            optimizer.step()

    return audit(loop)


@pytest.mark.every(16)
@pytest.mark.parametrize("unscale_first", [False, True], ids=["test then unscale", "unscale then test"])
@pytest.mark.parametrize("name", TESTS)
def test_steps_that_code_skips_for_a_lower_scale_are_no_defect(name: str, unscale_first: bool) -> None:
    run = _train(TESTS[name], unscale_first=unscale_first)
    assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]


@pytest.mark.slow
def test_a_step_that_is_made_with_infinities_fails() -> None:
    assert any(f.check == "overflow" for f in _train(TESTS["a number"], skips=False).of(Verdict.FAIL))


@pytest.mark.slow
def test_a_scale_that_never_falls_makes_no_step_and_fails() -> None:
    assert any(f.check == "overflow" for f in _train(TESTS["a number"], backs_off=False).of(Verdict.FAIL))
