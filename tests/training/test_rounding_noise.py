"""Updates that are rounded at random with too few random bits are biased, and fail; other noise passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.core.run import Finding, Verdict

Rounding = Callable[[torch.Tensor], torch.Tensor]


def cut(bits: torch.Tensor, low: int = 16) -> torch.Tensor:
    return bits.bitwise_and(-(1 << low)).view(torch.float32)


def added(noise: int, low: int = 16) -> Rounding:
    """noise: how many random bits are added to those of the value before the `low` ones are cut off."""
    return lambda value: cut(torch.randint_like(value, 0, 1 << noise, dtype=torch.int32) + value.view(torch.int32), low)


def compared(noise: int) -> Rounding:
    """Rounds towards zero, and up where a random number is below what was cut off."""

    def rounded(value: torch.Tensor) -> torch.Tensor:
        bits = value.view(torch.int32)
        up = torch.randint_like(bits, 0, 1 << noise) < (bits & 0xFFFF)
        return cut(torch.where(up, bits + 0x10000, bits))

    return rounded


def centred(value: torch.Tensor) -> torch.Tensor:
    """To nearest, after a half of the spacing to either side."""
    noise = torch.randint_like(value, -0x8000, 0x8000, dtype=torch.int32)
    return cut(value.view(torch.int32) + noise + 0x8000)


def of_two_draws(value: torch.Tensor) -> torch.Tensor:
    low, high = (torch.randint_like(value, 0, 1 << 8, dtype=torch.int32) for _ in range(2))
    return cut(value.view(torch.int32) + low + (high << 8))


def coarse(value: torch.Tensor) -> torch.Tensor:
    """Eight random bits, in the upper half of those that are cut off."""
    noise = torch.randint_like(value, 0, 1 << 8, dtype=torch.int32) << 8
    return cut(noise.add_(value.view(torch.int32)))


def from_uniform_numbers(value: torch.Tensor) -> torch.Tensor:
    return cut(value.view(torch.int32) + (torch.rand_like(value) * 65536).to(torch.int32))


def to_nearest(value: torch.Tensor) -> torch.Tensor:
    bits = value.view(torch.int32)
    return cut(bits + 0x7FFF + ((bits >> 16) & 1))


class Rounded(torch.optim.SGD):
    def __init__(self, parameters: object, rounding: Rounding) -> None:
        super().__init__(parameters, lr=0.5)  # type: ignore[arg-type]
        self.rounding = rounding

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.rounding(parameter.float() - group["lr"] * parameter.grad.float()))


def found(rounding: Rounding, width: int = 16) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
    optimizer = Rounded(model.parameters(), rounding)
    data = torch.randn(8, width, dtype=torch.bfloat16)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = (model(data).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    loop = {"model": model, "optimizer": optimizer, "step": step}
    return ampcheck.audit(loop, steps=3, checks=["stagnation"]).of(Verdict.FAIL)


@pytest.mark.parametrize("rounding", [added(15), added(8), added(16, low=20), compared(15)])
def test_random_bits_that_do_not_cover_what_is_cut_off_fail(rounding: Rounding) -> None:
    (finding,) = found(rounding)
    assert "random bits that round a value must cover the" in finding.message
    assert "torch.randint" in finding.hint
    assert (finding.where.file or "").endswith("test_rounding_noise.py")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "rounding", [added(16), compared(16), centred, of_two_draws, coarse, from_uniform_numbers, to_nearest]
)
def test_random_bits_that_cover_it_and_other_rounding_pass(rounding: Rounding) -> None:
    assert not [finding for finding in found(rounding) if "random bits" in finding.message]


def test_few_draws_tell_nothing() -> None:
    assert not found(added(15), width=4)
