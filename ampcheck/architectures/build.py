"""Builds the small model of an architecture: the first reduction of its configuration with which it runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ampcheck.architectures.law import Change, Path, Role, applied, reductions
from ampcheck.core.errors import OP_ERRORS, UsageError, as_result, brief
from ampcheck.core.text import listed

LARGEST = 100_000_000
"""Weights of the largest model that is built."""

_TRIES = 40
_GAIN = 0.6
"""Root mean square of what a weight makes of inputs of size 1."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Keyword arguments of one call, with their names in words. loss: whether the output has a `loss`."""

    kwargs: Mapping[str, Any]
    loss: bool = False
    args: tuple[Any, ...] = ()

    def words(self) -> str:
        """The names with dtype and shape."""
        positional = [(str(number), value) for number, value in enumerate(self.args)]
        return ", ".join(f"{name} {_described(value)}".strip() for name, value in (*positional, *self.kwargs.items()))


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, (int, float, str)) else ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A class of models of a library with its configuration.

    target: its name. fields: the configuration as the library has it. construct: the model with a configuration.
    inputs: calls that the model may take, the one that uses most of it first.
    """

    target: str
    fields: Mapping[str, Any]
    construct: Callable[[dict[str, Any]], nn.Module]
    inputs: Callable[[nn.Module], Iterable[Inputs]]


@dataclass(frozen=True, slots=True)
class Built:
    """A small model that runs. changes: what was reduced; failures: what was tried before, by reason."""

    model: nn.Module
    inputs: Inputs
    changes: Mapping[Path, Change]
    failures: tuple[str, ...]


def build(architecture: Architecture) -> Built:
    """The small model with random weights, in eval mode, and inputs with which it runs.

    Raises `UsageError` with what was tried where no reduction is one that runs.
    """
    failures: list[str] = []
    for tried, changes in enumerate(_plans(architecture, failures)):
        result = _attempt(architecture, changes)
        if isinstance(result, tuple):
            return Built(*result, changes, tuple(failures))
        failures.append(result)
        if tried >= _TRIES:
            break
    reasons = listed(list(dict.fromkeys(failures))[:2])
    raise UsageError(
        f"{architecture.target} could not be built small: with {len(failures)} reductions of its configuration, "
        f"{reasons}; name a factory of your own that returns (module, args)"
    )


def _plans(architecture: Architecture, failures: list[str]) -> Iterator[dict[Path, Change]]:
    """Reductions of the configuration: by one law for all its parts, by one for each, and without some roles."""
    fields = architecture.fields
    plans = [reductions(fields), reductions(fields, alike=False), reductions(fields, whole_heads=True)]
    plans = [plan for number, plan in enumerate(plans) if plan not in plans[:number]]
    yield from plans
    for plan in plans[:2]:
        for role in dict.fromkeys(change.role for change in plan.values()):
            if role not in (Role.VOCABULARY, Role.TOKEN):
                yield {path: change for path, change in plan.items() if change.role is not role}
    keeping = ({Role.DEPTH, Role.PERIOD, Role.VOCABULARY, Role.TOKEN, Role.IMAGE}, {Role.VOCABULARY, Role.TOKEN}, set())
    for roles in keeping:
        yield {path: change for path, change in plans[0].items() if change.role in roles}


def _attempt(architecture: Architecture, changes: Mapping[Path, Change]) -> tuple[nn.Module, Inputs] | str:
    """The model and the first inputs with which it runs, or why there is none."""
    fields = applied(architecture.fields, changes)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            size = sum(parameter.numel() for parameter in architecture.construct(fields).parameters())
    except Exception:  # noqa: BLE001  # what cannot be built without memory may be built with it
        size = 0
    if size > LARGEST:
        return f"it has {size / 1e6:,.0f} million weights"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = wake(architecture.construct(fields)).eval()
    except BaseException as error:  # a library's code may raise anything
        return f"its construction raised {brief(as_result(error))}"
    result: tuple[nn.Module, Inputs] | None = None
    reason = "it takes no inputs that its signature and configuration tell"
    try:
        for number, inputs in enumerate(architecture.inputs(model)):
            if result is not None and not inputs.loss:
                break  # with less data than it takes
            failure = _failure(model, inputs)
            if not failure and inputs.loss:
                return model, inputs
            result = result or (None if failure else (model, inputs))
            reason = failure if number == 0 else reason
    except BaseException as error:  # a library's code may raise anything
        reason = f"its inputs could not be made: {brief(as_result(error))}"
    return result or reason


def _failure(model: nn.Module, inputs: Inputs) -> str:
    """Why the model does not run with these inputs; "" where it does."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            output = model(*inputs.args, **inputs.kwargs)
    except BaseException as error:  # a library's code may raise anything
        return f"forward({', '.join(inputs.kwargs)}) raised {brief(as_result(error))}"
    if inputs.loss:
        loss = getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.isfinite():
            return f"forward({', '.join(inputs.kwargs)}) gave no finite loss"
    return ""


@torch.no_grad()
def wake(model: nn.Module) -> nn.Module:
    """The model without weights that hide what comes after them: zeros, and memory that nothing was written to.

    Trained weights are neither. Branches that begin at zero (adaptive normalisation, gates) have no numerics to judge.
    """
    generator = torch.Generator().manual_seed(0)
    for weight in (*model.parameters(), *model.buffers()):
        if not weight.is_floating_point() or not weight.numel() or weight.is_meta:
            continue
        matrix = weight.dim() > 1
        scale = _GAIN / math.sqrt(max(1, weight[0].numel())) if matrix else 0.02
        if (
            not weight.isfinite().all()
            and isinstance(weight, nn.Parameter)
            or (matrix and isinstance(weight, nn.Parameter) and not weight.any())
        ):
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model


__all__ = ["OP_ERRORS", "Architecture", "Built", "Inputs", "build", "wake"]
