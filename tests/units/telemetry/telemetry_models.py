"""Small models whose compiled graphs are looked into, and one training step of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ampcheck.records.telemetry import SiteStats, TelemetryStats
from ampcheck.telemetry.sites import Level
from ampcheck.telemetry.telemetry import Telemetry


class Block(nn.Module):
    """One residual feed-forward block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks of one kind, one behind the other."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step(model: Callable[..., Any], *inputs: Any, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Any:
    """Forward under autocast and backward outside of it; the loss."""
    with torch.autocast("cpu", dtype):
        out = model(*inputs)
    loss = (out[0] if isinstance(out, tuple) else out).float().square().mean() * scale
    loss.backward()
    return loss.detach()


def batch(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen_in(run: Callable[[], object], *roots: nn.Module, level: Level = Level.CASTS, every: int = 1) -> TelemetryStats:
    """What is seen inside the graphs that are compiled and run by `run`."""
    torch.compiler.reset()
    telemetry = Telemetry(roots, level=level, every=every)
    with telemetry.watching():
        run()
    return telemetry.read()


def in_phase(stats: TelemetryStats, phase: str) -> list[SiteStats]:
    return [site for site in stats.sites if site.where.phase == phase]


def modules(stats: TelemetryStats, phase: str) -> set[str]:
    """The modules whose values were seen in a phase."""
    return {site.where.module for site in in_phase(stats, phase)}
