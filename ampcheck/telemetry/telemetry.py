"""The plain graph and its measured twin side by side, sampled without a recompilation, and what they gave.

Every graph that Inductor compiles while a `Telemetry` watches is compiled twice: as it is, and with its statistics as
one more output. A flag outside of Dynamo's sight decides at each call which of the two runs. Nothing is read from the
device before `read`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ampcheck.core.errors import brief
from ampcheck.telemetry.accumulators import Ledger
from ampcheck.telemetry.graph_variants import Twins, runs_once, written_inputs
from ampcheck.telemetry.owners import NOBODY, Names, Owner, Owners
from ampcheck.telemetry.passes import available, passing
from ampcheck.telemetry.sites import Level, Site, of_unknown_size, select_sites, split_source
from ampcheck.telemetry.statistics import Layout, append_statistics
from ampcheck.telemetry.stats import SiteStats, TelemetryStats
from ampcheck.torchtools.interception import BACKWARD, LoweredGraph, Runnable, intercepted, unsupported

_LINKS = 100_000
"""How many addresses are remembered to tell which forward call a backward call belongs to."""

_ELSEWHERE = "graphs whose outputs lie otherwise in memory when they are measured"


@dataclass(slots=True)
class _Graph:
    """One instrumented graph. saved: places of the outputs that tell in backward whose call it was; links: whose they
    are, by address, None for modules that are not watched; strangers: whether such ran; known: the owners so far."""

    phase: str
    sites: tuple[Site, ...]
    ledger: Ledger
    owners: Owners
    twins: Twins | None = None
    saved: tuple[int, ...] = ()
    calls: Counter[int] = field(default_factory=Counter)
    links: dict[int, Owner | None] = field(default_factory=dict)
    strangers: bool = False
    forward: _Graph | None = None
    known: dict[int, Owner] = field(default_factory=dict)


class Telemetry:
    """Statistics of every graph that is compiled inside `watching`.

    roots: the modules whose parameters name what runs; graphs that run with none of their parameters are left alone,
    unless there are no roots. level: how much is measured. every: measure each N-th call of a graph (by the same
    modules), the first among them. aside: results come from the plain graphs in the measured calls as well, which
    then run twice.
    """

    def __init__(
        self,
        roots: Sequence[torch.nn.Module] = (),
        *,
        level: Level = Level.CASTS,
        every: int = 1,
        aside: bool = False,
    ) -> None:
        self.level, self.every, self.aside = level, every, aside
        self.on = True
        self._names = Names(roots)
        self._graphs: list[_Graph] = []
        self._forwards: dict[int, _Graph] = {}
        self._unseen: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Instrument what is compiled inside and measure what runs inside; afterwards the plain graphs run."""
        self.on = True
        try:
            with self._way():
                yield
        finally:
            self.on = False

    def release(self) -> None:
        """Measure no more, and hold the modules no longer: compiled code lives on in Dynamo's cache, and what it refers
        to with it. What was seen stays."""
        self.on = False
        for graph in self._graphs:
            graph.links.clear()
            if graph.twins is not None:
                graph.twins.release()
        self._names.release()

    def _way(self) -> AbstractContextManager[None]:
        """How the graphs of this release are come by."""
        if not unsupported():
            return intercepted(self._instrument)
        return passing(self.level, self._taking, self._lost) if available() else nullcontext()

    def _taking(self, phase: str, sites: tuple[Site, ...], layout: Layout) -> Callable[[torch.Tensor], None]:
        """Where a graph of which nothing but its ops is known puts the statistics of its calls."""
        graph = _Graph(phase, sites, Ledger(sites, layout, layout), Owners(self._names, ()))
        self._graphs.append(graph)
        self._unseen["graphs that the documented hook gave: measured in every call, paths within a frame only"] += 1

        def keep(packed: torch.Tensor) -> None:
            if self.on:
                call = graph.calls[id(NOBODY)]
                graph.calls[id(NOBODY)] = call + 1
                graph.known[id(NOBODY)] = NOBODY
                if call % self.every == 0:
                    graph.ledger.of(id(NOBODY)).keep(call, packed, full=True)

        return keep

    def _lost(self, error: Exception) -> None:
        self._unseen[f"graphs to which no statistics could be added: {brief(error)}"] += 1

    def _instrument(self, lowered: LoweredGraph) -> Runnable:
        if not self.on:  # a backward of a forward inside the block that is compiled after it
            return lowered.compiled()
        lean, full = lowered.copied(), lowered.copied()
        written = written_inputs(lowered.module)
        sites, layouts = {}, []
        try:
            for module in (full, lean):
                sites = select_sites(module.graph, self.level, lowered.phase, lowered.sources)
                layouts.append(append_statistics(module, sites, full=module is full) if sites else None)
        except Exception as error:  # noqa: BLE001  # whatever a graph holds that we do not know, the user's run goes on
            self._lost(error)
            return lowered.compiled()
        if unknown := of_unknown_size(lowered.module.graph):
            self._unseen["values whose size depends on data"] += unknown
        if layouts[0] is None or layouts[1] is None:
            self._unseen[f"graphs without a value to measure at level {self.level.value!r}"] += 1
            return lowered.compiled()
        alone = runs_once(lowered.module)
        plain = lowered.compiled()
        try:
            later = lowered.later(full)
            run, strides = lowered.variant(lean)
        except Exception as error:  # noqa: BLE001  # as above: the compiler may choke on what was added
            self._unseen[f"graphs that could not be compiled with statistics: {brief(error)}"] += 1
            return plain
        if strides and lowered.strides() and strides[:-1] != lowered.strides():
            self._unseen[_ELSEWHERE] += 1
            return plain
        twins = Twins(plain, run, later, written, lowered.donated, alone, self.aside)
        graph = _Graph(
            phase=lowered.phase,
            sites=tuple(sites.values()),
            ledger=Ledger(tuple(sites.values()), layouts[1], layouts[0]),
            owners=Owners(self._names, lowered.sources),
            twins=twins,
            saved=_telling(lowered),
        )
        self._graphs.append(graph)
        if lowered.phase == BACKWARD:
            graph.forward = self._forwards.get(lowered.key)
        else:
            self._forwards[lowered.key] = graph
        return self._running(graph, twins)

    def _running(self, graph: _Graph, twins: Twins) -> Runnable:
        def run(inputs: list[Any]) -> Sequence[Any]:
            if not self.on:
                return twins.plain(inputs)
            owner = self._owner(graph, inputs)
            if owner is None:
                outputs = twins.plain(inputs)
            else:
                call = graph.calls[id(owner)]
                graph.calls[id(owner)] = call + 1
                due = call % self.every == 0
                outputs = twins.run(inputs, call, graph.ledger.of(id(owner))) if due else twins.plain(inputs)
            self._link(graph, outputs, owner)
            return outputs

        return run

    def _owner(self, graph: _Graph, inputs: Sequence[Any]) -> Owner | None:
        """Whose call this is; None where it is none of the watched modules'."""
        if graph.phase == BACKWARD and graph.forward is not None:
            owner = self._linked(graph.forward, inputs)
        else:
            owner = graph.owners.of(inputs)
            if not owner and graph.owners.has_weights and self._names:
                graph.strangers = True
                owner = None
        if owner is not None:
            graph.known.setdefault(id(owner), owner)
        return owner

    @staticmethod
    def _link(graph: _Graph, outputs: Sequence[Any], owner: Owner | None) -> None:
        """Remember whose forward call made what backward is given: addresses are unique while backward needs them."""
        if len(graph.links) > _LINKS:
            graph.links.clear()
        for place in graph.saved:
            value = outputs[place]
            if isinstance(value, torch.Tensor) and value.numel():
                graph.links[value.data_ptr()] = owner
                if len(graph.known) == 1 and not graph.strangers:
                    break

    @staticmethod
    def _linked(forward: _Graph, inputs: Sequence[Any]) -> Owner | None:
        """Whose forward call a backward call belongs to; None where it is none of the watched modules'."""
        if len(forward.known) <= 1 and not forward.strangers:
            return next(iter(forward.known.values()), None)
        for value in inputs:
            if isinstance(value, torch.Tensor) and value.numel() and value.data_ptr() in forward.links:
                return forward.links[value.data_ptr()]
        return None if forward.strangers else NOBODY

    def read(self, subject: str = "") -> TelemetryStats:
        """What was seen so far. Waits for the device."""
        skipped = unsupported() if not available() else ""
        found: dict[Any, SiteStats] = {}
        for graph in self._graphs:
            for stats in graph.ledger.read(graph.known):
                found[stats.key] = found[stats.key] + stats if stats.key in found else stats
        measured = [graph for graph in self._graphs if graph.calls]
        twins = [graph.twins for graph in self._graphs if graph.twins is not None]
        differences = [difference for both in twins if (difference := both.difference()) is not None]
        unseen = Counter(self._unseen)
        unseen.update(f"graphs whose full statistics could not be compiled: {t.failure}" for t in twins if t.failure)
        if elsewhere := sum(both.elsewhere for both in twins):
            unseen[_ELSEWHERE] += elsewhere
        unseen.update(both.alone for both in twins if both.alone)
        if silent := sum(not graph.calls for graph in self._graphs):
            unseen["instrumented graphs that never ran for a watched module"] += silent
        return TelemetryStats(
            subject=subject,
            level=self.level.value,
            every=self.every,
            sites=tuple(sorted(found.values(), key=lambda s: (s.where.phase == BACKWARD, s.order))),
            graphs=len(measured),
            calls=sum(sum(graph.calls.values()) for graph in measured),
            measured=sum(graph.ledger.measured for graph in measured),
            perturbation=max(differences, default=None),
            perturbed=sum(d > 0 for d in differences),
            skipped=skipped,
            unseen=dict(unseen),
        )


def _telling(lowered: LoweredGraph) -> tuple[int, ...]:
    """The places of saved outputs that no two owners can have in common, which an input of the graph may be in both."""
    nodes = list(lowered.module.graph.nodes)
    sources = dict(zip([node for node in nodes if node.op == "placeholder"], lowered.sources, strict=False))

    def belongs(node: Any) -> bool:
        while isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload):
            returned = node.target._schema.returns
            if not returned or returned[0].alias_info is None or not node.args:
                return True
            node = node.args[0]
        return bool(split_source(sources.get(node, ""))[1])

    return tuple(place for place in lowered.saved if belongs(nodes[-1].args[0][place]))
