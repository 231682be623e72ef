"""From the trajectories of the arms to one record of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ampcheck.compiled.accuracy.arms import Key, Trajectory
from ampcheck.compiled.accuracy.stats import Deviation
from ampcheck.formats import format_of


@dataclass(frozen=True, slots=True)
class Draw:
    """Eager mode beside float64 on equal data."""

    eager: Trajectory
    wide: Trajectory


def deviations(
    draws: Sequence[Draw],
    compiled: Sequence[Trajectory],
    hair: Trajectory,
    turned: Sequence[Trajectory] = (),
    *,
    masked: bool = False,
) -> tuple[Deviation, ...]:
    """Every tensor that eager mode and float64 gave; the n-th compiled arm is that of the n-th draw.

    hair: float64 with its data rounded to float32. turned: float64 with decisions near a tie taken otherwise. masked:
    of weights only those are compared whose gradient the arms know: an optimizer that divides by the gradient's size
    makes a full step of what is zero but for rounding. A tensor that compiled code did not give, or in another shape,
    is infinitely far off.
    """
    first, wide = draws[0].eager, draws[0].wide
    pairs = [(d.eager, d.wide) for d in draws] + [(c, d.wide) for c, d in zip(compiled, draws, strict=False)]
    known = _known_weights(pairs) if masked else {}
    whole = _wholes(wide)
    found = []
    for key, tensor in _everything(first, wide, compiled[0]).items():
        kind, name, step = key
        twin, mine = _held(wide, key, tensor), _held(compiled[0], key, tensor)
        if twin is None or twin.shape != tensor.shape:
            continue
        mask = known.get(name) if kind == "update" else None
        if mask is not None and not bool(mask.any()):
            continue
        size = whole.get((kind, step), 0.0)

        far = partial(_far, key, tensor, mask, size)
        found.append(
            Deviation(
                kind=kind,
                name=name,
                step=step,
                dtype=str(first.dtypes.get(key, tensor.dtype)).removeprefix("torch."),
                eager=tuple(far(draw.eager, draw.wide) for draw in draws),
                compiled=tuple(far(arm, draw.wide) for arm, draw in zip(compiled, draws, strict=False)),
                grain=_grain(first, key, tensor),
                float32=far(hair, wide),
                sensitivity=max((far(draw.wide, wide) for draw in draws[1:]), default=0.0),
                turned=max((far(other, wide) for other in turned), default=0.0),
                share=_share(mine, twin, size),
                eager_share=max(_share(_held(d.eager, key, tensor), _held(d.wide, key, tensor), size) for d in draws),
                between=far(compiled[0], first),
                nonfinite=_unlike(mine, twin),
                eager_nonfinite=max(_unlike(_held(d.eager, key, tensor), _held(d.wide, key, tensor)) for d in draws),
                numel=tensor.numel() if mask is None else int(mask.sum()),
            )
        )
    return tuple(found)


def _everything(eager: Trajectory, wide: Trajectory, compiled: Trajectory) -> dict[Key, torch.Tensor]:
    """What eager mode gave, and the weights and buffers that another arm alone changed."""
    found = dict(eager.values)
    for arm in (wide, compiled):
        for key, tensor in arm.values.items():
            if key[0] in ("update", "buffer") and key not in found:
                found[key] = torch.zeros_like(tensor)
    return found


def _held(arm: Trajectory, key: Key, like: torch.Tensor) -> torch.Tensor | None:
    """A tensor of one arm; a weight or buffer that it left alone changed by zero."""
    tensor = arm.values.get(key)
    return torch.zeros_like(like) if tensor is None and key[0] in ("update", "buffer") else tensor


def _far(
    key: Key, like: torch.Tensor, mask: torch.Tensor | None, whole: float, arm: Trajectory, other: Trajectory
) -> float:
    """How far a tensor of one arm lies from that of another."""
    return _distance(_cut(_held(arm, key, like), mask), _cut(_held(other, key, like), mask), whole)


def _distance(tensor: torch.Tensor | None, twin: torch.Tensor | None, whole: float) -> float:
    """Relative, over what is finite on both sides; beside an exact zero relative to all tensors of the kind."""
    if twin is None or tensor is None or tensor.shape != twin.shape:
        return math.inf
    if not twin.is_floating_point():
        return float((tensor != twin).double().mean())
    if _unlike(tensor, twin):
        return math.inf
    both = twin.isfinite()
    off = _norm(torch.where(both, tensor.double() - twin.double(), 0.0))
    size = _norm(torch.where(both, twin.double(), 0.0)) or whole
    return off / size if size else off


def _share(tensor: torch.Tensor | None, twin: torch.Tensor | None, whole: float) -> float:
    if twin is None or tensor is None or tensor.shape != twin.shape:
        return math.inf
    if not twin.is_floating_point():
        return 0.0
    both = tensor.isfinite() & twin.isfinite()
    off = _norm(torch.where(both, tensor.double() - twin.double(), 0.0))
    return off / whole if whole else off


def _unlike(tensor: torch.Tensor | None, twin: torch.Tensor | None) -> int:
    """Elements that are finite on one side only, or infinite of another sign."""
    if tensor is None or twin is None or tensor.shape != twin.shape or not twin.is_floating_point():
        return 0
    both = tensor.isfinite() & twin.isfinite()
    alike = both | (tensor.isnan() & twin.isnan()) | (tensor.isinf() & twin.isinf() & (tensor.sign() == twin.sign()))
    return int((~alike).sum())


def _grain(arm: Trajectory, key: Key, tensor: torch.Tensor) -> float:
    """One rounding of the tensor to its own dtype, relative to its norm; of a change, that of what is changed."""
    if not tensor.is_floating_point():
        return 0.0
    if key in arm.size:
        change = _norm(tensor)
        stored = format_of(arm.dtypes[key]).unit_roundoff * math.sqrt(key[2] + 1)
        return stored * arm.size[key] / change if change else 0.0
    return format_of(tensor.dtype).unit_roundoff


def _wholes(wide: Trajectory) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for (kind, _, step), tensor in wide.values.items():
        if tensor.is_floating_point():
            part = _norm(torch.where(tensor.isfinite(), tensor.double(), 0.0))
            found[kind, step] = math.hypot(found.get((kind, step), 0.0), part)
        else:
            found.setdefault((kind, step), 0.0)
    return found


def _known_weights(pairs: Iterable[tuple[Trajectory, Trajectory]]) -> dict[str, torch.Tensor]:
    """Of each parameter the elements whose gradient is larger than an arm's error in it, at every step of every arm.

    A gradient that is wrong in compiled code is a failure of its own; its update would only say so again.
    """
    found: dict[str, torch.Tensor] = {}
    for arm, wide in pairs:
        for key, twin in wide.values.items():
            grad = arm.values.get(key)
            if key[0] != "gradient" or grad is None or grad.shape != twin.shape:
                continue
            off = (grad.double() - twin.double()).abs()
            clear = twin.abs() > 2 * torch.maximum(off, off.square().mean().sqrt())
            found[key[1]] = found[key[1]] & clear if key[1] in found else clear
    return found


def _cut(tensor: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or mask is None or tensor.shape != mask.shape else tensor[mask]


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
