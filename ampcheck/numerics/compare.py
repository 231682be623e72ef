"""How far each tensor of a low-precision run lies from its reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ampcheck.formats import format_of
from ampcheck.numerics.arms import Outcome
from ampcheck.numerics.reference import Reference
from ampcheck.numerics.stats import TensorError


def compare(
    outcome: Outcome, reference: Reference, dtype: torch.dtype, rounded_inputs: Iterable[str]
) -> tuple[TensorError, ...]:
    """Every output, module output and gradient beside its reference."""
    roundoff = format_of(dtype).unit_roundoff
    moved = reference.moved(roundoff, frozenset(rounded_inputs))
    whole = math.sqrt(sum(_norm(g) ** 2 for g in reference.outcome.gradients.values() if bool(g.isfinite().all())))
    found = []
    for kind, get in _KINDS:
        twins = get(reference.outcome)
        narrow = get(reference.float32)
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
                    error=_relative(tensor, wide),
                    sensitivity=max((_relative(get(m)[key], wide) for m in moved if key in get(m)), default=math.inf),
                    share=_norm(tensor.double() - wide) / whole if kind == "gradient" and whole else 0.0,
                    nonfinite=int((~tensor.isfinite() & twin.isfinite()).sum()),
                    known=key not in narrow or not _relative(narrow[key], wide) > roundoff,
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


def _relative(tensor: torch.Tensor, wide: torch.Tensor) -> float:
    """Norm of the difference over the norm of `wide`, over the elements that are finite in both."""
    if tensor.shape != wide.shape:
        return math.inf
    both = tensor.isfinite() & wide.isfinite()
    difference = torch.where(both, tensor.double() - wide, 0.0)
    size = _norm(torch.where(both, wide, 0.0))
    distance = _norm(difference)
    return distance / size if size else (math.inf if distance else 0.0)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
