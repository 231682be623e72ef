"""Sums over processes compared with float64, and emulated over more; the record of a loop in several processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.run import Scalar, Table
from ampcheck.records.reductions import CollectiveStats, DistributedStats, Prediction
from ampcheck.training.distributed.collectives import Call
from ampcheck.training.reductions.sums import compare_sum

_EMULATED = 2048
"""Elements with which sums over more processes are emulated."""

_SMALL = 1e-3
"""The share of all sums at one line below which the error of one counts by that share."""

_MOST = 1024
"""The most processes that are emulated when the user names none."""


def compare_sums(ranks: Sequence[Sequence[Call]], target: int | None) -> list[CollectiveStats]:
    """The sums of all processes, by line of code. ranks: the calls of each rank. target: a number of processes at which
    sums are emulated as well."""
    calls: dict[tuple[tuple[int, ...], int], dict[int, Call]] = defaultdict(dict)
    for rank, of_rank in enumerate(ranks):
        for call in of_rank:
            calls[call.ranks, call.number][rank] = call
    lines: dict[tuple[object, ...], list[list[Call]]] = defaultdict(list)
    for (members, _), by_rank in calls.items():
        if all(member in by_rank for member in members):
            group = [by_rank[member] for member in members]
            first = group[0]
            if len({(call.where.op, call.format, call.elements) for call in group}) == 1:
                lines[len(members), first.where, first.format].append(group)
    stats = (_at_one_line(groups, target, len(ranks)) for groups in lines.values())
    return [comparison for comparison in stats if comparison is not None]


def _at_one_line(groups: list[list[Call]], target: int | None, world: int) -> CollectiveStats | None:
    first = groups[0][0]
    fmt = format_of(first.format)
    compared = [comparison for group in groups if (comparison := _compare(group, fmt)) is not None]
    if not compared:
        return None
    judged = [comparison for comparison in compared if comparison.followed > comparison.overflowed]
    worst = max(
        judged or compared, key=lambda comparison: comparison.error / comparison.once if comparison.once else 0.0
    )
    total = math.sqrt(sum(comparison.size**2 for comparison in compared))
    lost = [c.error * (c.size or 1.0) / (max(c.size, total * _SMALL) or 1.0) for c in compared]
    nonzero = sum(comparison.nonzero for comparison in compared)
    addends = torch.cat([comparison.addends for comparison in compared], dim=1)[:, :_EMULATED]
    usable = addends[:, addends.isfinite().all(0)]
    predicted: tuple[Prediction, ...] = ()
    # A group that is a part of the world does not grow with it.
    if fmt.bits <= 16 and first.where.phase != "forward" and usable.numel() and len(first.ranks) == world:
        predicted = tuple(emulate(usable, fmt, _worlds(len(first.ranks), target), divided=compared[0].divided))
    return CollectiveStats(
        first.where,
        first.format,
        len(first.ranks),
        calls=len(groups),
        elements=max(group[0].elements for group in groups),
        followed=sum(comparison.followed for comparison in compared),
        error=worst.error,
        once=worst.once,
        lost=max(lost),
        vanished=sum(comparison.vanished for comparison in compared) / nonzero if nonzero else 0.0,
        overflowed=sum(comparison.overflowed for comparison in compared),
        cast=any(comparison.cast for comparison in compared),
        divided=compared[0].divided,
        predicted=predicted,
    )


def _worlds(world: int, target: int | None) -> list[int]:
    tried = [2**k for k in range(1, _MOST.bit_length()) if 2**k > world]
    return sorted({*tried, target} if target is not None and target > 1 else set(tried))


@dataclass(frozen=True, slots=True)
class _Compared:
    """One call over all ranks. addends: [ranks, elements], float64. size: Euclidean norm of the exact sum. followed:
    sums that are finite; nonzero: of those that are finite in the result as well; vanished: of these."""

    addends: torch.Tensor
    cast: bool
    divided: bool
    size: float
    error: float
    once: float
    overflowed: int
    followed: int
    nonzero: int
    vanished: int


def _compare(group: list[Call], fmt: FloatFormat) -> _Compared | None:
    first = group[0]
    results = [call.result for call in group]
    if not first.parts or len({tuple(map(len, call.parts)) for call in group}) != 1:
        return None
    if len(first.parts) > 1:
        result = [value for of_rank in results for value in of_rank]  # every rank has the sum of its own part
    else:
        result = next((of_rank for of_rank in results if of_rank), [])
    cast = all(call.wide is not None and len(call.wide) == len(result) for call in group)
    rows = [call.wide if cast and call.wide else [v for part in call.parts for v in part] for call in group]
    if not result or len(rows[0]) != len(result):
        return None
    # An addend that is rounded, or too small for the format, is a part of the error; see `Call.wide`.
    addends, reduced = torch.tensor(rows, dtype=torch.float64), torch.tensor(result, dtype=torch.float64)
    factor = _factor(addends, reduced) if first.scale is None else first.scale
    if factor is None:
        return None
    exact, divided = addends.sum(0) * factor, any(abs(call.factor * len(group) - 1) < 1e-3 for call in group)
    nonzero = exact.isfinite() & reduced.isfinite() & (exact != 0)
    counts = int(exact.isfinite().sum()), int(nonzero.sum()), int((nonzero & (reduced == 0)).sum())
    size = float(exact[exact.isfinite()].norm())
    errors = compare_sum(reduced, exact, addends.abs().amax(0) * factor, fmt)
    return _Compared(addends, cast, divided, size, *errors, *counts)


def _factor(addends: torch.Tensor, result: torch.Tensor) -> float | None:
    """The factor of a sum that could not be read, by its values: 1, or 1/n where the collective averages; None where
    the result is exactly the maximum, minimum or product of the addends."""
    good = addends.isfinite().all(0) & result.isfinite()

    def off(reduced: torch.Tensor) -> float:
        return float((result - reduced)[good].norm())

    total, mean = off(addends.sum(0)), off(addends.mean(0))
    others = (addends.amax(0), addends.amin(0), addends.prod(0))
    if min(total, mean) > 0.0 and min(map(off, others)) == 0.0:
        return None
    return 1.0 if total <= mean else 1.0 / len(addends)


def emulate(
    addends: torch.Tensor, fmt: FloatFormat, worlds: Iterable[int], *, divided: bool = False
) -> list[Prediction]:
    """Sums over a ring of more processes: one addend after the other, the partial sum rounded every time.

    addends: [ranks, elements], float64, as measured. The common part of the ranks is estimated over all elements, as
    the mean of a few ranks is never zero by itself. Each further process differs from it as a rank drawn at random
    does, with a random sign and a fixed seed. divided: the addends were divided by the number of processes before.
    """
    ranks, size = addends.shape
    wanted = sorted(set(worlds))
    most = wanted[-1] if wanted else 0
    dtype: torch.dtype = getattr(torch, fmt.name)
    common, apart = _parts(addends)
    largest = float((common.abs() + apart.abs().amax(0)).max()) or 1.0
    # The range is judged apart, from the exact sums: here a power of two keeps all partial sums inside of it.
    scale = 2.0 ** (math.floor(math.log2(min(fmt.max, 2.0**100) / 4)) - math.ceil(math.log2(largest * max(most, 1))))
    common, apart = common * scale, apart * scale
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(size)
    total, exact = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=torch.float64)
    peak = torch.zeros(size, dtype=torch.float64)
    predictions = []
    for world in range(1, most + 1):
        drawn = torch.randint(2 * ranks, (size,), generator=generator)
        more = (common + apart[drawn % ranks, columns] * (1 - 2 * (drawn // ranks))).to(dtype)
        exact += more
        total = (total.float() + more.float()).to(dtype)
        peak = torch.maximum(peak, more.double().abs())
        if world in wanted:
            error, once, _ = compare_sum(total.double(), exact, peak, fmt)
            grown = float(exact.abs().max()) / scale * (ranks / world if divided else 1.0)
            predictions.append(Prediction(world, error, once, grown >= fmt.overflows_at))
    return predictions


def _parts(addends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The common part of two ranks or more, [elements], and the difference of each from it, [ranks, elements]."""
    ranks = len(addends)
    mean = addends.mean(0)
    apart = (addends - mean) * math.sqrt(ranks / (ranks - 1))
    power, noise = float(mean.square().sum()), float(apart.square().sum()) / ranks**2
    return mean * math.sqrt(max(1.0 - noise / power, 0.0) if power else 0.0), apart


def sums_table(stats: DistributedStats) -> tuple[Table, ...]:
    """The sums over ranks, the worst first; empty where there is none."""
    rows: list[tuple[Scalar, ...]] = [
        (
            f"{total.where.op} ({total.where.phase})",
            total.where.place,
            *(total.format, total.world, total.calls, total.elements, total.error, total.once, total.vanished),
            ", ".join(f"{p.ratio:.2g} at {p.world}" for p in total.predicted[:: max(len(total.predicted) // 4, 1)]),
        )
        for total in sorted(stats.collectives, key=lambda total: -total.ratio)
    ]
    columns = (
        *("collective", "where", "format", "ranks", "calls", "elements", "relative error", "of one rounding"),
        *("became zero", "roundings over more processes"),
    )
    return (Table("sums over ranks", columns, rows, "reduce-precision"),) if rows else ()
