"""What is promised of integers that wrap around: they are reported where floating values are made of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import ampcheck
from ampcheck import Verdict

BYTES = torch.tensor([200, 100, 7], dtype=torch.uint8)
SIGNED = torch.tensor([[100, -100], [90, 80]], dtype=torch.int8)
WORDS = torch.tensor([32767, -5], dtype=torch.int16)
ONES = torch.ones(300, dtype=torch.uint8)


def added(values: torch.Tensor) -> torch.Tensor:
    values += 100
    return values


def overflows(function: Callable[[], object]) -> list[str]:
    """The messages of the failures of `overflow` while a function runs."""
    with ampcheck.watch(fail_on="never") as seen:
        kept = function()
    del kept
    return [finding.message for finding in seen.run.by("overflow") if finding.verdict is Verdict.FAIL]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: (BYTES + BYTES).float(), "1 of 3 elements of add"),
        (lambda: (BYTES - 150).float() / 255, "2 of 3 elements of sub"),
        (lambda: torch.rsub(BYTES, 150).clamp(0, 9) * 0.5, "uint8 holds 0 to 255, and int64 gives -50 to 143"),
        (lambda: (SIGNED @ SIGNED).float(), "int8 holds -128 to 127"),
        (lambda: ((WORDS + WORDS) // 2).float(), "int16 holds"),
        (lambda: ONES.sum(dtype=torch.uint8).item() / 300, "it reaches a number that leaves the run"),
        (lambda: torch.rand(300)[ONES.cumsum(0, dtype=torch.uint8).int()], "45 of 300 elements of cumsum"),
        (lambda: (BYTES * 3).long()[None].expand(2, 3) + 0.5, "1 of 3 elements of mul"),
        (lambda: (BYTES**2).float().mean(), "of pow"),
        (lambda: torch.tensor([-128, 5], dtype=torch.int8).abs().float(), "1 of 2 elements of abs"),
        (lambda: BYTES.clone().add_(BYTES).float(), "1 of 3 elements of add_"),
        (lambda: added(BYTES.clone()).float(), "of add_"),
        (lambda: torch.zeros(3).copy_(BYTES + BYTES), "1 of 3 elements of add"),
        (lambda: torch.arange(3.0)[(BYTES + BYTES).argmax()], "1 of 3 elements of add"),
    ],
)
def test_integers_that_wrap_fail_where_floating_values_are_made_of_them(
    function: Callable[[], object], text: str
) -> None:
    (message,) = overflows(function)
    assert text in message
    assert "wrap around" in message


@pytest.mark.parametrize(
    "function",
    [
        lambda: (BYTES.int() + BYTES).float(),
        lambda: ONES.sum().float(),
        lambda: BYTES + BYTES,  # nobody makes floating values of it
        lambda: (((BYTES & 15) ^ 8) - 8).to(torch.int8).float(),  # the sign of four bits
        lambda: (((BYTES << 4) | BYTES) >> 4).float(),  # packed
        lambda: ((BYTES * 31) ^ 5).float(),  # bits of a hash
        lambda: (BYTES + BYTES > 100).float(),
        lambda: (BYTES + BYTES)[1:].float(),
        lambda: torch.where(BYTES < 200, BYTES + BYTES, BYTES).float(),
        lambda: (BYTES + BYTES).zero_().float(),
        lambda: (BYTES + BYTES).copy_(BYTES).float(),
        lambda: torch.rand(16)[(torch.arange(5, dtype=torch.int32) * 1540483477) % 16],  # as with 64 bits
        lambda: torch.arange(9.0)[(BYTES + BYTES).argmin()],
        lambda: torch.zeros(2).copy_((BYTES + BYTES)[1:]),
    ],
)
def test_what_holds_and_what_is_bits_passes(function: Callable[[], object]) -> None:
    assert not overflows(function)


def program(seed: int, *, wide: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What random ops make of integers, and floating values of these; `wide`, with 64 bits throughout."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    formats = (torch.int8, torch.uint8, torch.int32)
    held = [torch.randint(0, 127, (5, 4), generator=generator).to(form) for form in formats]
    held = [values.long() if wide else values for values in held]
    ops: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda a: a + a,
        lambda a: a * 3,
        lambda a: a.long(),
        lambda a: a.clone().add_(a),
        lambda a: a[1:].sum(0, dtype=a.dtype).expand(5, 4),
        lambda a: a.clone().index_fill_(0, torch.tensor([2]), 7),
        lambda a: scaled(a.clone()),
        lambda a: a.abs(),
        lambda a: -a,
        lambda a: a.T.contiguous().T,
        lambda a: a**2,
        lambda a: a % 8,
        lambda a: torch.where(a > 3, a, a - a),
        lambda a: a.gather(1, a.argsort(1)),
    ]
    integers, values = [], []
    for _ in range(8):
        made = draw.choice(ops)(held[draw.randrange(3)])
        integers.append(made.clone())
        values.append(made[1:].float() * 0.5)
        held[draw.randrange(3)] = made
    return integers, values


def scaled(values: torch.Tensor) -> torch.Tensor:
    values[1:].mul_(2)
    return values


@pytest.mark.parametrize("seed", range(60))
def test_they_fail_where_64_bits_give_other_floating_values_and_nothing_is_changed(seed: int) -> None:
    plain, (_, exact) = program(seed, wide=False), program(seed, wide=True)
    with ampcheck.watch(fail_on="never") as seen:
        watched = program(seed, wide=False)
    for before, after in zip(plain, watched, strict=True):
        assert all(map(torch.equal, before, after))
    differs = not all(map(torch.equal, exact, watched[1]))
    assert bool([f for f in seen.run.by("overflow") if f.verdict is Verdict.FAIL]) is differs


def into(target: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[], list[object]]:
    """A run that writes integers that wrapped around into other memory, and then draws a random number."""

    def run() -> list[object]:
        torch.manual_seed(0)
        kept = target.clone()
        write(kept, BYTES + BYTES)
        return [*kept.tolist(), torch.rand(1).item()]

    return run


@pytest.mark.parametrize(
    "run",
    [
        into(torch.zeros(3, dtype=torch.int64), lambda kept, wrapped: kept.add_(wrapped)),
        into(torch.zeros(3, dtype=torch.int64), lambda kept, wrapped: kept.copy_(wrapped)),
        into(torch.zeros(3, dtype=torch.int64), lambda kept, wrapped: torch.add(wrapped.int(), 1, out=kept)),
        into(torch.zeros(3, dtype=torch.bool), lambda kept, wrapped: torch.gt(wrapped, 190, out=kept)),
        into(torch.zeros(500, dtype=torch.int64), lambda kept, wrapped: kept.index_fill_(0, wrapped.long(), 5)),
        into(torch.zeros(500, dtype=torch.bool), lambda kept, wrapped: kept.__setitem__(wrapped.long(), True)),
        into(torch.arange(500), lambda kept, wrapped: kept.index_add_(0, wrapped.long(), torch.arange(3))),
        into(torch.zeros(3), lambda kept, wrapped: torch.rand_like(wrapped, dtype=torch.float32)),
        into(torch.zeros(3), lambda kept, wrapped: wrapped.random_(0, 10)),
        into(torch.zeros(4, dtype=torch.uint8), lambda kept, wrapped: kept[1:].add_(kept[0]).add_(wrapped)),
        into(torch.zeros(3), lambda kept, wrapped: torch._foreach_add([wrapped], [wrapped])),
        into(torch.zeros(3), lambda kept, wrapped: torch.zeros(5, dtype=torch.int8, device="meta") + 1),
        into(torch.zeros(3), lambda kept, wrapped: wrapped.to_sparse() + wrapped.to_sparse()),
        into(torch.zeros(12), lambda kept, wrapped: kept.copy_((wrapped.short() * 300).view(torch.uint8).repeat(2))),
    ],
)
def test_the_run_and_its_random_numbers_are_those_without_a_watch(run: Callable[[], list[object]]) -> None:
    plain = run()
    with ampcheck.watch(fail_on="never"):
        watched = run()
    assert watched == plain
