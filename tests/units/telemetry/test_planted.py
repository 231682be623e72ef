"""What goes wrong at a known place, in forward or in backward, is found at that place: module, line, op and format."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from telemetry_models import batch, in_phase, seen_in
from torch import nn

from ampcheck.records.telemetry import SiteStats, TelemetryStats

HALF = torch.float16
VALUES = {"overflowed": 1e5, "flushed": 1e-9, "subnormals": 1e-6, "nans": math.nan, "infs": math.inf}


class Planted(torch.autograd.Function):
    """Casts to 16 bits; forward plants one value before its cast, backward another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: torch.Tensor, backward: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(backward)
        return (x + forward).to(HALF)  # planted: forward

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (backward,) = ctx.saved_tensors
        return (grads[0].float() + backward).to(HALF).float(), None, None  # planted: backward


class Inner(nn.Module):
    def forward(self, x: torch.Tensor, forward: torch.Tensor, backward: torch.Tensor) -> torch.Tensor:
        return Planted.apply(x, forward, backward)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = Inner()

    def forward(self, x: torch.Tensor, forward: torch.Tensor, backward: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale, forward, backward)


def line_of(mark: str) -> int:
    with open(__file__, encoding="utf-8") as source:
        return next(number for number, line in enumerate(source, 1) if line.rstrip().endswith(f"# {mark}"))


@pytest.fixture(scope="module")
def planted() -> dict[tuple[str, str], TelemetryStats]:
    """One compiled model, fed with each value in each phase; the rest of the values is 1."""
    model = Outer()
    compiled = torch.compile(model)
    found = {}
    for phase in ("forward", "backward"):
        for count, value in VALUES.items():

            def run(phase: str = phase, value: float = value) -> None:
                plant = torch.tensor([value - 1 if math.isfinite(value) and value > 1 else value, 1.0, 1.0, 1.0])
                none = torch.ones(4)
                base = torch.zeros(4)
                given = (plant, none) if phase == "forward" else (none, plant)
                compiled(base, *given).backward(torch.zeros(4, dtype=HALF))

            found[phase, count] = seen_in(run, model)
    return found


def wrong(stats: TelemetryStats) -> dict[str, list[SiteStats]]:
    return {name: [site for site in stats.sites if getattr(site, name)] for name in VALUES}


@pytest.mark.parametrize("count", VALUES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_planted_value_is_counted_at_its_cast_and_nowhere_before_it(
    planted: dict[tuple[str, str], TelemetryStats], phase: str, count: str
) -> None:
    found = wrong(planted[phase, count])

    site = found[count][0]
    assert (site.where.phase, site.where.module) == (phase, "inner")
    assert (site.where.op, site.format, site.cast) == ("aten::_to_copy", "float16", True)
    assert site.where.file.endswith("test_planted.py")
    assert site.where.line == line_of(f"planted: {phase}")
    assert getattr(site, count) == 1
    assert not any(found[other] for other in VALUES if other != count)
    assert len(found[count]) == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_loss_scale_that_is_too_large_overflows_where_the_gradient_leaves_float16() -> None:
    model = Scaled()
    with torch.no_grad():
        model.second.weight.fill_(1.0)
        model.first.weight.fill_(1.0)
    compiled = torch.compile(model)

    def run() -> None:
        with torch.autocast("cpu", HALF):
            out = compiled(batch(8, 4).abs())
        out.backward(torch.full_like(out, 30000.0))  # finite; four of them add up to more than float16 holds

    stats = seen_in(run, model)

    assert not any(site.bad for site in in_phase(stats, "forward"))
    born = [site for site in in_phase(stats, "backward") if site.born]
    assert {site.where.module for site in born} == {"second"}
    assert all(site.infs for site in born)
    carried = [site for site in in_phase(stats, "backward") if site.bad and not site.born]
    assert {site.where.module for site in carried} == {"first"}
