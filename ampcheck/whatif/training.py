"""Training in recipes of narrow formats: how far its losses and weights go from those of float64.

One run under a shadow gives the losses and weights that training has in float64, with the run's own decisions. Each
recipe is a run of its own, from equal weights, data and random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch

from ampcheck.core.arguments import parse_integer
from ampcheck.core.environment import quiet
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.progress import Progress
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.facts.memory import has_companions
from ampcheck.records.protocol import StepError
from ampcheck.records.whatif import TrainingLoss, TrainingWhatIf
from ampcheck.shadow import Shadow
from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.torchtools.patching import Observer
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.training.loop import TrainingLoop, parameters_of
from ampcheck.training.stopping import ended_after
from ampcheck.whatif.linear import LinearMode, Products
from ampcheck.whatif.recipes import PRODUCTS, Recipe, parse_recipes

STEPS = 20
"""Steps of optimizers that each run makes."""

DRAWS = 3
"""Runs of a recipe with stochastic rounding or random signs, whose results are an interval."""


def measure_training(
    subject: Any,
    recipes: str | Recipe | Iterable[str | Recipe],
    *,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> TrainingWhatIf:
    """Train in the subject's own precision, and in each recipe: all linear layers, and all but the first and the last.

    subject: the mapping of a training loop, or a function that trains. steps: of optimizers. Raises `UsageError` for a
    subject that raises, makes no step of an optimizer, or begins with other weights when it runs again.
    """
    parsed, loaded = parse_recipes(recipes), as_subject(subject)
    trial = _Trial(loaded, parse_integer(steps, "steps"))
    names = list(trial.watched.weights)
    ends = (names[0], names[-1]) if len(names) > 2 else ()
    plans = [(recipe, kept) for recipe in parsed for kept in ([(), ends] if ends else [()])]
    runs = []
    for number, (recipe, kept) in enumerate(plans):
        if progress is not None:
            progress(f"training in {recipe.name}", number, len(plans))
        runs.append(trial.loss(recipe, kept))
    exact = tuple(trial.reference.exact_losses)
    return TrainingWhatIf(loaded.name, exact, trial.own(), tuple(runs), dict(trial.watched.unseen))


class _Trial:
    """The runs of one subject. reference: that of its own precision, with the exact values; watched: its products."""

    def __init__(self, subject: Subject, steps: int) -> None:
        if subject.kind not in (Kind.TRAINING, Kind.CALL):
            raise UsageError(f"{subject.name} must train; found a subject of kind {subject.kind.value}")
        self._subject, self._steps = subject, steps
        shadow = Shadow(judge=False, renews=False)
        self.reference = self._run(shadow, shadow)
        if not self.reference.losses:
            raise UsageError(
                f"{subject.name} must run a backward pass and step an optimizer of PyTorch; found none in its run"
            )
        self.watched = Products()
        self._run(LinearMode(None, self.watched))

    def _run(self, around: AbstractContextManager[Any], shadow: Shadow | None = None) -> _Recording:
        recording = _Recording(shadow)
        with quiet(), seeded(), in_eager_mode(), ExitStack() as stack:
            stack.enter_context(subscribed(**recording.subscribers))
            if self._subject.kind is Kind.TRAINING:
                loop = TrainingLoop(self._subject)
                stack.enter_context(loop.preserved())
                stack.enter_context(around)
                self._steps_of(loop, recording)
            else:
                stack.enter_context(around)
                self._call()
            recording.end()
        return recording

    def _steps_of(self, loop: TrainingLoop, recording: _Recording) -> None:
        for number in range(self._steps):
            taken = loop.take(number)
            if isinstance(taken, StepError):
                raise UsageError(f"step({number}) of {loop.name} must come to its end; found {taken.message}")
            if len(recording.losses) >= self._steps:
                return

    def _call(self) -> None:
        try:
            ended_after(self._steps, self._subject.run_call)
        except BaseException as error:  # the user's code may raise anything
            raise UsageError(f"{self._subject.name} raised {brief(as_result(error))}") from error

    def own(self) -> TrainingLoss:
        """Return what the subject's own precision loses."""
        return self._loss_of("own precision", self.reference)

    def loss(self, recipe: Recipe, kept: tuple[str, ...]) -> TrainingLoss:
        """Return what a recipe loses in all layers but those that are kept."""
        random = any(operand.stochastic or operand.hadamard for p in PRODUCTS for operand in recipe[p] or ())
        losses = [self._draw(recipe, kept, seed) for seed in range(DRAWS if random else 1)]
        drifts = [loss.drift for loss in losses]
        return replace(losses[0], drifts=(min(drifts), max(drifts)) if random else (), runs=len(losses))

    def _draw(self, recipe: Recipe, kept: tuple[str, ...], seed: int) -> TrainingLoss:
        choice = {module: recipe for module in self.watched.weights if module not in kept}
        products = Products(choice, seed=seed, shares=True)
        loss = self._loss_of(recipe.name, self._run(LinearMode(None, products)))
        return replace(
            loss,
            layers=tuple(self.watched.weights),
            kept=kept,
            saturated=_largest(products.saturated),
            flushed=_largest(products.flushed),
        )

    def _loss_of(self, name: str, run: _Recording) -> TrainingLoss:
        reference = self.reference
        if len(run.starts) != len(reference.starts) or not all(map(torch.equal, run.starts, reference.starts)):
            raise UsageError(
                f"each run of {self._subject.name} must begin with equal weights; found others when it ran again: "
                "build model and optimizer inside the function that trains"
            )
        pairs = list(zip(run.ends, reference.exact_ends, reference.starts, strict=True))
        way = _norm(exact - start for _, exact, start in pairs)
        off = _norm(end - exact for end, exact, _ in pairs)
        drift = off / way if way else (math.inf if off else 0.0)
        drift = math.inf if math.isnan(drift) else drift
        return TrainingLoss(name, tuple(run.losses), drift, still=_still(run, reference))


def _norm(differences: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(difference.square().sum()) for difference in differences))


def _largest(parts: dict[tuple[str, str], float]) -> tuple[str, str, float]:
    """The layer and product with the largest part of an operand's elements."""
    (module, product), part = max(parts.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    return module, product, part


def _still(run: _Recording, reference: _Recording) -> float:
    """The part of the weights that stand where they began, of those that float64 moved."""
    still = moved = 0
    for end, exact, start in zip(run.ends, reference.exact_ends, run.starts, strict=True):
        moves = exact != start
        moved += int(moves.sum())
        still += int((moves & (end == start)).sum())
    return still / moved if moved else 0.0


class _Recording:
    """Record of a training as it runs: losses by step, and weights before the first step and after the last.

    shadow: gives exact values, those of the run itself without one. A step ends where an optimizer is stepped, or a
    scaler skips that; its loss is the sum of what its backward passes begin at, without a loss scale.
    """

    def __init__(self, shadow: Shadow | None) -> None:
        self.losses, self.exact_losses = list[float](), list[float]()
        self.starts, self.ends, self.exact_ends = (list[torch.Tensor]() for _ in range(3))
        self.subscribers: dict[str, Observer] = {
            "backward": self._before_backward,
            "scaler_scale": self._scale,
            "scaler_step": self._before_step,
            "optimizer_step": self._before_step,
        }
        self._shadow = shadow
        self._passes: list[tuple[float, float]] = []
        self._scaled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._parameters: dict[torch.nn.Parameter, None] = {}

    def _scale(self, scaler: object, outputs: object) -> Iterator[None]:
        result: Any = yield
        pairs = zip(tensors(result), tensors(outputs), strict=False)
        self._scaled += [(scaled, plain) for (_, scaled), (_, plain) in pairs]

    def _before_backward(self, roots: object, *args: object, accumulate_grad: bool = False, **rest: object) -> None:
        for _, root in tensors(roots) if accumulate_grad else ():  # not torch.autograd.grad
            loss = next((plain for scaled, plain in self._scaled if scaled is root), root)
            if loss.numel() == 1 and loss.is_floating_point():
                with without_modes(), torch.no_grad():
                    self._passes.append((float(loss), float(self._exact(loss))))

    def _before_step(self, stepper: object, *args: object, **rest: object) -> None:
        with without_modes(), torch.no_grad():
            if self._passes:
                for losses, values in zip(
                    (self.losses, self.exact_losses), zip(*self._passes, strict=True), strict=True
                ):
                    losses.append(sum(values))
            self._passes, self._scaled = [], []
            for parameter in parameters_of(stepper) if isinstance(stepper, torch.optim.Optimizer) else ():
                if parameter not in self._parameters and has_companions(parameter):
                    self._parameters[parameter] = None
                    self.starts.append(parameter.double())

    def end(self) -> None:
        """Keep the weights as they are."""
        with without_modes(), torch.no_grad():
            self.ends = [parameter.double() for parameter in self._parameters]
            self.exact_ends = [self._exact(parameter) for parameter in self._parameters]

    def _exact(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shadow is None or not has_companions(tensor):
            return tensor.double()
        return self._shadow.exact(tensor.detach()).clone()
