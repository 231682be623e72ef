"""Builds the small model of an architecture: the first reduction of its configuration with which it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ampcheck.architectures.law import Change, Path, applied, reductions
from ampcheck.architectures.roles import Role
from ampcheck.core.environment import quiet
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.text import listed

LARGEST = 150_000_000
"""Weights of the largest model that is built."""

_TRIES, _SECONDS = 40, 30
"""Reductions that are tried at most, and seconds of a processor after which no other is."""
_GAIN, _SMALL = 0.6, 0.02
"""Root mean square of what a matrix makes of inputs of size 1, and of the elements of a vector."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one call. loss: whether the output has a `loss`."""

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
    began = time.process_time()
    for changes in islice(_plans(architecture), _TRIES):
        if time.process_time() - began > _SECONDS:
            failures.append(f"no more was tried after {_SECONDS} s")
            break
        result = _attempt(architecture, changes)
        if isinstance(result, tuple):
            return Built(*result, changes, tuple(failures))
        failures.append(result)
    reasons = listed(list(dict.fromkeys(failures))[:2])
    raise UsageError(
        f"{architecture.target} could not be built small: with {len(failures)} reductions of its configuration, "
        f"{reasons}; name a function of your own that returns (module, args)"
    )


def _plans(architecture: Architecture) -> Iterator[dict[Path, Change]]:
    """Reductions of the configuration: by one law for all its parts, by one for each, and without some roles."""
    fields = architecture.fields
    plans = [reductions(fields), reductions(fields, alike=False), reductions(fields, whole_heads=True)]
    plans = [plan for number, plan in enumerate(plans) if plan not in plans[:number]]
    yield from plans
    for plan in plans[:2]:
        for role in dict.fromkeys(change.role for change in plan.values()):
            if role not in (Role.VOCABULARY, Role.TOKEN):
                yield {path: change for path, change in plan.items() if change.role is not role}
    shallow = {Role.DEPTH, Role.PERIOD, Role.VOCABULARY, Role.TOKEN, Role.IMAGE}
    for roles in (shallow, {Role.VOCABULARY, Role.TOKEN}, set[Role]()):
        yield {path: change for path, change in plans[0].items() if change.role in roles}


def _attempt(architecture: Architecture, changes: Mapping[Path, Change]) -> tuple[nn.Module, Inputs] | str:
    """The model and the first inputs with which it runs, or why there is none."""
    fields = applied(architecture.fields, changes)
    with quiet():
        try:
            with torch.device("meta"):
                size = sum(weight.numel() for weight in architecture.construct(fields).parameters())
        except Exception:  # noqa: BLE001  # what cannot be built without memory may be built with it
            size = 0
        if size > LARGEST:
            return f"it has {size / 1e6:,.0f} million weights"
        try:
            model = wake(architecture.construct(fields)).eval()
        except BaseException as error:  # noqa: BLE001  # a library's code may raise anything
            return f"its construction raised {brief(as_result(error))}"
    return _called(model, architecture.inputs)


def _called(model: nn.Module, candidates: Callable[[nn.Module], Iterable[Inputs]]) -> tuple[nn.Module, Inputs] | str:
    """The model with the first inputs with which it runs, with a loss if it has one; or why it runs with none."""
    without_loss: Inputs | None = None
    reasons: list[str] = []
    try:
        for inputs in candidates(model):
            if inputs.loss and without_loss is None:
                continue  # it does not take these data
            if not inputs.loss and without_loss is not None:
                break  # it takes more data than these
            failure = _failure(model, inputs)
            if inputs.loss and not failure:
                return model, inputs
            without_loss = without_loss or (None if failure else inputs)
            reasons.append(failure)
    except BaseException as error:  # noqa: BLE001  # a library's code may raise anything
        reasons.append(f"its inputs could not be made: {brief(as_result(error))}")
    if without_loss is not None:
        return model, without_loss
    return reasons[0] if reasons else "it takes no inputs that its signature and configuration tell"


def _failure(model: nn.Module, inputs: Inputs) -> str:
    """Why the model does not run with these inputs; "" where it does."""
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            output = model(*inputs.args, **inputs.kwargs)
    except BaseException as error:  # noqa: BLE001  # a library's code may raise anything
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
    for weight in model.parameters():
        if not weight.is_floating_point() or not weight.numel() or weight.is_meta:
            continue
        matrix = weight.dim() > 1
        if not weight.isfinite().all() or (matrix and not weight.any()):
            scale = _GAIN / math.sqrt(weight[0].numel()) if matrix else _SMALL
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model
