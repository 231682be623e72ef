"""What keeping modules in float32 costs: the step with and without, timed in turns."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ampcheck.core.subject import Subject
from ampcheck.numerics.compiled import dynamo_warnings_suppressed
from ampcheck.numerics.run import total_loss
from ampcheck.torchtools.copying import forward_through, prepare
from ampcheck.torchtools.seeds import seeded

PAIRS = 21
SHORTEST = 0.005
"""Seconds that one measurement takes at least; shorter steps are repeated within it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Ratios of step times, with the change over without, one for each pair that was measured in turns.

    plain: median seconds of the step without the change.
    """

    plain: float
    ratios: tuple[float, ...]
    step: str

    @property
    def median(self) -> float:
        """Of the ratios."""
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true median lies in at least 95 of 100 such measurements, by order statistics (the sign test)."""
        ordered, n, rank, below = sorted(self.ratios), len(self.ratios), 0, 0.0
        while rank < n // 2 and (below := below + math.comb(n, rank) / 2**n) <= 0.025:
            rank += 1
        rank = max(rank - 1, 0)
        return ordered[rank], ordered[n - 1 - rank]

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 1."""
        low, high = self.interval
        return not low <= 1 <= high

    def __str__(self) -> str:
        low, high = self.interval
        plain = f"the time of a plain {self.step} of {self.plain * 1e3:.3g} ms"
        if not self.decided:
            return f"undecided, {low:.2f} to {high:.2f}x {plain} (95 % confidence)"
        return f"{self.median:.2f}x {plain} (95 % confidence {low:.2f} to {high:.2f})"


def measure_cost(
    plain: Subject, changed: Subject, dtype: torch.dtype | None, *, device: str = "cpu", compile: bool = False
) -> Cost:
    """Time forward, loss and backward of two versions of a subject, in turns and in changing order.

    dtype: what autocast casts to, None for none. compile: under torch.compile; the first runs are not timed.
    """
    steps = [_step(subject, dtype, device, compile) for subject in (plain, changed)]
    with seeded(device), warnings.catch_warnings(), dynamo_warnings_suppressed():
        warnings.simplefilter("ignore")  # shown when the subject was judged
        for step in (*steps, *steps):
            step()
        repeats = max(1, math.ceil(SHORTEST / max(_seconds(steps[0], 1, device), 1e-9)))
        times = []
        for pair in range(PAIRS):
            first = pair % 2
            taken = {turn: _seconds(steps[turn], repeats, device) for turn in (first, 1 - first)}
            times.append((taken[0], taken[1]))
    return Cost(
        median(a for a, _ in times), tuple(b / a for a, b in times), "compiled step" if compile else "eager step"
    )


def _seconds(step: Callable[[], None], repeats: int, device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: str) -> None:
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def _step(subject: Subject, dtype: torch.dtype | None, device: str, compile: bool) -> Callable[[], None]:
    prepared = prepare(subject, device=device)
    blocks = [torch.compile(block) if compile else block for block in prepared.blocks]
    weights = list(prepared.root.parameters()) if prepared.root is not None else []

    def step() -> None:
        for call in prepared.calls:
            with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
                total = total_loss(forward_through(blocks, call), subject.loss, False)
            if total is not None and total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
        for weight in weights:
            weight.grad = None

    return step
