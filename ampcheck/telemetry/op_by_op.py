"""Statistics beside a compiled graph, which is compiled once and unchanged: its ops run a second time, one by one.

A fused kernel keeps its intermediate values in float32 registers, casts to 16 bits among them; a value is rounded where
it is written to memory for a library call. The second run does the same, so that it overflows and flushes nowhere where
no kernel would. Results come from the compiled graph alone: what its own kernels round or get wrong shows there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ampcheck.core.errors import brief
from ampcheck.ops.traits import traits
from ampcheck.telemetry.accumulators import Accumulator
from ampcheck.telemetry.graph_variants import copied_inputs
from ampcheck.telemetry.sites import CASTS, Site, moves
from ampcheck.telemetry.statistics import Layout, counted, numel_of, thresholds
from ampcheck.torchtools.interception import Runnable
from ampcheck.torchtools.private import OpOverload, without_autocast
from ampcheck.torchtools.restore import save_random_state

_NARROW = (torch.float16, torch.bfloat16)

_BELOW = ("tiny", "kept", "finite")
"""Counts of elements below their threshold; the others include it."""


class OpByOp:
    """A compiled graph, and the same graph uncompiled, whose ops run one by one while its sites are measured.

    compile: compiles the graph with the packed statistics of `layout_of(sites)` as its last output, for a graph with an
    op that has no kernel of its own. written: inputs that the graph writes to.
    """

    def __init__(
        self,
        plain: Runnable,
        module: fx.GraphModule,
        sites: Mapping[fx.Node, Site],
        compile: Callable[[], Runnable],
        written: frozenset[int],
    ) -> None:
        self.plain, self._written = plain, written
        self._compile: Callable[[], Runnable] | None = compile
        self._statistics: Callable[[list[Any]], torch.Tensor] | None = _Registers(module, sites).statistics
        self.failure = ""

    def run(self, inputs: list[Any], call: int, accumulator: Accumulator) -> Sequence[Any]:
        """Add the statistics of this call; returns what the compiled graph gives."""
        restore = save_random_state()
        packed = self._packed(inputs)
        restore()
        if packed is None and self._compile is not None:
            self._compile_instead()
            packed = self._packed(inputs)
            restore()
        if packed is not None:
            accumulator.add(call, packed)
        return self.plain(inputs)

    def _packed(self, inputs: list[Any]) -> torch.Tensor | None:
        if self._statistics is None:
            return None
        try:
            return self._statistics(copied_inputs(inputs, self._written))
        except Exception as error:  # noqa: BLE001  # the user's run goes on without statistics
            self._statistics, self.failure = None, brief(error)
            return None

    def _compile_instead(self) -> None:
        assert self._compile is not None
        try:
            compiled = self._compile()
        except Exception as error:  # noqa: BLE001  # the compiler may fail on the added ops
            self.failure = brief(error)
        else:
            self._statistics, self.failure = (lambda inputs: compiled(inputs)[-1]), ""
        self._compile = None

    def release(self) -> None:
        """Keep only the compiled graph."""
        self._statistics = self._compile = None

    def difference(self) -> None:
        """Measuring beside the compiled graph changes nothing that is to be compared."""

    def unseen(self) -> list[str]:
        """Return what was not measured, and why."""
        return [f"graphs whose statistics could not be computed: {self.failure}"] if self.failure else []


def layout_of(sites: Mapping[fx.Node, Site]) -> Layout:
    """The contents of the vector that `OpByOp` adds: all statistics, site by site."""
    numels = [numel_of(node) for node in sites]
    entries = (
        (number, name)
        for number, (site, numel) in enumerate(zip(sites.values(), numels, strict=True))
        for name in _names(site, numel is None)
    )
    return Layout(tuple(entries), tuple(numels))


def _names(site: Site, unknown_size: bool) -> tuple[str, ...]:
    return "amax", "smallest", *counted(site), *(("nan",) if unknown_size else ())


def _measured(value: torch.Tensor, site: Site, unknown_size: bool) -> torch.Tensor:
    """The statistics of a value in the order of `_names`, float64; see `Layout`."""
    magnitude, limits = value.float().abs(), thresholds(site)
    tests = {name: magnitude < limits[name] if name in _BELOW else magnitude <= limits[name] for name in counted(site)}
    above = magnitude > limits["zero" if site.cast else "lost"]
    smallest = torch.where(above, magnitude, math.inf).amin()
    amax = torch.where(tests["finite" if site.cast else "kept"], magnitude, 0.0).amax()
    if unknown_size:
        tests["nan"] = magnitude.isnan()
    return torch.stack([amax.double(), smallest.double(), *(test.count_nonzero().double() for test in tests.values())])


class _Registers(fx.Interpreter):
    """Runs a graph op by op. Values of 16 bits stay in float32 until an op reads them that is no part of a loop."""

    def __init__(self, module: fx.GraphModule, sites: Mapping[fx.Node, Site]) -> None:
        super().__init__(module)
        unknown = [numel is None for numel in layout_of(sites).numels]
        self._sites = {node: (site, size) for (node, site), size in zip(sites.items(), unknown, strict=True)}
        self._packed: list[torch.Tensor] = []

    def statistics(self, inputs: Sequence[Any]) -> torch.Tensor:
        """The statistics of all sites in one float64 vector."""
        self._packed = []
        try:
            with torch.no_grad(), without_autocast():
                self.run(*inputs, enable_io_processing=False)
                return torch.cat(self._packed)
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, measured where it is a site."""
        if n.op == "output":
            return None
        value = self._value(n)
        if n in self._sites:
            self._packed.append(_measured(value, *self._sites[n]))
        return value

    def _value(self, n: fx.Node) -> Any:
        """The value of a node: in float32 where a fused kernel holds a 16-bit value in a register."""
        if n.op != "call_function" or (moves(n.target) and n.target is not torch.ops.aten.view.dtype):
            return super().run_node(n)  # any dtype will do, but not where bits are reinterpreted
        value = n.meta.get("val")
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target in CASTS and isinstance(value, torch.Tensor) and value.dtype in _NARROW:
            return args[0].to(value.device, torch.float32)
        op = traits(n.target) if isinstance(n.target, OpOverload) else None
        loops = op is not None and (op.pointwise or op.reduces)
        if loops and not n.target._schema.is_mutable:  # type: ignore[union-attr]
            args, kwargs = fx.node.map_aggregate((args, kwargs), _widened)
        else:
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), self._written)
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _written(self, node: fx.Node) -> Any:
        """The value of a node, rounded to its own dtype as a write to memory rounds it."""
        value, declared = self.env[node], node.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(declared, torch.Tensor) and declared.dtype in _NARROW:
            return value.to(declared.dtype)
        return value


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value
