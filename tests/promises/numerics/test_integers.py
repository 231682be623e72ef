"""Positions, ids and counters stay different: a format that makes two of them equal fails, wherever they came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck import Run, Subject, Verdict, audit


class Model(nn.Module):
    """Adds a column of what the case makes of `n` positions to a linear layer's output, far too small to matter."""

    def __init__(self, positions: Callable[[Any, int], Tensor], n: int) -> None:
        super().__init__()
        self.layer, self.positions, self.n = nn.Linear(8, 8), positions, n

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.positions(y, self.n) * 0.0


def judged(positions: Callable[[Any, int], Tensor], n: int, dtype: str = "bfloat16") -> Run:
    torch.manual_seed(0)
    return audit((Model(positions, n), torch.randn(2, 8)), compile=False, dtype=dtype, autocast=True)


def found(run: Run, verdict: Verdict) -> list[str]:
    return [f.where.op for f in run.of(verdict) if f.check == "integer-cast"]


MADE: dict[str, tuple[str, Callable[[Any, int], Tensor]]] = {
    "a range in the format": ("aten::arange", lambda y, n: torch.arange(n, dtype=y.dtype)),
    "a cast of positions": ("aten::_to_copy", lambda y, n: torch.arange(n).to(y.dtype)),
    "a cast of ids by way of float32": ("aten::_to_copy", lambda y, n: torch.arange(n).float().to(y.dtype)),
    "float positions that autocast casts": (
        "aten::_to_copy",
        lambda y, n: nn.functional.linear(torch.arange(n).float()[:, None], torch.ones(1, 1)),
    ),
    "a sum of ones, position by position": ("aten::cumsum", lambda y, n: torch.ones(n, dtype=y.dtype).cumsum(0)),
    "a counter copied into a buffer": (
        "aten::copy_",
        lambda y, n: torch.zeros(n, dtype=y.dtype).copy_(torch.arange(n)),
    ),
    "an offset added in the format": (
        "aten::add.Tensor",
        lambda y, n: torch.arange(16).to(y.dtype) + (n if y.dtype.itemsize == 2 else 0),
    ),
    "pixels numbered row by row in the format": (
        "aten::add.Tensor",
        lambda y, n: torch.arange(16).to(y.dtype)[:, None] * 100 + torch.arange(100).to(y.dtype),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_integers_that_become_equal_fail_even_where_no_output_suffers(name: str) -> None:
    op, positions = MADE[name]
    run = judged(positions, 1024)
    assert op in found(run, Verdict.FAIL), [f.message for f in run.findings if f.check == "integer-cast"]


@pytest.mark.parametrize("name", MADE)
def test_the_same_in_float32_is_silent(name: str) -> None:
    def positions(y: Tensor, n: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return MADE[name][1](y.float(), n)

    run = judged(positions, 1024)
    assert found(run, Verdict.FAIL) == found(run, Verdict.WARN) == []


@pytest.mark.parametrize(
    "positions",
    [
        lambda y, n: torch.arange(200).to(y.dtype),
        lambda y, n: (1 - torch.arange(n).remainder(2).to(y.dtype)) * torch.finfo(y.dtype).min,
        lambda y, n: torch.full((n,), 300).to(y.dtype) * -1e9,
        lambda y, n: torch.arange(n).to(torch.float32).div(n).to(y.dtype),
        lambda y, n: torch.randn(n).mul(1000).to(y.dtype),
        lambda y, n: torch.randint(0, 2, (n,)).to(y.dtype).mean(0),
        lambda y, n: torch.randn(n).mul(1000).round().to(y.dtype),
    ],
    ids=["few", "mask", "one value", "fractions", "floats", "labels", "whole floats of no integer tensor"],
)
def test_what_holds_no_two_integers_that_collide_does_not_fail(positions: Any) -> None:
    assert found(judged(positions, 1024), Verdict.FAIL) == []


def test_a_collision_that_nothing_comes_of_is_a_warning() -> None:
    def dropped(y: Tensor, n: int) -> Tensor:
        torch.arange(n, dtype=y.dtype)
        return y.sum()

    run = judged(dropped, 1024)
    assert (found(run, Verdict.FAIL), found(run, Verdict.WARN)) == ([], ["aten::arange"])


@pytest.mark.parametrize("way", ["index", "number", "buffer", "mask"])
def test_a_collision_is_followed_to_whatever_comes_of_it(way: str) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(1024))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            positions = torch.arange(1024, dtype=y.dtype)
            if way == "index":
                return y + torch.zeros(2000)[positions.long()][:8]
            if way == "number":
                return y + positions[3].item() * 0
            if way == "mask":
                return y.where(positions[:8] > 4, y)
            self.seen.copy_(positions)
            return y

    run = audit((Keeps(), torch.randn(2, 8)), compile=False, dtype="bfloat16", autocast=True)
    assert "aten::arange" in found(run, Verdict.FAIL)


def test_seconds_that_float32_cannot_tell_apart_fail_too() -> None:
    def seconds(y: Tensor, n: int) -> Tensor:
        return torch.arange(1_700_000_000, 1_700_000_000 + n).float()

    assert found(judged(seconds, 64), Verdict.FAIL) == ["aten::_to_copy"]


def test_integers_written_in_place_selected_or_kept_in_a_part_collide_as_well() -> None:
    def in_place(y: Tensor, n: int) -> Tensor:
        return torch.arange(250).to(y.dtype).add_(1000 if y.dtype.itemsize == 2 else 0)

    def copied(y: Tensor, n: int) -> Tensor:
        return torch.zeros(n, dtype=y.dtype).copy_(torch.arange(n).float())

    def selected(y: Tensor, n: int) -> Tensor:
        positions = torch.where(torch.arange(n) > 3, torch.arange(n).float(), 0.0).clamp(max=2000.0)
        return positions.to(y.dtype)

    def kept_in_a_part(y: Tensor, n: int) -> Tensor:
        rows = torch.zeros(2, n, dtype=y.dtype)
        rows[0] = torch.arange(n).to(y.dtype)
        return rows

    for positions in (in_place, copied, selected, kept_in_a_part):
        assert found(judged(positions, 1024), Verdict.FAIL), positions.__name__


def test_samples_handed_in_as_integers_are_rounded_like_any_data_and_ids_that_the_model_casts_are_not() -> None:
    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(1, 4, 3)

        def forward(self, image: Tensor) -> Tensor:
            return self.layer(image.float() / 4)

    image = torch.randint(0, 1024, (1, 1, 16, 16))
    run = audit((Convolves(), image), compile=False, dtype="bfloat16")
    assert found(run, Verdict.FAIL) == found(run, Verdict.WARN) == []

    class UsesIds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            y = self.layer(x)
            return y + ids.to(y.dtype)[:, None].sin()

    ids = torch.arange(1000, 1004)
    assert found(audit((UsesIds(), (torch.randn(4, 8), ids)), compile=False, dtype="bfloat16"), Verdict.FAIL)


def test_a_collision_in_the_loss_counts() -> None:
    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        positions = torch.arange(1024).to(output[0].dtype)
        return (output[0].mean() - positions.sin().mean()).square()

    torch.manual_seed(0)
    subject = Subject((Model(lambda y, n: y.sum(), 4), torch.randn(2, 8)), loss=loss)
    assert found(audit(subject, compile=False, dtype="bfloat16", autocast=True), Verdict.FAIL)
