"""Running sums as they are built up, op by op, compared with the float64 sums of the same addends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.run import Coverage, Scalar, Table, Where
from ampcheck.facts.memory import has_companions, values_in
from ampcheck.facts.store import StorageMap
from ampcheck.records.reductions import FEWEST, ReductionStats, SumStats
from ampcheck.records.results import MOVE
from ampcheck.shadow import Shadow
from ampcheck.stream.ops import OpEvent, leaves
from ampcheck.torchtools.private import backward_node, backward_task
from ampcheck.torchtools.spacing import spacing
from ampcheck.training.lineage import Lineage
from ampcheck.training.reductions.norms import NormWatch

_OVERFLOWING = 3
"""A sum of so many addends is one that may overflow; two are an addition like any other."""

_SAMPLE = 256
"""Elements that are looked at to see whether a sum starts at zero."""

_ADDED = 65536
"""Elements of a sum that are added up in float64 as well, spread over all of it."""

_ROWS = 40

_PHASES = {"sum": "update", "gradient": "backward", "graph": ""}


@dataclass(frozen=True, slots=True)
class _Sum:
    """A partial sum. number: of the sum that it is part of; mask: its origins. present, gone: nonzero values of the
    addends, and those of them that had become zero. wide: the sum of the addends in float64, see `_sampled`; None until
    the second addition of a graph, which has many that nothing follows."""

    number: int
    mask: int
    addends: int
    roundings: int = 0
    format: str = ""
    kind: str = ""
    where: Where = field(default_factory=Where)
    gone: int = 0
    present: int = 0
    wide: torch.Tensor | None = field(default=None, compare=False)


class ReductionWatch:
    """Follows every running sum and every norm of norms.

    sums: those of `FEWEST` addends or more, and shorter ones that overflow, by number. A running sum is
    `acc = acc + g`, `acc += g` and their foreach forms, also with casts between, where the addend was not computed from
    the partial sum: `h = h + f(h)` is a residual stream, no reduction. A tensor that anything else has written to
    starts again.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._partial = StorageMap[dict[tuple[int, int], _Sum]]()  # by offset and length
        self.sums: dict[int, SumStats] = {}
        self._pending: list[tuple[torch.Tensor, _Sum] | None] = []
        self._count = 0
        self.norms = NormWatch()

    @property
    def goes_on(self) -> bool:
        """True if a sum in 16 bits is alive that has been added to several times."""
        totals = (total for _, sums in self._partial for total in sums.values())
        return any(total.roundings and total.addends >= _OVERFLOWING for total in totals)

    def begin(self, lineage: Lineage) -> None:
        """Sums go on over the steps, with origins of their own in each; those that turn out to be weights end."""
        self.norms.forget()
        for storage, sums in self._partial:
            if lineage.facts.bit_of(storage) & lineage.weights:
                self._partial.pop(storage)
                for total in sums.values():
                    self.sums.pop(total.number, None)
                continue
            mask = lineage.facts.new_origin()
            lineage.facts.depend(values_in(storage, torch.uint8, storage.device), mask)
            self._partial.put(storage, {part: replace(total, mask=mask) for part, total in sums.items()})

    def before(self, call: OpEvent, lineage: Lineage) -> None:
        """Find the partial sums that an op is going to make that adds or writes, and end those that it overwrites."""
        self._pending = [self._extended(*parts, lineage) for parts in _additions(call)]
        for tensor in leaves(call.written_values()) if call.traits.writes else ():
            if not [p for p in self._pending if p is not None and p[0] is tensor]:
                self._partial.pop(tensor)

    def after(self, call: OpEvent, lineage: Lineage) -> None:
        """Note the partial sums that an op has made."""
        if self.norms.any or call.traits.base.endswith("norm"):
            self.norms.see(call)
        position = call.traits.copies
        pending_sums = self._pending if len(call.traits.linear) > 1 else []  # else of an op that raised
        followed = pending_sums or (position is not None and len(self._partial))
        results = leaves(call.out) if followed else []
        if pending_sums and not results:
            results = leaves(call.args[0])
        for pending, result in zip(pending_sums, results, strict=False):
            if pending is not None:
                accumulator, total = pending
                kind = _kind(accumulator)
                total = replace(total, kind=kind, where=Where(_PHASES[kind], "", "aten::add", *call.line()))
                self._keep(total, result, accumulator, lineage, rounded=True)
        if position is not None and results and not call.traits.foreach:
            source, copied = call.args[position], results[0]
            copy = self._of(source)
            if copy is not None:
                self._keep(copy, copied, source, lineage, rounded=copied.dtype != source.dtype)
        if call.name == "sum":
            self._summed(call)

    def _extended(
        self, accumulator: torch.Tensor, addend: Any, sign: float, lineage: Lineage
    ) -> tuple[torch.Tensor, _Sum] | None:
        """The partial sum that an addition makes."""
        if lineage.facts.bit_of(accumulator) & lineage.weights:
            return None  # what updates of a weight lose is counted by `stagnation`
        total = self._of(accumulator)
        if not isinstance(addend, torch.Tensor):  # `sum(...)` starts at 0: no addend, but part of the value
            return None if total is None else (accumulator, _widened(total, accumulator, sign * addend))
        if not (_sums_up(accumulator) and _sums_up(addend)):
            return None
        other = self._of(addend)
        larger = addend.numel() > accumulator.numel()
        if sign == 1.0 and (larger or (total is None and other is not None)):
            total, other, accumulator, addend = other, total, addend, accumulator
        if not _broadcasts(addend, accumulator):
            return None
        if total is None:
            return accumulator, self._begun(accumulator, addend, sign, lineage)
        if lineage.facts.form(addend).mask & total.mask:
            return None
        longer = replace(total, addends=total.addends + (other.addends if other else 1))
        if other is not None:  # pairwise summation
            longer = replace(longer, mask=longer.mask | other.mask, roundings=longer.roundings + other.roundings)
        elif addend.dtype is torch.float16:
            nonzero = self._shadow.exact(addend) != 0
            gone, present = longer.gone + int(((addend == 0) & nonzero).sum()), longer.present + int(nonzero.sum())
            longer = replace(longer, gone=gone, present=present)
        added = other.wide if other is not None and addend.stride() == accumulator.stride() else None
        added = _sampled(addend, accumulator) if added is None else added
        return accumulator, _widened(longer, accumulator, sign * added)

    def _begun(self, accumulator: torch.Tensor, addend: torch.Tensor, sign: float, lineage: Lineage) -> _Sum:
        """The partial sum that the first addition makes."""
        self._count += 1
        started = sum(bool(t.detach().reshape(-1)[:_SAMPLE].any()) for t in (accumulator, addend))
        total = _Sum(self._count, lineage.facts.new_origin(), max(started, 1))
        if _kind(accumulator) == "graph":
            return total
        return _widened(total, accumulator, sign * _sampled(addend, accumulator))

    def _keep(
        self, total: _Sum, tensor: torch.Tensor, source: torch.Tensor, lineage: Lineage, *, rounded: bool
    ) -> None:
        """Note what the memory of a tensor holds. source: the tensor in whose order of elements `total.wide` is."""
        if not has_companions(tensor):
            return
        if total.wide is not None and (tensor.shape != source.shape or tensor.stride() != source.stride()):
            total = replace(total, wide=_sampled(tensor, tensor))
        form = format_of(tensor.dtype)
        low = form.bits <= 16
        narrowest = total.format and format_of(total.format).bits <= form.bits
        name = total.format if narrowest else form.name
        total = replace(total, roundings=total.roundings + (rounded and low), format=name)
        sums = self._partial.get(tensor)
        if sums is None:
            self._partial.put(tensor, sums := {})
        sums[int(tensor.storage_offset()), tensor.numel()] = total
        lineage.facts.depend(tensor, total.mask)
        known = self.sums.get(total.number)
        over = low and total.addends >= _OVERFLOWING and not bool(tensor.isfinite().all())
        if (total.addends >= FEWEST or over) and (known is None or total.addends >= known.addends):
            self.sums[total.number] = self._stats(total, tensor.detach())

    def _of(self, tensor: object) -> _Sum | None:
        sums = self._partial.get(tensor)
        if sums is None or not isinstance(tensor, torch.Tensor):
            return None
        return sums.get((int(tensor.storage_offset()), tensor.numel()))

    def _stats(self, total: _Sum, tensor: torch.Tensor) -> SumStats:
        exact, moved = self._shadow.exact(tensor), self._shadow.moved(tensor).double()
        overflowed = int((exact.isfinite() & ~tensor.isfinite()).sum())
        error = once = 0.0
        if total.wide is not None:
            spread = _sampled((moved.nan_to_num() - exact).abs() / MOVE, tensor)
            error, once, _ = compare_sum(_sampled(tensor, tensor), total.wide, spread, format_of(total.format))
        vanished = total.gone / total.present if total.present and total.kind == "sum" else 0.0
        known = total.kind, total.format, total.addends, total.roundings
        return SumStats(*known, error, once, overflowed, total.where, vanished)

    def _summed(self, call: OpEvent) -> None:
        """One op that adds up: inside it adds in float32, but its result may not fit into 16 bits."""
        values, out = call.args[0], call.out
        if not has_companions(out) or out.dtype.itemsize > 2 or _kind(values) != "sum":
            return  # what overflows under a loss scale is the scaler's to see
        bad = int((~out.isfinite()).sum())
        if bad and values.numel() > out.numel() and bool(values.isfinite().all()):
            many = values.numel() // max(out.numel(), 1)
            name = format_of(out.dtype).name
            self._count += 1
            where = Where(_PHASES["sum"], "", "aten::add", *call.line())
            self.sums[self._count] = SumStats("sum", name, many, 1, 0.0, 0.0, bad, where)


def _additions(call: OpEvent) -> Iterator[tuple[torch.Tensor, Any, float]]:
    """Accumulator, addend and sign of what an op adds up."""
    if call.weights[:1] != (1,) or len(call.args) < 2:
        return
    weight = call.weights[1]
    sign = float(weight) if isinstance(weight, (int, float)) else 1.0
    first, second = call.args[:2]
    if isinstance(first, (list, tuple)):
        if isinstance(second, (list, tuple)) and len(first) == len(second):
            yield from ((total, addend, sign) for total, addend in zip(first, second, strict=True))
    elif isinstance(first, torch.Tensor) and isinstance(second, (torch.Tensor, int, float)):
        yield first, second, sign


def _sums_up(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be part of a running sum that is followed."""
    return (
        has_companions(tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.numel() > 0
    )


def _kind(accumulator: torch.Tensor) -> str:
    """Private names of torch 2.4 to 2.13 tell the engine's own additions from the user's."""
    if backward_task() != -1:
        node = backward_node()
        return "gradient" if node is not None and "AccumulateGrad" in node.name() else "graph"
    return "graph" if accumulator.requires_grad else "sum"


def _broadcasts(addend: torch.Tensor, accumulator: torch.Tensor) -> bool:
    """Return whether a sum with an addend has as many elements as the accumulator."""
    try:
        shape: torch.Size = torch.broadcast_shapes(addend.shape, accumulator.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:  # ragged shapes
        return False
    return shape.numel() == accumulator.numel()


def _sampled(tensor: torch.Tensor, accumulator: torch.Tensor) -> torch.Tensor:
    """At most 65536 elements, float64, in the order in which the accumulator lies in memory, whatever view it is."""
    order = sorted(range(accumulator.dim()), key=accumulator.stride, reverse=True)
    values = tensor.detach()
    more = max(0, values.dim() - accumulator.dim())  # dimensions of size one, such as that of a number in a list
    expanded = values.reshape(values.shape[more:]).expand(accumulator.shape)
    flat = expanded.permute(order).reshape(-1)
    return flat[:: (flat.numel() - 1) // _ADDED + 1 | 1].double()


def _widened(total: _Sum, accumulator: torch.Tensor, addend: torch.Tensor | float) -> _Sum:
    """A sum with one more addend in float64. It begins with what the accumulator holds."""
    wide = _sampled(accumulator, accumulator) if total.wide is None else total.wide
    return replace(total, wide=wide + addend)


def one_rounding(values: torch.Tensor, form: FloatFormat) -> float:
    """Euclidean norm of the error that one rounding of these float64 values to a format makes.

    That of uniformly distributed errors, an ULP over the square root of 12 each; of fewer than 16 values, which chance
    may favour, the bound of half an ULP.
    """
    return float(spacing(values, form).norm()) * (12**-0.5 if values.numel() >= 16 else 0.5)


def compare_sum(
    value: torch.Tensor, exact: torch.Tensor, spread: torch.Tensor, form: FloatFormat
) -> tuple[float, float, int]:
    """The Euclidean distance of a sum from the exact one, that of the exact sum rounded once, both relative to it, and
    how many elements are infinite or NaN where the exact ones are finite.

    A sum that nearly cancels is known no better than its addends, which were rounded before: spread is their size.
    """
    good = exact.isfinite() & value.isfinite()
    overflowed = int(exact.isfinite().sum() - good.sum())
    exact, value, spread = exact[good], value[good], spread[good]
    size = float(exact.norm()) or 1.0
    once = one_rounding(torch.maximum(exact.abs(), spread), form) if exact.numel() else 0.0
    return float((value - exact).norm()) / size, once / size, overflowed


def reduction_stats(watch: ReductionWatch, lineage: Lineage, subject: str) -> ReductionStats:
    """The sums and norms of a run that has ended."""
    sums, norms = tuple(watch.sums.values()), tuple(watch.norms.totals)
    seen = {"ops": lineage.ops, "running sums": len(sums), "total norms": len(norms)}
    return ReductionStats(subject, sums, norms, Coverage(seen, lineage.unfollowed))


def reduction_table(stats: ReductionStats) -> tuple[Table, ...]:
    """The running sums and total norms, the worst first; empty where there is none."""
    sums = sorted(stats.sums, key=lambda total: (not total.judged, -total.ratio))[:_ROWS]
    norms = sorted(stats.norms, key=lambda norm: (not norm.grouped, not norm.low))[: max(_ROWS - len(sums), 0)]
    rows: list[tuple[Scalar, ...]] = [
        (f"running sum ({total.kind})", total.where.place, total.format, total.addends, total.error, total.once)
        for total in sums
    ]
    rows += [
        ("total norm", total.where.place, total.format, total.terms, total.error, format_of(total.format).unit_roundoff)
        for total in norms
    ]
    columns = ("what", "where", "format", "addends", "relative error", "of one rounding")
    left = len(stats.sums) + len(stats.norms) - len(rows)
    note = f"{left} more are not listed" if left else ""
    return (Table("sums and norms in low precision", columns, rows, "reduce-precision", note),) if rows else ()
