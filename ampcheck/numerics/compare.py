"""How far each tensor of a low-precision run lies from its reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ampcheck.numerics.arms import Outcome
from ampcheck.numerics.distance import norm, relative_error
from ampcheck.numerics.reference import Reference
from ampcheck.numerics.stats import TensorError


def compare(
    outcome: Outcome, reference: Reference, dtype: torch.dtype, rounded_inputs: Iterable[str]
) -> tuple[TensorError, ...]:
    """Every output, module output and gradient beside its reference."""
    moved = reference.moved(dtype, frozenset(rounded_inputs))
    whole = math.sqrt(sum(norm(g) ** 2 for g in reference.wide.outcome.gradients.values() if bool(g.isfinite().all())))
    found = []
    for kind, get in _KINDS:
        twins = get(reference.wide.outcome)
        narrow = get(reference.float32)
        swayed = [get(run.outcome) for run in moved]
        for order, (key, tensor) in enumerate(get(outcome).items()):
            twin = twins.get(key)
            if twin is None or twin.shape != tensor.shape:
                continue
            wide = twin.double()
            found.append(
                TensorError(
                    kind=kind,
                    name=_name(key),
                    dtype=str(outcome.gradient_dtypes.get(key, tensor.dtype)).removeprefix("torch."),
                    error=relative_error(tensor, wide),
                    sensitivity=max((relative_error(m[key], wide) for m in swayed if key in m), default=math.inf),
                    share=norm(tensor.double() - wide) / whole if kind == "gradient" and whole else 0.0,
                    nonfinite=int((~tensor.isfinite() & twin.isfinite()).sum()),
                    float32=relative_error(narrow[key], wide) if key in narrow else 0.0,
                    order=order,
                )
            )
    return tuple(found)


_KINDS: tuple[tuple[str, Any], ...] = (
    ("output", lambda outcome: outcome.outputs),
    ("module", lambda outcome: outcome.modules),
    ("gradient", lambda outcome: outcome.gradients),
)


def _name(key: Any) -> str:
    if isinstance(key, tuple):
        module, call, path = key
        return str(module) + (f"[call {call}]" if call else "") + (f":{path}" if path else "")
    return str(key)
