"""How far each tensor of a low-precision run lies from its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ampcheck.numerics.arms import KINDS, Outcome, name_of
from ampcheck.numerics.distance import norm, relative_error
from ampcheck.numerics.reference import WideRun
from ampcheck.numerics.stats import TensorError


def compare(
    outcome: Outcome,
    wide: WideRun,
    moved: Sequence[WideRun],
    hairsbreadth: Sequence[WideRun],
    float32: Mapping[tuple[str, str], float] = MappingProxyType({}),
) -> tuple[TensorError, ...]:
    """Every output, module output and gradient beside its reference.

    moved: the reference with its data rounded to the low format; hairsbreadth: rounded to float32, what
    can be known at all; float32: the errors of the float32 run, by kind and name. An output or gradient without a
    counterpart, or of another shape, is infinitely far off.
    """
    reference = wide.outcome
    whole = math.sqrt(sum(norm(g) ** 2 for g in reference.gradients.values() if bool(g.isfinite().all())))
    found = []
    for kind, get in KINDS:
        twins, swayed, hair = (
            get(reference),
            [get(run.outcome) for run in moved],
            [get(r.outcome) for r in hairsbreadth],
        )
        own = get(outcome)
        judged = _judged(kind, outcome, own, twins)
        for order, key in enumerate(judged):
            twin, tensor = twins[key].double(), own.get(key)
            if tensor is None or tensor.shape != twin.shape:
                if kind != "module" and norm(twin):
                    found.append(TensorError(kind, name_of(key), "missing", math.inf, 0.0, math.inf, 0, order=order))
                continue
            difference = torch.where(tensor.isfinite() & twin.isfinite(), tensor.double() - twin, 0.0)
            found.append(
                TensorError(
                    kind=kind,
                    name=name_of(key),
                    dtype=str(outcome.gradient_dtypes.get(key, tensor.dtype)).removeprefix("torch."),
                    error=relative_error(tensor, twin),
                    sensitivity=max((relative_error(run[key], twin) for run in swayed if key in run), default=0.0),
                    share=norm(difference) / whole if kind == "gradient" and whole else 0.0,
                    nonfinite=int((~tensor.isfinite() & twin.isfinite() | tensor.isnan() & twin.isinf()).sum()),
                    misplaced=int((twin.isinf() & ~tensor.isnan() & (tensor != twin)).sum()) if kind == "output" else 0,
                    compared=int((tensor.isfinite() & twin.isfinite()).sum()),
                    float32=max((relative_error(run[key], twin) for run in hair if key in run), default=0.0),
                    in_float32=float32.get((kind, name_of(key)), 0.0),
                    order=order,
                )
            )
    return tuple(found)


def without_counterpart(outcome: Outcome, wide: WideRun) -> int:
    """Module outputs that have none, or one of another shape."""
    twins = wide.outcome.modules
    return sum(key not in twins or twins[key].shape != t.shape for key, t in outcome.modules.items())


def _judged(kind: str, outcome: Outcome, own: Mapping[Any, Any], twins: Mapping[Any, Any]) -> list[Any]:
    """The keys to look at, in the order of the run; all of the reference's where the run came to its end."""
    if kind == "module" or outcome.error is not None or (kind == "gradient" and outcome.no_backward):
        return [key for key in own if key in twins]
    return [*(key for key in own if key in twins), *(key for key in twins if key not in own)]
