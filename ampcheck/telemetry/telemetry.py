"""Sampled statistics of compiled graphs, without a recompilation.

Every graph that Inductor compiles while a `Telemetry` watches is compiled twice: plain, and with its statistics as one
more output. A flag that Dynamo does not see decides at each call which of the two runs. For a few calls it is compiled
once and its statistics are computed beside it (`aside`). Nothing is read from the device before `read`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ampcheck.core.errors import brief
from ampcheck.core.run import Where
from ampcheck.records.telemetry import SiteStats, TelemetryStats
from ampcheck.telemetry.accumulators import GraphAccumulators
from ampcheck.telemetry.graph_variants import OTHER_STRIDES, GraphVariants, runs_once, written_inputs
from ampcheck.telemetry.op_by_op import OpByOp, layout_of
from ampcheck.telemetry.owners import NO_OWNER, Owner, Owners, TensorNames
from ampcheck.telemetry.sites import Level, Site, of_unknown_size, ops_in_16_bits, select_sites, split_source
from ampcheck.telemetry.statistics import append_statistics
from ampcheck.torchtools.interception import BACKWARD, LoweredGraph, Runnable, intercepted, unsupported
from ampcheck.torchtools.private import OpOverload

_ADDRESSES = 100_000
"""Addresses of saved tensors that are remembered to attribute backward calls to forward calls."""


@dataclass(slots=True)
class _Graph:
    """One instrumented graph. saved: numbers of the outputs that identify in backward whose call it was; owner_at: the
    owners of these outputs by address, None for modules that are not watched; others_ran: whether such a module ran;
    known: the owners so far."""

    phase: str
    accumulators: GraphAccumulators
    owners: Owners
    variants: GraphVariants | OpByOp
    saved: tuple[int, ...]
    calls: Counter[int] = field(default_factory=Counter)
    owner_at: dict[int, Owner | None] = field(default_factory=dict)
    others_ran: bool = False
    forward: _Graph | None = None
    known: dict[int, Owner] = field(default_factory=dict)

    def next_call(self, owner: Owner) -> int:
        """The number of this call among those of its owner, from 0."""
        self.calls[id(owner)] += 1
        return self.calls[id(owner)] - 1

    def owner(self, inputs: Sequence[Any], names: TensorNames) -> Owner | None:
        """The owner of a call; None for modules that are not watched."""
        if self.phase == BACKWARD and self.forward is not None:
            owner = self.forward._owner_of_saved(inputs)
        else:
            owner = self.owners.of(inputs)
            if not owner and self.owners.has_weights and names:
                self.others_ran = True
                owner = None
        if owner is not None:
            self.known.setdefault(id(owner), owner)
        return owner

    def remember(self, outputs: Sequence[Any], owner: Owner | None) -> None:
        """Record which owner's forward saved these tensors: addresses are unique while backward needs them."""
        if len(self.owner_at) > _ADDRESSES:
            self.owner_at.clear()
        for number in self.saved:
            value = outputs[number]
            if isinstance(value, torch.Tensor) and value.numel():
                self.owner_at[value.data_ptr()] = owner
                if len(self.known) == 1 and not self.others_ran:
                    break

    def _owner_of_saved(self, inputs: Sequence[Any]) -> Owner | None:
        if len(self.known) <= 1 and not self.others_ran:
            return next(iter(self.known.values()), None)
        for value in inputs:
            if isinstance(value, torch.Tensor) and value.numel() and value.data_ptr() in self.owner_at:
                return self.owner_at[value.data_ptr()]
        return None if self.others_ran else NO_OWNER


class Telemetry:
    """Statistics of every graph that is compiled inside `watching`.

    roots: the modules whose parameters identify the owner of a call; graphs that run with none of their parameters are
    not measured, unless there are no roots. level: how much is measured. every: measure each N-th call of a graph (by
    the same modules), the first among them. aside: results come from the plain graphs in the measured calls as well,
    beside which their ops run one by one (`OpByOp`): nothing more is compiled, and a measured call takes longer.
    in_16_bits: the ops of all graphs that compute in 16 bits alone.
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
        self.in_16_bits: list[Where] = []
        self._names = TensorNames(roots)
        self._graphs: list[_Graph] = []
        self._forwards: dict[int, _Graph] = {}
        self._unseen: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Instrument what is compiled inside and measure what runs inside; afterwards the plain graphs run."""
        self.on = True
        try:
            with nullcontext() if unsupported() else intercepted(self._instrument):
                yield
        finally:
            self.on = False

    def release(self) -> None:
        """Stop measuring and drop references to the modules: compiled code stays in Dynamo's cache, and what it refers
        to with it. The statistics stay."""
        self.on = False
        for graph in self._graphs:
            graph.owner_at.clear()
            graph.variants.release()
        self._names.release()

    def _instrument(self, lowered: LoweredGraph) -> Runnable:
        if not self.on:  # a backward of a forward inside the block that is compiled after it
            return lowered.compiled()
        self.in_16_bits += ops_in_16_bits(lowered.module.graph, lowered.phase)
        single_run = runs_once(lowered.module)
        beside = self.aside and not single_run
        measured, written = lowered.copied(), written_inputs(lowered.module)
        spare = lowered.copied() if beside else measured
        try:
            sites = self._sites(lowered, measured)
            if sites:
                layout = layout_of(sites) if beside else append_statistics(measured, sites)
        except Exception as error:  # noqa: BLE001  # an unknown construct in the graph must not end the user's run
            self._unseen[f"graphs to which no statistics could be added: {brief(error)}"] += 1
            return lowered.compiled()
        if unknown := of_unknown_size(lowered.module.graph):
            self._unseen["values whose size depends on data"] += unknown
        if not sites:
            self._unseen[f"graphs without a value to measure at level {self.level.value!r}"] += 1
            return lowered.compiled()
        plain = lowered.compiled()
        variants: GraphVariants | OpByOp
        if beside:
            later = lowered.later(spare)

            def compile() -> Runnable:
                entries = append_statistics(spare, self._sites(lowered, spare)).entries
                order, run = [entries.index(entry) for entry in layout.entries], later()
                return lambda inputs: (run(inputs)[-1][order],)

            variants = OpByOp(plain, measured, sites, compile, written)
        elif (compiled := self._compiled(lowered, measured)) is not None:
            variants = GraphVariants(plain, compiled, written, lowered.donated, single_run)
        else:
            return plain
        accumulators = GraphAccumulators(tuple(sites.values()), layout)
        owners = Owners(self._names, lowered.sources)
        graph = _Graph(lowered.phase, accumulators, owners, variants, _identifying_outputs(lowered))
        self._graphs.append(graph)
        if lowered.phase == BACKWARD:
            graph.forward = self._forwards.get(lowered.key)
        else:
            self._forwards[lowered.key] = graph
        return self._measuring(graph)

    def _sites(self, lowered: LoweredGraph, module: fx.GraphModule) -> dict[fx.Node, Site]:
        """The sites in a copy of the graph."""
        return select_sites(module.graph, self.level, lowered.phase, lowered.sources)

    def _compiled(self, lowered: LoweredGraph, module: fx.GraphModule) -> Runnable | None:
        """The graph with its statistics, compiled; None where that fails or changes the layout of an output."""
        try:
            run, strides = lowered.variant(module)
        except Exception as error:  # noqa: BLE001  # the compiler may fail on the added ops
            self._unseen[f"graphs that could not be compiled with statistics: {brief(error)}"] += 1
            return None
        if strides and lowered.strides() and strides[:-1] != lowered.strides():
            self._unseen[OTHER_STRIDES] += 1
            return None
        return run

    def _measuring(self, graph: _Graph) -> Runnable:
        """A graph that measures every n-th call of an owner, while telemetry is on."""
        variants = graph.variants

        def run(inputs: list[Any]) -> Sequence[Any]:
            if not self.on:
                return variants.plain(inputs)
            owner = graph.owner(inputs, self._names)
            if owner is None or (call := graph.next_call(owner)) % self.every:
                outputs = variants.plain(inputs)
            else:
                outputs = variants.run(inputs, call, graph.accumulators.of(id(owner)))
            graph.remember(outputs, owner)
            return outputs

        return run

    def read(self, subject: str = "") -> TelemetryStats:
        """The statistics so far. Waits for the device."""
        sites: dict[object, SiteStats] = {}
        for graph in self._graphs:
            for stats in graph.accumulators.read(graph.known):
                sites[stats.key] = sites[stats.key] + stats if stats.key in sites else stats
        measured = [graph for graph in self._graphs if graph.calls]
        variants = [graph.variants for graph in self._graphs]
        differences = [difference for v in variants if (difference := v.difference()) is not None]
        unseen = Counter(self._unseen)
        unseen.update(text for v in variants for text in v.unseen())
        silent = "instrumented graphs that never ran for a watched module"
        unseen.update(silent for graph in self._graphs if not graph.calls)
        return TelemetryStats(
            subject=subject,
            level=self.level.value,
            every=self.every,
            sites=tuple(sorted(sites.values(), key=lambda s: (s.where.phase == BACKWARD, s.order))),
            graphs=len(measured),
            calls=sum(sum(graph.calls.values()) for graph in measured),
            measured=sum(graph.accumulators.measured for graph in measured),
            perturbation=max(differences, default=None),
            perturbed=sum(d > 0 for d in differences),
            skipped=unsupported(),
            unseen=dict(unseen),
        )


def _identifying_outputs(lowered: LoweredGraph) -> tuple[int, ...]:
    """The numbers of saved outputs that no two owners have in common, unlike inputs of the graph."""
    nodes = list(lowered.module.graph.nodes)
    sources = dict(zip([node for node in nodes if node.op == "placeholder"], lowered.sources, strict=False))

    def belongs_to_owner(node: object) -> bool:
        while isinstance(node, fx.Node) and isinstance(node.target, OpOverload):
            returns = node.target._schema.returns
            if not returns or returns[0].alias_info is None or not node.args:
                return True
            node = node.args[0]
        return bool(split_source(sources.get(node, ""))[1])

    return tuple(number for number in lowered.saved if belongs_to_owner(nodes[-1].args[0][number]))
