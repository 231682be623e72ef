"""Sums of the packed statistics over the calls of a graph; they stay on its device until they are read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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

_STATISTICS = {
    **{name: name for name in ("amax", "smallest", "lost", "tiny", "kept", "number")},
    "zero": "lost",
    "finite": "kept",
    "nan": "number",
}
"""Names of `Layout`, each with the one that stands for it at a site that lacks it."""

_COUNTS = ("zeros", "flushed", "subnormals", "overflowed", "infs", "nans", "numel")
_MERGE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("amax", "lost", "newest"), torch.maximum),
    **dict.fromkeys(("smallest", "first"), torch.minimum),
}
_GRAPH_NUMBERS = itertools.count()
"""The order in which graphs first ran, over all graphs of the process."""

_Values: TypeAlias = "list[float] | list[int] | list[bool] | list[list[float]]"


class GraphAccumulators:
    """All calls of one graph, an accumulator for each owner. layout: of the packed vectors."""

    def __init__(self, sites: tuple[Site, ...], layout: Layout) -> None:
        self.sites, self.layout = sites, layout
        self._device: torch.device | None = None
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
        if self._device == device:
            return
        self._device = device
        numbers = range(len(self.sites))
        self.lost = _upload([thresholds(site)["lost"] for site in self.sites], device, torch.float64)
        self.written = _upload([site.infinite for site in self.sites], device)
        before = [[float(number in site.before) for number in numbers] for site in self.sites]
        self.before = _upload(before, device, torch.float64)
        column = {entry: number for number, entry in enumerate(self.layout.entries)}
        self._columns = {
            name: _upload([column.get((site, name), column.get((site, instead), 0)) for site in numbers], device)
            for name, instead in _STATISTICS.items()
        }
        numels = [math.nan if numel is None else float(numel) for numel in self.layout.numels]
        self._numel = _upload(numels, device, torch.float64)

    def counts(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The exclusive counts of each call and site, `[calls, sites]` in float64. packed: `[calls, entries]`."""
        seen = {name: packed[:, columns] for name, columns in self._columns.items()}
        numel = torch.where(self._numel.isnan(), seen["number"] + seen["nan"], self._numel)
        return {
            "amax": seen["amax"],
            "smallest": seen["smallest"],
            "zeros": seen["zero"],
            "flushed": seen["lost"] - seen["zero"],
            "subnormals": seen["tiny"] - seen["lost"],
            "overflowed": seen["finite"] - seen["kept"],
            "infs": seen["number"] - seen["finite"],
            "nans": numel - seen["number"],
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
    _waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, call: int, packed: torch.Tensor) -> None:
        """Add the statistics of one call."""
        self.measured += 1
        self._waiting.append((call, packed))
        if len(self._waiting) >= _SUMMED_AT:
            self._sum()

    def _sum(self) -> None:
        """Add the waiting calls to the sums."""
        if not self._waiting:
            return
        packed = torch.stack([vector for _, vector in self._waiting])
        tables, device = self.tables, device_of(packed)
        tables.upload(device)
        calls = _upload([call for call, _ in self._waiting], device)
        self._waiting.clear()
        counts = tables.counts(packed)
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
        self._sum()
        sums = {name: value.tolist() for name, value in self._sums.items()}
        for number, site in enumerate(self.tables.sites):
            known = {"smallest": math.inf, "first": math.inf} | {name: values[number] for name, values in sums.items()}
            yield SiteStats(
                where=replace(site.at, module=path_of(owner, site.base, site.at.module)),
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
