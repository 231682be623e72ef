"""Access to Inductor's graphs through its documented pass hook, for a release whose other interfaces are not known.

`torch._inductor.config.post_grad_custom_pre_pass` (2.3 and later) receives each graph before it is lowered, and may
change it. It cannot return two graphs or add an output: an op passes the packed statistics on, in every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import fx

from ampcheck.telemetry.sites import Level, Site, select_sites
from ampcheck.telemetry.statistics import Layout, append_statistics
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.interception import BACKWARD, FORWARD

Sink: TypeAlias = "Callable[[torch.Tensor], None]"
"""Accumulates the packed statistics of one call, in a tensor of its own."""

_SINKS: dict[int, Sink] = {}
_SLOTS = itertools.count()
_HOOK = "torch._inductor.config.post_grad_custom_pre_pass"
_CACHES = ("torch._inductor.config.fx_graph_cache", "torch._functorch.config.enable_autograd_cache")


@contextmanager
def instrumented(
    level: Level, sink_of: Callable[[str, tuple[Site, ...], Layout], Sink], on_error: Callable[[Exception], None]
) -> Iterator[None]:
    """Add statistics to every graph that Inductor compiles inside.

    sink_of: returns the sink of a graph from its phase, sites and layout. on_error: receives the reason why a graph
    could not be measured. Compiled code is neither taken from caches nor put into them meanwhile: statistics belong to
    this process. Raises `UsageError` where the hook is missing.
    """

    def custom_pass(graph: fx.Graph) -> None:
        before(graph)
        try:
            tangents = any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)
            phase = BACKWARD if tangents else FORWARD
            sites = select_sites(graph, level, phase)
            if sites and (module := graph.owning_module) is not None:
                layout = append_statistics(module, sites, full=True)
                _redirect_statistics(graph, sink_of(phase, tuple(sites.values()), layout))
        except Exception as error:  # noqa: BLE001  # an unknown construct in the graph must not end the user's run
            on_error(error)

    before = dynamo.setting(_HOOK) or (lambda graph: None)
    with dynamo.configured({_HOOK: custom_pass, **dict.fromkeys(_CACHES, False)}):
        yield


def available() -> bool:
    """Whether this release has the hook."""
    try:
        for name in (_HOOK, *_CACHES):
            dynamo.setting(name)
    except (ImportError, AttributeError):
        return False
    return True


def _redirect_statistics(graph: fx.Graph, sink: Sink) -> None:
    """Pass the last output, the packed statistics, to a sink instead."""
    output = list(graph.nodes)[-1]
    *outputs, packed = output.args[0]
    output.args = (tuple(outputs),)
    slot = next(_SLOTS)
    _SINKS[slot] = sink
    with graph.inserting_before(output):
        graph.call_function(_sink_op(), (packed, slot)).meta["val"] = None


def _sink_op() -> torch._ops.OpOverload:
    """The op that passes statistics on. It declares that it writes to them, since an op without effect is removed."""
    if not hasattr(torch.ops.ampcheck, "take_statistics"):
        unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # a replay would not call it (2.9)
        tags = (unsafe,) if unsafe is not None else None

        @torch.library.custom_op("ampcheck::take_statistics", mutates_args=("packed",), tags=tags)
        def take_statistics(packed: torch.Tensor, slot: int) -> None:
            _SINKS[slot](packed.clone())

    op: torch._ops.OpOverload = torch.ops.ampcheck.take_statistics.default
    return op
