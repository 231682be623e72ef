"""Runs of a subject in which its linear layers compute as recipes have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ampcheck.core.errors import UsageError, brief
from ampcheck.core.subject import MODELS, Subject
from ampcheck.numerics.run import RunPlan, run_subject
from ampcheck.records.results import Key
from ampcheck.torchtools.copying import prepare
from ampcheck.torchtools.snapshot import preserved_objects
from ampcheck.whatif.linear import LinearMode, Products
from ampcheck.whatif.recipes import PRODUCTS, Recipe


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a run: its loss, and by name its results. of: `gradients`, of parameters, or without any `outputs`."""

    loss: float | None
    results: Mapping[str, torch.Tensor]
    of: str

    def error(self, reference: Results) -> float:
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
        self._prepared = prepare(subject)
        if self._prepared.root is None:
            raise UsageError(f"{subject.name} must be a module: layers are named by their modules; found a function")
        self._name, self._plan = subject.name, RunPlan(autocast=dtype, loss=subject.loss, inputs=frozenset())
        self.root: torch.nn.Module = self._prepared.root

    def run(self, products: Products) -> Results:
        """All calls, one after the other; gradients add up."""
        gradients, outputs = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

        def receive(key: Key, tensor: torch.Tensor) -> None:
            kind, name, call = key
            if kind == "output" and tensor.is_floating_point():
                outputs[f"{call} {name}"] = tensor.detach().double()
            elif kind == "gradient":
                gradients[name] = gradients[name] + tensor if name in gradients else tensor.double()

        calls = ((call.args, call.kwargs) for call in self._prepared.calls)
        with preserved_objects(self.root, *calls):
            run = run_subject(self._prepared, self._plan, receive, around=[LinearMode(self.root, products)])
        if run.error is not None:
            raise UsageError(f"{self._name} raised {brief(run.error)}") from run.error
        if not (results := gradients or outputs):
            raise UsageError(f"{self._name} must give gradients or floating outputs to compare; found neither")
        loss = sum(float(total) for total in run.totals) if run.totals else None
        return Results(loss, results, "gradients" if gradients else "outputs")


def share_of_narrow(products: Products, recipe: Recipe) -> float:
    """The part of a run's multiplications in layers that a recipe narrows."""
    of_product = {p: sum(n for (_, name), n in products.multiplications.items() if name == p) for p in PRODUCTS}
    narrow = sum(count for product, count in of_product.items() if recipe[product] is not None)
    return narrow / (sum(of_product.values()) or 1)
