"""Promise: exponents that most blocks get wrong, since a logarithm rounds onto the next integer, are a finding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcheck.shadow import Shadow
from ampcheck.shadow.faults import DECISION

LOW = (torch.float16, torch.bfloat16)
FORMATS = pytest.mark.parametrize("low", LOW, ids=["float16", "bfloat16"])

POWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor, exp2": lambda amax: torch.exp2(torch.floor(torch.log2(amax)) - 2),
    "floor, pow": lambda amax: 2.0 ** (torch.floor(torch.log2(amax)).float() - 2),
    "ceil of the reciprocal": lambda amax: torch.exp2(torch.ceil(-torch.log2(amax))),
}


def ops_of(function: Callable[[], object]) -> list[str]:
    with Shadow() as shadow:
        function()
    assert all(fault.kind == DECISION for fault in shadow.faults)
    return [fault.where.op for fault in shadow.faults if fault.reaches]


def blocks(low: torch.dtype, largest: float, seed: int = 0) -> Tensor:
    """The largest of 32 numbers of each of 64 blocks, most of which are cut off at a limit."""
    x = 2 * largest * torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return x.clamp(-largest, largest).to(low).abs().amax(-1, keepdim=True)


def below_a_power(low: torch.dtype) -> float:
    """A number two steps below a power of two: its logarithm rounds to the integer."""
    return 256 * (1 - torch.finfo(low).eps)


@FORMATS
@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-14], ids=["whole", "small"])
def test_exponents_of_most_blocks_that_are_one_off_are_found(
    power: Callable[[Tensor], Tensor], low: torch.dtype, scale: float
) -> None:
    amax = blocks(low, below_a_power(low) * scale)
    assert ops_of(lambda: power(amax)) == [
        "aten::floor" if power is not POWERS["ceil of the reciprocal"] else "aten::ceil"
    ]
    assert not ops_of(lambda: power(amax.float()))


@FORMATS
@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["normal", "small"])
@pytest.mark.parametrize("seed", range(3))
def test_exponents_of_random_blocks_are_silent(
    power: Callable[[Tensor], Tensor], low: torch.dtype, scale: float, seed: int
) -> None:
    x = scale * torch.randn(256, 32, generator=torch.Generator().manual_seed(seed)).to(low)
    assert not ops_of(lambda: power(x.abs().amax(-1, keepdim=True)))


@FORMATS
def test_exponents_that_the_rounding_of_the_data_turns_are_silent(low: torch.dtype) -> None:
    """Here float32 data that a cast rounds up to the power itself, and sums that are a power but for rounding."""
    amax = torch.full((64, 1), 256 - torch.finfo(low).eps * 16)
    assert not ops_of(lambda: POWERS["floor, exp2"](amax.to(low)))
    parts = torch.rand(64, 32, generator=torch.Generator().manual_seed(0)).to(low)
    assert not ops_of(lambda: POWERS["floor, exp2"]((4 * parts / parts.sum(-1, keepdim=True)).sum(-1)))


@FORMATS
def test_coordinates_that_turn_are_silent_as_their_weights_make_up_for_it(low: torch.dtype) -> None:
    """An octave that is between two is a sum of both: all of the upper one, or all but nothing of it."""
    octave = torch.log2(blocks(low, below_a_power(low)))
    values = torch.linspace(-1, 1, 16).to(low)

    def sample() -> Tensor:
        lower = octave.floor()
        weight, index = octave - lower, lower.long()
        return values[index] * (1 - weight) + values[index + 1] * weight

    assert not ops_of(sample)
