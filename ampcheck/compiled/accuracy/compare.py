"""From the trajectories of the arms to one record of each tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ampcheck.compiled.accuracy.arms import Key, Trajectory
from ampcheck.compiled.accuracy.stats import Deviation
from ampcheck.core.formats import format_of


@dataclass(frozen=True, slots=True)
class Draw:
    """Eager mode beside float64 on equal data."""

    eager: Trajectory
    wide: Trajectory


def deviations(
    draws: Sequence[Draw],
    compiled: Sequence[Trajectory],
    hairs: Sequence[Trajectory],
    turned: Sequence[Trajectory] = (),
    rounded: Sequence[Trajectory] = (),
    *,
    masked: bool = False,
) -> tuple[Deviation, ...]:
    """Every tensor that eager mode and float64 gave; the n-th compiled arm is that of the n-th draw.

    hairs: float64 with its data rounded to float32. turned: float64 with decisions near a tie taken otherwise.
    rounded: eager mode with other roundings, on the data of the first draw. masked: of weights only those are compared
    whose gradient the arms know: an optimizer that divides by the gradient's size makes a full step of what is zero but
    for rounding. A tensor that compiled code did not give, or in another shape, is infinitely far off; one that an arm
    could not keep is left out.
    """
    first, wide, mine = draws[0].eager, draws[0].wide, compiled[0]
    pairs = [(d.eager, d.wide) for d in draws] + [(c, d.wide) for c, d in zip(compiled, draws, strict=False)]
    known = _known_weights(pairs) if masked else {}
    whole = _wholes(wide)
    found = []
    for key, tensor in _everything(first, wide, mine).items():
        kind, name, step = key
        twin = _held(wide, key, tensor)
        if twin is None or twin.shape != tensor.shape or any(key in arm.dropped for arm in (first, wide, mine)):
            continue
        mask = known.get(name) if kind == "update" else None
        if mask is not None and not bool(mask.any()):
            continue
        size = whole.get((kind, step), 0.0)
        views = [
            _View([_held(arm, key, tensor) for arm in arms], mask)
            for arms in ((d.wide, d.eager, *compiled[n : n + 1]) for n, d in enumerate(draws))
        ]
        here = views[0]
        swayed = [here.distance(_held(arm, key, tensor), size) for arm in hairs]
        otherwise = [here.distance(_held(arm, key, tensor), size) for arm in turned]
        shares = [_share(_held(d.eager, key, tensor), _held(d.wide, key, tensor), size) for d in draws]
        found.append(
            Deviation(
                kind=kind,
                name=name,
                step=step,
                dtype=str(first.dtypes.get(key, tensor.dtype)).removeprefix("torch."),
                eager=tuple(view.distance(view.sides[1], size) for view in views),
                compiled=tuple(view.distance(view.sides[2], size) for view in views if len(view.sides) > 2),
                grain=_grain(first, key, tensor),
                float32=_largest(swayed, none=math.inf if hairs else 0.0),
                turned=_largest(otherwise),
                rounded=_usual(here.distance(_held(arm, key, tensor), size) for arm in rounded),
                share=_share(here.sides[2], twin, size),
                eager_share=_largest(shares),
                between=here.distance(here.sides[2], size, tensor),
                lost=_lost(*here.sides),
                nonfinite=_unlike(here.sides[2], twin),
                eager_nonfinite=max(_unlike(view.sides[1], view.sides[0]) for view in views),
                judged=_known(*here.sides) if mask is None else int(mask.sum()),
                nan=_both_nan(*here.sides),
                numel=tensor.numel() if mask is None else int(mask.sum()),
            )
        )
    return tuple(found)


def left_out(draw: Draw, compiled: Trajectory, judged: Iterable[Deviation]) -> dict[str, int]:
    """Why tensors of the first data were not compared, with how many: an arm that could not keep one, float64 that gave
    none such, and those without a limit."""
    judged = tuple(judged)
    known = {(d.kind, d.name, d.step) for d in judged}
    reasons = {**draw.eager.dropped, **draw.wide.dropped, **compiled.dropped}
    for key, tensor in draw.eager.values.items():
        twin = _held(draw.wide, key, tensor)
        if key not in known and (twin is None or twin.shape != tensor.shape):
            reasons.setdefault(key, f"{key[0]}s that float64 gives in another shape or not at all")
    reasons |= {(d.kind, d.name, d.step): f"{d.kind}s without a limit: {d.unknown}" for d in judged if d.unknown}
    return dict(Counter(reasons.values()))


def _largest(distances: Iterable[float], *, none: float = 0.0) -> float:
    """The largest of those that are known; `none` where none is."""
    return max((far for far in distances if math.isfinite(far)), default=none)


def _usual(distances: Iterable[float]) -> float:
    """The root mean square of those that are known."""
    known = [far for far in distances if math.isfinite(far)]
    return math.hypot(*known) / math.sqrt(len(known)) if known else 0.0


class _View:
    """One tensor in float64, in eager mode and, if it ran, compiled, on one set of data: where all can be compared."""

    def __init__(self, sides: Sequence[torch.Tensor | None], mask: torch.Tensor | None) -> None:
        wide = sides[0]
        self.sides = sides
        self._seen: torch.Tensor | None = None
        self._empty = False
        if wide is None or not wide.is_floating_point():
            return
        seen = torch.ones_like(wide, dtype=torch.bool) if mask is None or mask.shape != wide.shape else mask.clone()
        for side in sides:
            if side is not None and side.shape == wide.shape:
                seen &= side.isfinite()
        self._seen, self._empty = seen, not bool(seen.any())

    def distance(self, tensor: torch.Tensor | None, whole: float, other: torch.Tensor | None = None) -> float:
        """How far a tensor lies from float64, or from `other`, relatively, over what is finite on all sides.

        Beside an exact zero relative to all tensors of the kind, `whole`. Infinite where the tensor is missing, has
        another shape or is not finite there, and where nothing is left to compare; infinities that agree are equal.
        """
        wide = self.sides[0]
        twin = wide if other is None else other
        if tensor is None or twin is None or wide is None or tensor.shape != wide.shape:
            return math.inf
        if self._seen is None:
            return float((tensor != twin).double().mean())
        if self._empty:
            return math.inf if _unlike(tensor, twin) else 0.0
        one, two = tensor[self._seen].double(), twin[self._seen].double()
        size = _norm(two) or whole
        off = _norm(one - two) / (size or 1.0)
        return off if math.isfinite(off) else math.inf


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


def _share(tensor: torch.Tensor | None, twin: torch.Tensor | None, whole: float) -> float:
    if twin is None or tensor is None or tensor.shape != twin.shape:
        return math.inf
    if not twin.is_floating_point():
        return 0.0
    both = tensor.isfinite() & twin.isfinite()
    off = _norm(torch.where(both, tensor.double() - twin.double(), 0.0))
    return off / whole if whole else off


def _lost(wide: torch.Tensor | None, eager: torch.Tensor | None, compiled: torch.Tensor | None) -> int:
    """Elements that are inf or NaN on one side only of compiled code and float64, where eager mode is as float64."""
    if wide is None or eager is None or compiled is None or not wide.is_floating_point():
        return 0
    if not wide.shape == eager.shape == compiled.shape:
        return 0
    return int((~_alike(compiled, wide) & _alike(eager, wide)).sum())


def _known(*sides: torch.Tensor | None) -> int:
    """Elements that are finite on all sides, or infinite on all of them in place and sign."""
    wide = sides[0]
    if wide is None:
        return 0
    known = torch.ones_like(wide, dtype=torch.bool)
    for side in sides:
        if side is not None and side.shape == wide.shape and side.is_floating_point() and wide.is_floating_point():
            known &= ~side.isnan() & _alike(side, wide)
    return int(known.sum())


def _both_nan(wide: torch.Tensor | None, eager: torch.Tensor | None, compiled: torch.Tensor | None = None) -> int:
    """Elements that are NaN in float64 and in compiled code."""
    if wide is None or compiled is None or wide.shape != compiled.shape or not wide.is_floating_point():
        return 0
    return int((wide.isnan() & compiled.isnan()).sum())


def _unlike(tensor: torch.Tensor | None, twin: torch.Tensor | None) -> int:
    """Elements that are finite on one side only, or infinite of another sign."""
    if tensor is None or twin is None or tensor.shape != twin.shape or not twin.is_floating_point():
        return 0
    return int((~_alike(tensor, twin)).sum())


def _alike(tensor: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    both = tensor.isfinite() & twin.isfinite()
    return both | (tensor.isnan() & twin.isnan()) | (tensor.isinf() & twin.isinf() & (tensor.sign() == twin.sign()))


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


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
