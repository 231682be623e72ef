"""The training loop of the lab: the demo in one precision, eager or compiled, from fixed weights and data."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampcheck.core.run import Where
from ampcheck.demo import CharTransformer, corpus
from ampcheck.numerics.ops import OpWatch
from ampcheck.torchtools.trace import Trace

BATCH, LENGTH = 8, 64
EPS, BETAS = 1e-8, (0.9, 0.999)
"""AdamW's own, written down since one of them is zero in float16."""

HELD_OUT = 0.15
"""The part of the corpus, at its end, that no run learns from."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A precision to train in. autocast: what it casts to; cast: what the whole model is cast to; scaled: whether a
    GradScaler scales the loss."""

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
class StepSeen:
    """What one step showed. norm: of the unscaled gradients, float64, NaN where one of them is not finite. scale: the
    loss scale that the step used. skipped: whether the scaler left the update out."""

    loss: float
    norm: float
    scale: float
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first op of a step that made infinities or NaNs of finite numbers. elements: how many."""

    where: Where
    dtype: str
    elements: int


def windows(size: int, length: int, *, seed: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Characters and their successors, each int64 [size, length], from the part to learn from or the held-out one."""
    text = corpus()
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    split = int(len(text) * (1 - HELD_OUT))
    part = torch.tensor([codes[character] for character in (text[split:] if held_out else text[:split])])
    starts = torch.randint(len(part) - length, (size,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([part[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


class Loop:
    """AdamW on the demo. seed: of weights and data. growth: after how many good steps the scaler doubles its scale."""

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
        self.mode, self.device, self._seed = mode, device, seed
        self.kind = torch.device(device).type
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CharTransformer(layers=layers, width=width)
        self.model = model.to(device, mode.cast or torch.float32)
        # One op for each tensor: what makes a NaN can be named.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=BETAS, eps=EPS, foreach=False)
        self.scaler = torch.amp.GradScaler(self.kind, enabled=mode.scaled, growth_interval=growth)
        self._run: Callable[..., Any] = torch.compile(self.model) if compiled else self.model

    def forward(self, number: int, run: Callable[..., Any] | None = None) -> Tensor:
        """The loss of the batch of this number, 0-d."""
        characters, targets = windows(BATCH, LENGTH, seed=1000 * self._seed + number)
        with self.autocast():
            loss: Tensor = (run or self._run)(characters.to(self.device), targets.to(self.device))[1]
        return loss

    def autocast(self) -> AbstractContextManager[Any]:
        """What the forward pass runs under."""
        return torch.autocast(self.kind, self.mode.autocast) if self.mode.autocast else nullcontext()

    def train(self, number: int) -> Tensor:
        """One step without a look at it; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.forward(number)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def step(self, number: int) -> StepSeen:
        """The same step, and what is to be seen of it."""
        self.optimizer.zero_grad()
        scale = float(self.scaler.get_scale())
        loss = self.forward(number)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        norm = self.gradient_norm()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = float(self.scaler.get_scale()) < scale
        return StepSeen(loss.item(), norm, scale, skipped)

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients, summed in float64; NaN where one of them is not finite."""
        squares = [p.grad.cpu().double().square().sum() for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt())
        return norm if math.isfinite(norm) else math.nan

    @torch.no_grad()
    def validate(self, batches: int = 2) -> float:
        """The mean loss on fixed held-out text, in eager mode, whatever the training runs in."""
        losses = []
        for number in range(batches):
            characters, targets = windows(16, LENGTH, seed=number, held_out=True)
            with self.autocast():
                losses.append(float(self.model(characters.to(self.device), targets.to(self.device))[1]))
        return sum(losses) / batches

    def finite(self) -> bool:
        """Whether every weight is."""
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def state(self) -> tuple[Any, Any, Any]:
        """A copy of all that a step changes."""
        held = (self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict())
        weights, moments, scale = copy.deepcopy(held)
        return weights, moments, scale

    def culprit(self, state: tuple[Any, Any, Any], number: int) -> Culprit | None:
        """Go back to `state`, take step `number` in eager mode and name the first op that made inf or NaN."""
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        self.scaler.load_state_dict(state[2])
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            watch = OpWatch()
            with Trace(self.model, observers=(watch,)):
                self.scaler.scale(self.forward(number, self.model)).backward()  # type: ignore[no-untyped-call]
            found = _first(watch)
            if found is None:
                watch = OpWatch()
                with Trace(observers=(watch,)):
                    self.scaler.step(self.optimizer)
                found = _first(watch, "update")
        return found


def _first(watch: OpWatch, phase: str = "") -> Culprit | None:
    for fact in watch.facts():
        if fact.produced:
            # In the update no module runs, and the source line is the lab's own.
            where = Where(phase, op=fact.where.op) if phase else fact.where
            return Culprit(where, fact.dtype, fact.produced)
    return None
