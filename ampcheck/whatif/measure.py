"""Runs of a subject in which its linear layers compute as recipes have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.subject import MODELS, Subject
from ampcheck.numerics.losses import total_loss
from ampcheck.torchtools.copying import forward_through, prepare
from ampcheck.torchtools.private import run_backward
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.snapshot import preserved_objects
from ampcheck.whatif.linear import LinearMode, Products
from ampcheck.whatif.recipes import PRODUCTS, Recipe


@dataclass(frozen=True, slots=True)
class Execution:
    """What a run gave: its loss, and by name its results. of: `gradients`, of parameters, or without any `outputs`."""

    loss: float | None
    results: Mapping[str, torch.Tensor]
    of: str

    def error(self, reference: Execution) -> float:
        """The distance from another run's results over their norm; infinite where a result is lacking or not finite."""
        if self.results.keys() != reference.results.keys():
            return math.inf
        size = sum(float(t.square().sum()) for t in reference.results.values())
        distance = sum(float((self.results[k] - t).square().sum()) for k, t in reference.results.items())
        if not math.isfinite(size) or not math.isfinite(distance):
            return math.inf
        return math.sqrt(distance / size) if size else (math.inf if distance else 0.0)


class Runner:
    """A copy of a subject, which runs its calls forward and backward, each time from the same state and seeds.

    dtype: what autocast casts to, None for the precision of the model. Raises `UsageError` for a subject that is no
    model, or that raises.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype | None = None) -> None:
        if subject.kind not in MODELS:
            raise UsageError(
                f"{subject.name} must be a model with its inputs; found a subject of kind {subject.kind.value}"
            )
        prepared = prepare(subject)
        if prepared.root is None:
            raise UsageError(f"{subject.name} must be a module: layers are named by their modules; found a function")
        self._subject, self._calls, self._blocks, self._dtype = subject, prepared.calls, prepared.blocks, dtype
        self.root: torch.nn.Module = prepared.root

    def run(self, products: Products) -> Execution:
        """All calls, one after the other; gradients add up."""
        for parameter in self.root.parameters():
            parameter.grad = None
        try:
            with (
                preserved_objects(self.root, *((call.args, call.kwargs) for call in self._calls)),
                seeded(),
                LinearMode(self.root, products),
            ):
                return self._run()
        except UsageError:
            raise
        except BaseException as error:  # the user's model may raise anything
            raise UsageError(f"{self._subject.name} raised {brief(as_result(error))}") from error

    def _run(self) -> Execution:
        losses, outputs = list[float](), dict[str, torch.Tensor]()
        for number, call in enumerate(self._calls):
            with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
                result: Any = forward_through(self._blocks, call)
                loss = total_loss(result, self._subject.loss, finite=False)
            for path, tensor in tensors(result):
                if tensor.is_floating_point():
                    outputs[f"{number} {path}"] = tensor.detach().double()
            if loss is not None:
                losses.append(float(loss.detach()))
                if loss.requires_grad:
                    # PyTorch's own functions would run it outside the mode, and with it what checkpoints run again.
                    run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
        named = self.root.named_parameters()
        gradients = {name: p.grad.double() for name, p in named if p.grad is not None and not p.grad.is_sparse}
        if not (results := gradients or outputs):
            raise UsageError(f"{self._subject.name} must give gradients or floating outputs to compare; found neither")
        return Execution(sum(losses) if losses else None, results, "gradients" if gradients else "outputs")


def share_of_narrow(products: Products, recipe: Recipe) -> float:
    """The part of a run's multiplications in layers that a recipe narrows."""
    of_product = {p: sum(n for (_, name), n in products.multiplications.items() if name == p) for p in PRODUCTS}
    narrow = sum(count for product, count in of_product.items() if recipe[product] is not None)
    return narrow / (sum(of_product.values()) or 1)
