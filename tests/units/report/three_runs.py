"""Three real runs that the page is looked at with: a healthy model, one that overflows, and a training loop."""

from __future__ import annotations

import torch
from torch import nn

from ampcheck import Run, audit, demo


class Attention(nn.Module):
    """Attention over unscaled scores: they come near the end of float16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = 60 * self.query(x), 60 * self.key(x)
        scores = query @ key.transpose(-1, -2)
        return self.out(torch.softmax(scores / 1000, -1) @ self.value(x))


class Ranker(nn.Module):
    """A model whose energy is a sum of squares that float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.attention = Attention(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.embed(x))
        hidden = hidden + self.attention(hidden)
        energy = (40 * hidden).square().sum(-1)
        return self.head(hidden), energy


def healthy() -> Run:
    return audit(demo.subject(), compile=False)


def overflowing() -> Run:
    torch.manual_seed(0)
    return audit((Ranker(), torch.randn(4, 16, 32)), compile=False, name="ranker")


def training() -> Run:
    """Gradients are clipped before they are unscaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    batches = [(torch.randn(16, 32), torch.randn(16, 1)) for _ in range(4)]

    def step(number: int) -> float:
        x, y = batches[number % len(batches)]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = 1e-4 * (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return float(loss)

    subject = {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
    return audit(subject, compile=False, name="training loop")


RUNS = {"healthy": healthy, "overflowing": overflowing, "training": training}
