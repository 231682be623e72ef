"""Promise: a second iterate in 16 bits that weights are computed from is judged as weights are, and a buffer in which
gradients are accumulated as a sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from narrow_loops import B16, data, net

from ampcheck.audit import audit
from ampcheck.core.run import Verdict

Tensors = list[torch.Tensor]
Update = Callable[[int, Tensors, Tensors, float], None]

LR = 0.05


def failed(update: Update, state: Callable[[Tensors], Tensors], lr: float = LR) -> list[str]:
    """The checks that fail of a loop with an update of parameters and further tensors by hand."""
    model = net()
    others = state(list(model.parameters()))
    x, y = data(B16)

    def step(i: int) -> float:
        model.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        with torch.no_grad():
            update(i, list(model.parameters()), others, lr)
        return loss.item()

    checks = ("reduce-precision", "stagnation")
    run = audit({"model": model, "step": step, "others": others}, checks=checks)
    return [finding.check for finding in run.findings if finding.verdict is Verdict.FAIL]


def copies(parameters: Tensors) -> Tensors:
    return [parameter.detach().clone() for parameter in parameters]


def zeros(parameters: Tensors) -> Tensors:
    return [torch.zeros_like(parameter) for parameter in parameters]


def flat_copy(parameters: Tensors) -> Tensors:
    return [torch.cat([parameter.detach().flatten() for parameter in parameters])]


def schedule_free(i: int, parameters: Tensors, others: Tensors, lr: float) -> None:
    part = 1 / (i + 1)
    for p, z in zip(parameters, others, strict=True):
        p.lerp_(z, part)
        p.add_(p.grad, alpha=lr * (0.9 * (1 - part) - 1))
        z.sub_(p.grad * lr)


def schedule_free_of_lists(i: int, parameters: Tensors, others: Tensors, lr: float) -> None:
    part, gradients = 1 / (i + 1), [p.grad for p in parameters]
    torch._foreach_lerp_(parameters, others, part)
    torch._foreach_add_(parameters, gradients, alpha=lr * (0.9 * (1 - part) - 1))
    torch._foreach_sub_(others, torch._foreach_mul(gradients, lr))


def primal_average(i: int, parameters: Tensors, others: Tensors, lr: float) -> None:
    for n, p in enumerate(parameters):
        others[n] = others[n] - p.grad * lr
        p.data = 0.5 * p.data + 0.5 * others[n]


def flat(i: int, parameters: Tensors, others: Tensors, lr: float) -> None:
    others[0].sub_(torch.cat([p.grad.flatten() for p in parameters]) * lr)
    for p, part in zip(parameters, others[0].split([p.numel() for p in parameters]), strict=True):
        p.copy_(part.view_as(p))


def accumulated(steps: int, sign: float, decay: float = 0.0) -> Update:
    """A sum of gradients, times `sign`, that is applied after so many steps; a decay of 1 takes as much as it adds."""

    def update(i: int, parameters: Tensors, others: Tensors, lr: float) -> None:
        for p, total in zip(parameters, others, strict=True):
            total.add_(p.grad, alpha=sign)
            if i % steps == steps - 1:
                p.mul_(1 - lr * decay / steps).add_(total, alpha=-sign * lr / steps)
                total.zero_()

    return update


ITERATES = pytest.mark.parametrize(
    ("update", "state"),
    [(schedule_free, copies), (schedule_free_of_lists, copies), (primal_average, copies), (flat, flat_copy)],
    ids=["schedule-free", "foreach", "a new tensor in each step", "flat"],
)


@ITERATES
def test_a_second_iterate_is_no_sum_of_gradients(update, state):
    assert not failed(update, state)


def test_a_second_iterate_that_stands_still_is_found_as_weights_are():
    assert set(failed(schedule_free, copies, 1e-6)) == {"stagnation"}


@pytest.mark.parametrize("steps", [18, 24])
@pytest.mark.parametrize(("sign", "decay"), [(1.0, 0.0), (-1.0, 0.0), (-1.0, 1.0)], ids=["sum", "updates", "decay"])
def test_a_sum_of_gradients_is_found_however_it_is_applied(steps, sign, decay):
    assert "reduce-precision" in failed(accumulated(steps, sign, decay), zeros)
