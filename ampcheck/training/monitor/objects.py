"""What the objects are that a user hands to `watch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.training.monitor.updates import plain_optimizer


def sort_objects(objects: Sequence[object]) -> tuple[Any, list[torch.optim.Optimizer], Any]:
    """The model, the optimizers and the scaler among the objects. Raises `UsageError` for others, and for too many."""
    models, optimizers, scalers = list[Any](), list[Any](), list[Any]()
    for item in (given for given in objects if given is not None):
        if isinstance(item, (list, tuple)) and item and all(_is_optimizer(part) for part in item):
            optimizers += item
        elif _is_optimizer(item):
            optimizers.append(item)
        elif all(hasattr(item, method) for method in ("step", "update", "is_enabled")):
            scalers.append(item)
        elif callable(item):
            models.append(item)
        else:
            raise UsageError(
                "watch takes a module or function, optimizers and a torch.amp.GradScaler; found "
                f"{'an empty list' if item == [] else type(item).__name__}"
            )
    if len(models) > 1 or len(scalers) > 1:
        raise UsageError(f"watch takes one model and one scaler; found {len(models)} models and {len(scalers)} scalers")
    if scalers and not optimizers:
        raise UsageError("a scaler is judged by the steps of an optimizer: pass the optimizer to watch(...) as well")
    unwrapped = {id(optimizer): optimizer for optimizer in map(plain_optimizer, optimizers)}
    return next(iter(models), None), list(unwrapped.values()), next(iter(scalers), None)


def _is_optimizer(item: object) -> bool:
    return hasattr(item, "param_groups") and hasattr(item, "step")
