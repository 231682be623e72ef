"""The training loop of the lab: the demo in one precision, eager or compiled, from fixed weights and data."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampcheck.core.environment import quiet
from ampcheck.core.run import Where
from ampcheck.demo import CharTransformer, corpus
from ampcheck.records.faults import OVERFLOW
from ampcheck.shadow import Shadow
from ampcheck.training.loop import first_nonfinite

BATCH, LENGTH = 8, 64
TOKENS = BATCH * LENGTH
EPS, BETAS = 1e-8, (0.9, 0.999)
"""AdamW's own, repeated here since `EPS` is zero in float16."""

HELD_OUT = 0.15
"""The part of the corpus, at its end, that no run learns from."""

VALIDATE_EVERY = 10


@dataclass(frozen=True, slots=True)
class Mode:
    """A precision to train in. autocast: its dtype; cast: that of the whole model; scaled: whether a GradScaler scales
    the loss."""

    name: str
    autocast: torch.dtype | None = None
    cast: torch.dtype | None = None
    scaled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that it computes in."""
        return self.autocast or self.cast or torch.float32


FLOAT32 = Mode("float32")
NAIVE = Mode("naive float16", cast=torch.float16)
AMP_FLOAT16 = Mode("autocast float16", autocast=torch.float16, scaled=True)
AMP_BFLOAT16 = Mode("autocast bfloat16", autocast=torch.bfloat16)
MODES = (FLOAT32, NAIVE, AMP_FLOAT16, AMP_BFLOAT16)


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. norm: of the unscaled gradients, float64, NaN where one of them is not finite. scale: the loss scale of
    the step. skipped: whether the scaler skipped the update."""

    loss: float
    norm: float
    scale: float
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first op of a step that produced infinities or NaNs from finite numbers. elements: how many."""

    where: Where
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One precision, eager or compiled.

    validation: (step, loss on held-out text). first: seconds of the first step. stopped: the step that left a loss or a
    weight infinite or NaN, with the `culprit`, found in eager mode. peak: bytes of a step.
    """

    mode: Mode
    compiled: bool
    steps: tuple[StepStats, ...]
    validation: tuple[tuple[int, float], ...]
    first: float
    stopped: int | None = None
    culprit: Culprit | None = None
    peak: int | None = None

    @property
    def name(self) -> str:
        """Such as `float32, compiled`."""
        return f"{self.mode.name}, compiled" if self.compiled else self.mode.name


def windows(size: int, length: int, *, seed: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Characters and their successors, each int64 [size, length], from the training part or the held-out part."""
    text = corpus()
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    split = int(len(text) * (1 - HELD_OUT))
    part = torch.tensor([codes[character] for character in (text[split:] if held_out else text[:split])])
    starts = torch.randint(len(part) - length, (size,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([part[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


class Loop:
    """AdamW on the demo. seed: of weights and data. growth: good steps after which the scaler doubles its scale."""

    def __init__(
        self,
        mode: Mode = FLOAT32,
        *,
        device: str = "cpu",
        compiled: bool = False,
        seed: int = 0,
        growth: int = 2000,
        layers: int = 2,
        width: int = 128,
    ) -> None:
        self.mode, self.compiled, self._device, self._seed = mode, compiled, device, seed
        self._kind = torch.device(device).type
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CharTransformer(layers=layers, width=width)
        self.model = model.to(device, mode.cast or torch.float32)
        # Without foreach each tensor has an op of its own, which a finding can name.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=BETAS, eps=EPS, foreach=False)
        self.scaler = torch.amp.GradScaler(self._kind, enabled=mode.scaled, growth_interval=growth)
        self._parts: tuple[Any, ...] = (self.model, self.optimizer, self.scaler)
        self._run: Callable[..., Any] = torch.compile(self.model) if compiled else self.model

    def _loss(self, run: Callable[..., Any], data: tuple[Tensor, Tensor]) -> Tensor:
        characters, targets = (part.to(self._device) for part in data)
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.mode.autocast:
            autocast = torch.autocast(self._kind, self.mode.autocast)
        with autocast:
            loss: Tensor = run(characters, targets)[1]
        return loss

    def forward(self, number: int, run: Callable[..., Any] | None = None) -> Tensor:
        """The loss of the batch of this number, 0-d."""
        return self._loss(run or self._run, windows(BATCH, LENGTH, seed=1000 * self._seed + number))

    def train(self, number: int, before_update: Callable[[], object] = lambda: None) -> Tensor:
        """One step; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.forward(number)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        before_update()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def step(self, number: int) -> StepStats:
        """The same step, measured."""
        scale = float(self.scaler.get_scale())
        norm = math.nan

        def measure() -> None:
            nonlocal norm
            self.scaler.unscale_(self.optimizer)
            squares = [p.grad.cpu().double().square().sum() for p in self.model.parameters() if p.grad is not None]
            norm = float(torch.stack(squares).sum().sqrt())

        loss = self.train(number, measure).item()
        skipped = float(self.scaler.get_scale()) < scale
        return StepStats(loss, norm if math.isfinite(norm) else math.nan, scale, skipped)

    @torch.no_grad()
    def validate(self, batches: int = 2) -> float:
        """The mean loss on fixed held-out text, always in eager mode."""
        data = (windows(16, LENGTH, seed=number, held_out=True) for number in range(batches))
        return sum(float(self._loss(self.model, batch)) for batch in data) / batches

    def state(self) -> list[dict[str, Any]]:
        """A copy of all that a step changes."""
        return copy.deepcopy([part.state_dict() for part in self._parts])

    def culprit(self, state: list[dict[str, Any]], number: int) -> Culprit | None:
        """Restore `state`, repeat step `number` in eager mode and return the first op that produced inf or NaN."""
        for part, saved in zip(self._parts, state, strict=True):
            part.load_state_dict(saved)
        self.optimizer.zero_grad()
        for update in (False, True):
            shadow = Shadow(None if update else self.model)
            with quiet(), shadow:
                if update:
                    self.scaler.step(self.optimizer)
                else:
                    self.scaler.scale(self.forward(number, self.model)).backward()  # type: ignore[no-untyped-call]
            made = (Culprit(f.where, f.dtype, f.elements) for f in shadow.faults if f.kind == OVERFLOW)
            left = (
                Culprit(place, str(parameter.dtype).removeprefix("torch."), int((~parameter.isfinite()).sum()))
                for parameter in self.model.parameters()
                if (place := first_nonfinite(shadow, (parameter,))) is not None
            )
            if (culprit := next(chain(made, left), None)) is not None:
                # In the update no module runs, and the source line is the lab's own.
                return replace(culprit, where=Where("update", op=culprit.where.op)) if update else culprit
        return None


def train(loop: Loop, steps: int) -> TrainingRun:
    """Run a loop for so many steps, or up to the first that leaves a loss or a weight infinite or NaN."""
    stats: list[StepStats] = []
    validation = [(0, loop.validate())]
    first, stopped, culprit = 0.0, None, None
    for number in range(steps):
        before = loop.state()
        begin = time.perf_counter()
        stats.append(loop.step(number))
        first = first or time.perf_counter() - begin
        finite = all(bool(parameter.isfinite().all()) for parameter in loop.model.parameters())
        if not math.isfinite(stats[-1].loss) or not finite:
            stopped, culprit = number, loop.culprit(before, number)
            break
        if (number + 1) % VALIDATE_EVERY == 0 or number + 1 == steps:
            validation.append((number + 1, loop.validate()))
    return TrainingRun(loop.mode, loop.compiled, tuple(stats), tuple(validation), first, stopped, culprit)
