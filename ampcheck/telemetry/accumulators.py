"""The packed statistics of a graph's calls, kept on the device and added up there until somebody reads them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.telemetry.owners import Owner, path_of
from ampcheck.telemetry.sites import Site
from ampcheck.telemetry.statistics import Layout, thresholds
from ampcheck.telemetry.stats import SiteStats

_FOLDED_AT = 64
"""So many calls are kept apart before they are added up: few enough to be small, many enough to be rare."""


_SMALLEST = format_of("float32").smallest_subnormal
"""What flushes in bfloat16 is subnormal in float32: no larger number may stand for the largest of such a value."""


class Ledger:
    """All calls of one graph, an account for each owner."""

    def __init__(self, sites: tuple[Site, ...], lean: Layout, full: Layout) -> None:
        self._book = _Book(sites, lean, full)
        self._accounts: dict[int, Account] = {}
        """By owner, in the order of their first calls."""

    @property
    def measured(self) -> int:
        """Calls of which something is known."""
        return sum(account.measured for account in self._accounts.values())

    def of(self, owner: int) -> Account:
        """The account of an owner."""
        if owner not in self._accounts:
            self._accounts[owner] = Account(self._book, next(_TURNS))
        return self._accounts[owner]

    def read(self, owners: Mapping[int, Owner]) -> Iterator[SiteStats]:
        """What is known of each site and owner. Waits for the device."""
        for number, account in self._accounts.items():
            yield from account.read(owners.get(number, {}))


_TURNS = itertools.count()
"""In which order graphs ran first, over all of them."""


class _Book:
    """How the entries of the packed vectors of one graph become statistics, as tensors on its device."""

    def __init__(self, sites: tuple[Site, ...], lean: Layout, full: Layout) -> None:
        self.sites, self._lean, self._full = sites, lean, full
        self.device: torch.device | None = None

    def bring(self, device: torch.device) -> None:
        """Make the tables where the vectors are; not before a call, since a graph is compiled among fake tensors."""
        if self.device == device:
            return
        self.device = device
        limits = [thresholds(site) for site in self.sites]
        self.kept, self.lost, self.tiny = (self.row([one[name] for one in limits]) for name in ("kept", "lost", "tiny"))
        self.cast = _upload([site.cast for site in self.sites], device)
        self.written = _upload([site.infinite for site in self.sites], device)
        self.before = self.row([[float(i in site.before) for i in range(len(self.sites))] for site in self.sites])
        self.lean, self.full = _Columns(self._lean, self), _Columns(self._full, self)
        entries = frozenset(self._lean.entries)
        quiet = [_quiet(entry, entries, limits[entry[0]]) for entry in self._lean.entries]
        least, limit = zip(*quiet, strict=True)
        self.least, self.limit = self.row(least), self.row(limit)

    def row(self, values: Any) -> torch.Tensor:
        """Numbers as float64 on the device."""
        return _upload(values, self.device, torch.float64)

    def rings(self, packed: torch.Tensor) -> torch.Tensor:
        """Whether the lean statistics of a call do not tell everything: see `append_statistics`."""
        return (~(packed >= self.least) | (packed >= self.limit)).any()  # a NaN is at least nothing


def _quiet(
    entry: tuple[int, str], entries: Container[tuple[int, str]], limits: Mapping[str, float]
) -> tuple[float, float]:
    """From where on an entry of the lean statistics leaves nothing open, and from where on it does again."""
    site, name = entry
    if name == "amax" and (site, "kept") not in entries:
        return -math.inf, limits["kept"]
    if name == "smallest" and (site, "tiny") not in entries:
        return limits["tiny"], math.nan
    return -math.inf, math.nan


class _Columns:
    """Where each statistic of each site stands in a packed vector, and which of them are there."""

    def __init__(self, layout: Layout, book: _Book) -> None:
        self._book = book
        places: dict[str, dict[int, int]] = {name: {} for name in _NAMES}
        for place, (site, name) in enumerate(layout.entries):
            places[name][site] = place
        sites = range(len(layout.numels))
        on = book.device
        self.spots = {name: _upload([held.get(i, 0) for i in sites], on) for name, held in places.items()}
        self.has = {name: _upload([i in held for i in sites], on) for name, held in places.items()}
        self.numel = book.row([math.nan if n is None else float(n) for n in layout.numels])

    def decoded(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The exclusive counts of every call and site, each `[calls, sites]` in float64; packed is `[calls, entries]`.

        Where the lean statistics do not tell everything, a count is what is certain: at least one.
        """
        book = self._book

        def count(name: str, otherwise: torch.Tensor) -> torch.Tensor:
            return torch.where(self.has[name], packed[:, self.spots[name]], otherwise)

        nothing = torch.zeros_like(packed[:, self.spots["amax"]])
        known = count("number", nothing) + count("nan", nothing)
        numel = torch.where(self.numel.isnan(), known, self.numel)
        amax, smallest = packed[:, self.spots["amax"]], packed[:, self.spots["smallest"]]
        # NaN is not above anything: then what counts as lost is all that is certain.
        vague = self.has["above"] & amax.isnan()
        lowest = torch.where(vague, count("lost", nothing), numel - count("above", numel))
        zero = torch.where(book.cast, count("zero", lowest), count("lost", lowest))
        lost = count("lost", zero)
        kept = count("kept", numel)
        finite = torch.where(book.cast, count("finite", kept), kept)
        number = count("number", finite)
        unsure = ~self.has["kept"]
        over = unsure & (amax >= book.kept)
        faint = ~self.has["tiny"] & (smallest < book.tiny)
        return {
            "amax": torch.where(amax.isfinite() & ~(over & ~book.cast), amax, 0.0),
            "smallest": smallest,
            "zeros": zero,
            "flushed": lost - zero,
            "subnormals": count("tiny", lost + faint.double()) - lost,
            "overflowed": finite - kept + (over & book.cast & amax.isfinite()).double(),
            "infs": number - finite + (over & ~(book.cast & amax.isfinite())).double(),
            "nans": numel - number + (unsure & amax.isnan()).double(),
            "numel": numel,
        }


def _upload(values: Any, device: torch.device | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of plain values, brought to a device without waiting for it."""
    made = torch.tensor(values, dtype=dtype)
    if device is None or device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


_NAMES = ("amax", "smallest", "above", "zero", "lost", "tiny", "kept", "finite", "number", "nan")
_COUNTS = ("zeros", "flushed", "subnormals", "overflowed", "infs", "nans", "numel")


@dataclass(slots=True)
class Account:
    """The calls of one graph by one owner. turn: when it first ran; measured: how many calls are known of."""

    book: _Book
    turn: int = 0
    measured: int = 0
    _waiting: dict[bool, list[tuple[int, torch.Tensor]]] = field(default_factory=lambda: {True: [], False: []})
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _asked: list[tuple[Any, torch.Tensor]] = field(default_factory=list)

    def keep(self, call: int, packed: torch.Tensor, *, full: bool) -> None:
        """Keep the statistics of one call."""
        self.measured += 1
        waiting = self._waiting[full]
        waiting.append((call, packed))
        if len(waiting) >= _FOLDED_AT:
            self._fold(full)

    def rings(self, packed: torch.Tensor) -> bool:
        """Whether lean statistics leave something open. On a device the answer is that of earlier calls, so that
        nothing waits for it."""
        self.book.bring(packed.device)
        answer = self.book.rings(packed)
        return bool(answer) if packed.device.type == "cpu" else self._heard(answer)

    def _heard(self, answer: torch.Tensor) -> bool:
        """Whether an answer that has arrived meanwhile is a yes; none arrives from devices other than CUDA's."""
        if answer.device.type != "cuda":
            return False
        with torch.cuda.device(answer.device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copy = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(answer, non_blocking=True)
            event.record()
        self._asked.append((event, copy))
        arrived = 0
        while arrived < len(self._asked) and self._asked[arrived][0].query():
            arrived += 1
        done, self._asked = self._asked[:arrived], self._asked[arrived:]
        return any(bool(one) for _, one in done)

    def _fold(self, full: bool) -> None:
        """Add the waiting calls up."""
        waiting = self._waiting[full]
        if not waiting:
            return
        packed = torch.stack([vector for _, vector in waiting])
        book = self.book
        book.bring(packed.device)
        calls = _upload([call for call, _ in waiting], packed.device)
        waiting.clear()
        one = (book.full if full else book.lean).decoded(packed)
        over, inf, nan = one["overflowed"] > 0, one["infs"] > 0, one["nans"] > 0
        bad = over | inf | nan
        unasked = bad & ~book.written
        came_bad, came_nan, came_lost = ((v.double() @ book.before.T) > 0 for v in (bad, nan, unasked))
        vanished = (one["flushed"] > 0) & (one["flushed"] + one["zeros"] == one["numel"])
        lost = one["flushed"].sqrt() * book.lost / one["amax"].clamp_min(_SMALLEST)
        sums = {
            **{name: one[name].sum(0) for name in _COUNTS},
            "bad": bad.sum(0).double(),
            "born": (over | (inf & ~came_bad & ~book.written) | (nan & ~came_nan & ~came_lost)).sum(0).double(),
            "emptied": vanished.sum(0).double(),
            "amax": one["amax"].amax(0),
            "lost": lost.clamp_max(1.0).amax(0),
            "smallest": one["smallest"].amin(0),
            "first": torch.where(bad, calls[:, None].double(), math.inf).amin(0),
            "newest": calls.max().double().expand(bad.shape[1]),
            "last": bad[-1].double(),
        }
        self._sums = {name: _merged(name, self._sums, sums) for name in sums}

    def read(self, owner: Owner) -> Iterator[SiteStats]:
        """What is known of each site. Waits for the device."""
        for full in (False, True):
            self._fold(full)
        sums = {name: value.tolist() for name, value in self._sums.items()}
        for place, site in enumerate(self.book.sites):
            known = {name: values[place] for name, values in sums.items()}
            yield SiteStats(
                where=site.where(path_of(owner, site.base, site.module)),
                format=site.format,
                cast=site.cast,
                weight=path_of(owner, site.base, site.weight) if site.weight else "",
                nth=site.nth,
                order=(self.turn, site.order),
                calls=self.measured,
                amax=known.get("amax", 0.0),
                smallest=known.get("smallest", math.inf),
                last=bool(known.get("last", False)),
                first=-1 if known.get("first", math.inf) == math.inf else int(known["first"]),
                written=site.infinite,
                fed=site.fed,
                lost=known.get("lost", 0.0),
                **{name: int(known.get(name, 0)) for name in (*_COUNTS, "bad", "born", "emptied")},
            )


def _merged(name: str, sums: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in sums:
        return more[name]
    if name in ("amax", "lost", "newest"):
        return torch.maximum(sums[name], more[name])
    if name in ("smallest", "first"):
        return torch.minimum(sums[name], more[name])
    if name == "last":
        return torch.where(sums["newest"] > more["newest"], sums[name], more[name])
    return sums[name] + more[name]
