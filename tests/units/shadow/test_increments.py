"""Promise: code that asks what a sum has taken up of an update (Kahan, two-sum) is no fault, and hides none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck import Verdict, audit
from ampcheck.shadow import Shadow

FORMATS = (torch.bfloat16, torch.float16)
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def in_place(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    rest.add_(update)
    old = value.detach().clone()
    value.add_(rest)
    rest.add_(old.sub_(value))


def by_the_update(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    step, old = update + rest, value.clone()
    value.add_(step)
    rest.copy_(step - (value - old))


def out_of_place(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    step = rest + update
    new = value + step
    rest.copy_(step - (new - value))
    value.copy_(new)


def subtracted(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    step = -update - rest
    new = value - step
    rest.copy_((value - new) - step)
    value.copy_(new)


def of_lists(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    torch._foreach_add_([rest], [update])
    old = [torch.empty_like(value)]
    torch._foreach_copy_(old, [value])
    torch._foreach_add_([value], [rest])
    torch._foreach_sub_(old, [value])
    torch._foreach_add_([rest], old)


def of_two_sums(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    step = rest + update
    new = value + step
    taken = new - value
    rest.copy_((value - (new - taken)) + (step - taken))
    value.copy_(new)


def in_float32(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    rest.add_(update)
    old = value.float()
    value.copy_(old + rest.float())
    rest.copy_(rest.float() - (value.float() - old))


def of_the_sums(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    step = update.float() + rest.float()
    new = (value.float() + step).to(value.dtype)
    rest.copy_(step - (new.float() - value.float()))
    value.copy_(new)


def of_the_larger(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:  # Neumaier
    step = update + rest
    new = value + step
    rest.copy_(torch.where(value.abs() >= step.abs(), (value - new) + step, (step - new) + value))
    value.copy_(new)


def by_the_old_less_the_new(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    old = value.float()
    step = update.float() + rest.float()
    value.add_(step)
    rest.copy_(old.sub_(value.float()).add_(step))


def of_data(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    in_place(value.data, update, rest)


FORMS = (
    in_place, by_the_update, out_of_place, subtracted, of_lists, of_two_sums, in_float32, of_the_sums, of_the_larger,
    by_the_old_less_the_new, of_data,
)  # fmt: skip


def summed(
    form: Form, dtype: torch.dtype, size: float, steps: int = 60, rest_dtype: torch.dtype | None = None
) -> tuple[Shadow, torch.Tensor, torch.Tensor]:
    """A shadow of a sum of updates of a size, where it and its rest are in use at the end; the sum, and the exact one.

    rest_dtype: of the rest, by default that of the sum.
    """
    generator = torch.Generator().manual_seed(0)
    value = (torch.rand(64, 8, generator=generator) + 1).to(dtype)
    rest = torch.zeros(64, 8, dtype=rest_dtype or dtype)
    updates = [(size * (torch.rand(64, 8, generator=generator) + 0.5)).to(dtype) for _ in range(steps)]
    true = value.double() + sum(update.double() for update in updates)
    with Shadow() as shadow:
        for update in updates:
            form(value, update, rest)
        shadow.reach({"sum": value, "rest": rest})
    torch.testing.assert_close(shadow.exact(value), true, rtol=1e-9, atol=0)
    return shadow, value, true


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("form", FORMS)
def test_a_compensated_sum_is_no_fault(form: Form, size: float, dtype: torch.dtype) -> None:
    shadow, value, true = summed(form, dtype, size)
    assert [fault for fault in shadow.faults if fault.reaches] == []
    assert float(((value - true) / true).abs().max()) < 1.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-2])
@pytest.mark.parametrize("form", [in_float32, of_the_sums, by_the_old_less_the_new])
def test_a_sum_whose_rest_is_in_float32_is_no_fault(form: Form, size: float, dtype: torch.dtype) -> None:
    shadow, value, true = summed(form, dtype, size, rest_dtype=torch.float32)
    assert [fault for fault in shadow.faults if fault.reaches] == []
    assert float(((value - true) / true).abs().max()) < 1.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_compensated_average_is_no_fault(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(64, 8, generator=generator) + 1).to(dtype)
    average, rest = weight.clone(), torch.zeros(64, 8, dtype=dtype)
    with Shadow() as shadow:
        for _ in range(60):
            weight = weight + 0.01 * torch.rand(64, 8, generator=generator).to(dtype)
            in_place(average, (weight - average) * 0.001, rest)
    assert [fault for fault in shadow.faults if fault.reaches] == []


def watched_only(value: torch.Tensor, update: torch.Tensor, rest: torch.Tensor) -> None:
    old = value.clone()
    value.add_(update)
    (value - old).norm().item()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_sum_that_nothing_compensates_drifts_though_code_looks_at_what_it_takes_up(dtype: torch.dtype) -> None:
    shadow, value, true = summed(watched_only, dtype, torch.finfo(dtype).eps / 4, 300)
    assert float(((value - true) / true).abs().min()) > 16 * torch.finfo(dtype).eps
    assert "drift" in {fault.kind for fault in shadow.faults}


class Taken(nn.Module):
    """Adds a small term to its data, and returns what they took up of it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + 1e-3 * y) - x


def test_what_a_sum_takes_up_of_a_term_is_lost_where_it_is_the_result() -> None:
    x = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) + 1
    run = audit((Taken().bfloat16(), (x.bfloat16(), x.bfloat16())), compile=False)
    assert {"precision-loss", "silent-zero"} & {f.check for f in run.of(Verdict.FAIL)}


class Kahan(torch.optim.Optimizer):
    """SGD whose compensation is kept, or overwritten in each step."""

    def __init__(self, parameters: list[nn.Parameter], *, keeps: bool) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.keeps = keeps

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            rest = self.state[parameter].setdefault("rest", torch.zeros_like(parameter))
            if not self.keeps:
                rest.zero_()
            in_place(parameter, -1e-3 * parameter.grad, rest)


def loop(*, keeps: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    nn.init.uniform_(model.weight, 1.0, 1.9)
    model.bfloat16()  # what rounding loses here no compensation holds
    optimizer, x = Kahan([model.weight], keeps=keeps), torch.randn(64, 16).bfloat16()

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}


def failures(*, keeps: bool, by_parts: bool) -> set[str]:
    def main() -> None:
        step = loop(keeps=keeps)["step"]
        for number in range(24):
            step(number)

    return {f.check for f in audit(loop(keeps=keeps) if by_parts else main).of(Verdict.FAIL)}


@pytest.mark.parametrize("by_parts", [False, True])
def test_a_loop_that_compensates_passes(by_parts: bool) -> None:
    assert not failures(keeps=True, by_parts=by_parts)


@pytest.mark.parametrize("by_parts", [False, True])
def test_a_loop_that_overwrites_its_compensation_stagnates(by_parts: bool) -> None:
    assert failures(keeps=False, by_parts=by_parts) == {"stagnation"}
