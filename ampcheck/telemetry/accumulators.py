"""Sums of the packed statistics over the calls of a graph; they stay on its device until they are read."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ampcheck.core.formats import format_of
from ampcheck.records.telemetry import SiteStats
from ampcheck.telemetry.owners import Owner, path_of
from ampcheck.telemetry.sites import Site
from ampcheck.telemetry.statistics import Layout, thresholds
from ampcheck.torchtools.storage import device_of

_SUMMED_AT = 64
"""Calls whose vectors are kept before they are summed: few enough to be small, many enough that sums are rare."""

_SMALLEST = format_of("float32").smallest_subnormal
"""A value that flushes in bfloat16 is subnormal in float32: no larger number may replace the amax of such a value."""

_STATISTICS = ("amax", "smallest", "above", "zero", "lost", "tiny", "kept", "finite", "number", "nan")
_COUNTS = ("zeros", "flushed", "subnormals", "overflowed", "infs", "nans", "numel")
_MERGE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("amax", "lost", "newest"), torch.maximum),
    **dict.fromkeys(("smallest", "first"), torch.minimum),
}
_GRAPH_NUMBERS = itertools.count()
"""The order in which graphs first ran, over all graphs of the process."""

_Values: TypeAlias = "list[float] | list[int] | list[bool] | list[list[float]]"


class GraphAccumulators:
    """All calls of one graph, an accumulator for each owner. layouts: of the lean and of the full vector."""

    def __init__(self, sites: tuple[Site, ...], lean: Layout, full: Layout) -> None:
        self.sites, self.layouts = sites, (lean, full)
        self.device: torch.device | None = None
        self._accumulators: dict[int, Accumulator] = {}

    @property
    def measured(self) -> int:
        """Measured calls of all owners."""
        return sum(accumulator.measured for accumulator in self._accumulators.values())

    def of(self, owner: int) -> Accumulator:
        """The accumulator of an owner."""
        if owner not in self._accumulators:
            self._accumulators[owner] = Accumulator(self, next(_GRAPH_NUMBERS))
        return self._accumulators[owner]

    def read(self, owners: Mapping[int, Owner]) -> Iterator[SiteStats]:
        """The statistics of each site and owner. Waits for the device."""
        for number, accumulator in self._accumulators.items():
            yield from accumulator.read(owners.get(number, {}))

    def upload(self, device: torch.device) -> None:
        """Create the tables on the device of the vectors; not before a call, since graphs compile with fake tensors."""
        if self.device == device:
            return
        self.device = device
        limits = [thresholds(site) for site in self.sites]
        self.kept, self.lost, self.tiny = (
            self.row([limit[name] for limit in limits]) for name in ("kept", "lost", "tiny")
        )
        self.cast = _upload([site.cast for site in self.sites], device)
        self.written = _upload([site.infinite for site in self.sites], device)
        self.before = self.row([[float(i in site.before) for i in range(len(self.sites))] for site in self.sites])
        self.decoders = tuple(_Decoder(layout, self) for layout in self.layouts)
        least, limit = [], []
        entries = frozenset(self.layouts[0].entries)
        for site, name in self.layouts[0].entries:
            open_end = name == "amax" and (site, "kept") not in entries
            open_start = name == "smallest" and (site, "tiny") not in entries
            least.append(limits[site]["tiny"] if open_start else -math.inf)
            limit.append(limits[site]["kept"] if open_end else math.nan)
        self._least, self._limit = self.row(least), self.row(limit)

    def row(self, values: _Values) -> torch.Tensor:
        """Numbers as float64 on the device."""
        return _upload(values, self.device, torch.float64)

    def is_incomplete(self, packed: torch.Tensor) -> torch.Tensor:
        """Whether the lean statistics of a call are incomplete: see `append_statistics`."""
        return (~(packed >= self._least) | (packed >= self._limit)).any()  # a NaN is not >= anything


class _Decoder:
    """Turns packed vectors of one layout into exclusive counts."""

    def __init__(self, layout: Layout, tables: GraphAccumulators) -> None:
        self._tables = tables
        columns: dict[str, dict[int, int]] = {name: {} for name in _STATISTICS}
        for column, (site, name) in enumerate(layout.entries):
            columns[name][site] = column
        sites = range(len(layout.numels))
        on = tables.device
        self._columns = {name: _upload([by_site.get(i, 0) for i in sites], on) for name, by_site in columns.items()}
        self._has = {name: _upload([i in by_site for i in sites], on) for name, by_site in columns.items()}
        self._numel = tables.row([math.nan if n is None else float(n) for n in layout.numels])

    def __call__(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The exclusive counts of every call and site, each `[calls, sites]` in float64; packed is `[calls, entries]`.

        Where the lean statistics are incomplete, a count is what is certain: at least one.
        """
        tables = self._tables

        def count(name: str, otherwise: torch.Tensor) -> torch.Tensor:
            return torch.where(self._has[name], packed[:, self._columns[name]], otherwise)

        amax, smallest = packed[:, self._columns["amax"]], packed[:, self._columns["smallest"]]
        nothing = torch.zeros_like(amax)
        numel = torch.where(self._numel.isnan(), count("number", nothing) + count("nan", nothing), self._numel)
        # NaN is not above anything: then only what counts as lost is certain.
        vague = self._has["above"] & amax.isnan()
        lowest = torch.where(vague, count("lost", nothing), numel - count("above", numel))
        zero = torch.where(tables.cast, count("zero", lowest), count("lost", lowest))
        lost = count("lost", zero)
        kept = count("kept", numel)
        finite = torch.where(tables.cast, count("finite", kept), kept)
        number = count("number", finite)
        unsure = ~self._has["kept"]
        over = unsure & (amax >= tables.kept)
        faint = ~self._has["tiny"] & (smallest < tables.tiny)
        overflows = over & tables.cast & amax.isfinite()
        return {
            "amax": torch.where(amax.isfinite() & ~(over & ~tables.cast), amax, 0.0),
            "smallest": smallest,
            "zeros": zero,
            "flushed": lost - zero,
            "subnormals": count("tiny", lost + faint.double()) - lost,
            "overflowed": finite - kept + overflows.double(),
            "infs": number - finite + (over & ~overflows).double(),
            "nans": numel - number + (unsure & amax.isnan()).double(),
            "numel": numel,
        }


def _upload(values: _Values, device: torch.device | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of plain values, copied to a device without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")  # whatever default device the run has left
    if device is None or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(slots=True)
class Accumulator:
    """The calls of one graph by one owner. order: when it first ran; measured: how many calls were measured."""

    tables: GraphAccumulators
    order: int = 0
    measured: int = 0
    _waiting: dict[bool, list[tuple[int, torch.Tensor]]] = field(default_factory=lambda: defaultdict(list))
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _answers: list[tuple[torch.cuda.Event, torch.Tensor]] = field(default_factory=list)

    def add(self, call: int, packed: torch.Tensor, *, full: bool) -> None:
        """Add the statistics of one call."""
        self.measured += 1
        self._waiting[full].append((call, packed))
        if len(self._waiting[full]) >= _SUMMED_AT:
            self._sum(full)

    def is_incomplete(self, packed: torch.Tensor) -> bool:
        """Whether lean statistics are incomplete. On CUDA the answer is that of earlier calls, so that nothing waits
        for the device; on other devices the answer is no."""
        device = device_of(packed)
        self.tables.upload(device)
        answer = self.tables.is_incomplete(packed)
        if device.type != "cuda":
            return device.type == "cpu" and bool(answer)
        with torch.cuda.device(answer.device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copy = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu").copy_(answer, non_blocking=True)
            event.record()
        self._answers.append((event, copy))
        arrived = list(itertools.takewhile(lambda pending: pending[0].query(), self._answers))  # type: ignore[no-untyped-call]
        self._answers = self._answers[len(arrived) :]
        return any(bool(copy) for _, copy in arrived)

    def _sum(self, full: bool) -> None:
        """Add the waiting calls to the sums."""
        waiting = self._waiting.pop(full, None)
        if not waiting:
            return
        packed = torch.stack([vector for _, vector in waiting])
        tables = self.tables
        tables.upload(device_of(packed))
        calls = _upload([call for call, _ in waiting], device_of(packed))
        counts = tables.decoders[full](packed)
        over, inf, nan = counts["overflowed"] > 0, counts["infs"] > 0, counts["nans"] > 0
        bad = over | inf | nan
        # Whether any site that this one was computed from is bad, is NaN, is bad and not written as a mask.
        came_bad, came_nan, came_lost = ((v.double() @ tables.before.T) > 0 for v in (bad, nan, bad & ~tables.written))
        emptied = (counts["flushed"] > 0) & (counts["flushed"] + counts["zeros"] == counts["numel"])
        lost = counts["flushed"].sqrt() * tables.lost / counts["amax"].clamp_min(_SMALLEST)
        sums = {
            **{name: counts[name].sum(0) for name in _COUNTS},
            "bad": bad.sum(0).double(),
            "born": (over | (inf & ~came_bad & ~tables.written) | (nan & ~came_nan & ~came_lost)).sum(0).double(),
            "emptied": emptied.sum(0).double(),
            "amax": counts["amax"].amax(0),
            "lost": lost.clamp_max(1.0).amax(0),
            "smallest": counts["smallest"].amin(0),
            "first": torch.where(bad, calls[:, None].double(), math.inf).amin(0),
            "newest": calls.max().double().expand(bad.shape[1]),
            "last": bad[-1].double(),
        }
        if before := self._sums:
            last = torch.where(before["newest"] > sums["newest"], before["last"], sums["last"])
            sums = {name: _MERGE.get(name, torch.add)(before[name], value) for name, value in sums.items()}
            sums["last"] = last
        self._sums = sums

    def read(self, owner: Owner) -> Iterator[SiteStats]:
        """The statistics of each site. Waits for the device."""
        for full in (False, True):
            self._sum(full)
        sums = {name: value.tolist() for name, value in self._sums.items()}
        for number, site in enumerate(self.tables.sites):
            known = {"smallest": math.inf, "first": math.inf} | {name: values[number] for name, values in sums.items()}
            yield SiteStats(
                where=site.where(path_of(owner, site.base, site.module)),
                format=site.format,
                cast=site.cast,
                weight=path_of(owner, site.base, site.weight) if site.weight else "",
                nth=site.nth,
                order=(self.order, site.order),
                calls=self.measured,
                amax=known.get("amax", 0.0),
                smallest=known["smallest"],
                last=bool(known.get("last", False)),
                first=-1 if known["first"] == math.inf else int(known["first"]),
                written=site.infinite,
                fed=site.fed,
                lost=known.get("lost", 0.0),
                **{name: int(known.get(name, 0)) for name in (*_COUNTS, "bad", "born", "emptied")},
            )
