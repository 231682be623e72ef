"""Norms of values and of their errors, in parts: a large tensor has no second copy in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ampcheck.core.formats import format_of
from ampcheck.facts.memory import finite, has_companions
from ampcheck.facts.values import CompanionStore
from ampcheck.records.results import FLOOR, JUDGED_UNIT, MOVE, SLACK, UNKNOWABLE
from ampcheck.shadow.bounds import SIXTEEN, floor_of

_CHUNK_ELEMENTS = 1 << 22
"""Elements of a part."""

_FLUSHES = format_of("float16").unit_roundoff
"""The unit roundoff down to which a history may hold float16, of whose range gradients fall short."""


def square(values: torch.Tensor) -> float:
    """The sum of the squares; infinite for values that are not finite."""
    total = float(torch.linalg.vector_norm(values)) ** 2
    return total if total == total else torch.inf


def difference(value: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The norms of a value less exact, and of exact, of the elements that are finite in both."""
    both = exact.isfinite() & finite(value)
    pair = torch.where(both, value.to(exact.dtype) - exact, 0.0), torch.where(both, exact, 0.0)
    return float(torch.linalg.vector_norm(pair[0])), float(torch.linalg.vector_norm(pair[1]))


def exact_square(tensor: torch.Tensor, store: CompanionStore) -> float:
    """The sum of the squares of exact."""
    return sum(square(exact) for _, exact in _parts(tensor, store))


def error_square(tensor: torch.Tensor, store: CompanionStore) -> float:
    """The sum of the squares of the errors."""
    return sum(square(value.double() - exact) for value, exact in _parts(tensor, store))


def honest_share(tensor: torch.Tensor, total: float, store: CompanionStore) -> float:
    """The honest error of a gradient as a share of the norm of all, `total`.

    Roundings to 8 bits leave it as wrong as its own size and its own spread say: one that became zero may be small
    beside the others. Those to 16 bits are small beside the others anyway.
    """
    unit = store.of(tensor).unit
    if unit <= SIXTEEN:
        return FLOOR * unit
    apart, size = difference(store.moved(tensor), store.exact(tensor))
    emptied = not bool(tensor.any()) and apart * (SIXTEEN / MOVE) <= UNKNOWABLE * size
    own = 0.0 if emptied else max(unit * size, apart * (unit / MOVE))
    return FLOOR * min(unit, max(own / max(total, 1e-300), SIXTEEN))


def relative_error(tensor: torch.Tensor, store: CompanionStore) -> float:
    """The norm of the errors relative to that of exact, of the elements that are finite in both."""
    parts = [difference(value, exact) for value, exact in _parts(tensor, store)]
    error, size = (sum(norm**2 for norm in norms) for norms in zip(*parts, strict=True))
    return float(error**0.5 / max(size**0.5, 1e-300))


def _parts(tensor: torch.Tensor, store: CompanionStore) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Values with their exact companions. A matrix that is followed by rows is exact elsewhere."""
    tensor = tensor.detach()
    rows = store.of(tensor).rows
    length = len(tensor) if tensor.dim() else 1
    step = max(1, length * _CHUNK_ELEMENTS // max(1, tensor.numel()))
    if rows is None:
        exact = store.exact(tensor)
        yield from (
            zip(torch.split(tensor, step), torch.split(exact, step), strict=True) if tensor.dim() else [(tensor, exact)]
        )
        return
    followed = torch.zeros(length, dtype=torch.bool, device=tensor.device)
    followed[rows.index] = True
    yield tensor[rows.index], rows.exact
    for part, skipped in zip(torch.split(tensor, step), torch.split(followed, step), strict=True):
        other = part[~skipped]
        yield other, other.double()


def follow_noise(gradients: Iterable[torch.Tensor], store: CompanionStore) -> None:
    """Let moved go where the run went, in the elements of gradients that the data do not determine.

    A gradient that is zero by mathematics, such as that of a key's bias, is nothing in float64 and rounding alone in
    the run. So is an element whose terms happen to cancel: its error is honest beside the others. An optimizer that
    divides by its size makes a whole update of it, which is as undetermined as the gradient.

    To an optimizer gradients are data: their errors were judged, as those of one tensor, and a step is judged for what
    it does to them. So moved is moved by honest roundings as well. What was moved where the run began leaves
    combinations of elements as they are that roundings do not: an optimizer that makes gradients orthogonal (Muon)
    enlarges a singular value that is zero by mathematics.
    """
    for tensor in map(torch.Tensor.detach, gradients):
        companions = store.known(tensor) if has_companions(tensor) else None
        if companions is None or companions.rows is not None or companions.unit < JUDGED_UNIT or companions.faults:
            continue
        exact, moved, share = store.exact(tensor), store.moved(tensor), MOVE / companions.unit
        error = torch.where(tensor.isfinite(), tensor - exact, 0.0) * share
        apart = (moved - exact).abs()
        further = error.abs() > apart
        undetermined = (apart > UNKNOWABLE * share * exact.abs()) & further
        honest = _honest(tensor, exact, error / share, companions.unit)
        cancelled = honest & (error.abs() > UNKNOWABLE * share * exact.abs())
        companions.own()
        followed = torch.where(undetermined | (honest & further), exact + error, moved.double())
        followed = torch.where(cancelled, tensor, followed)
        known = torch.where(exact.isfinite(), exact, 0.0).float()
        rounded = store.moves.shake(known.reshape(-1)).view(known.shape) - known
        store.moved(tensor).copy_(followed + floor_of(companions.depth) * rounded)


def _honest(tensor: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, unit: float) -> torch.Tensor:
    """Elements whose error is of a size that roundings of the others have: gradients are judged as a whole.

    A zero in float16 may be a flushed number and not what terms left, so it is none of them.
    """
    honest = error.abs() <= SLACK * FLOOR * unit * float(exact.square().mean().sqrt())
    return honest if unit > _FLUSHES else honest & (tensor != 0)
