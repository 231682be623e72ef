"""The way into Inductor's graphs through its documented pass hook, for a release whose other interfaces are not known.

`torch._inductor.config.post_grad_custom_pre_pass` (2.3 and later) is handed each graph before it is lowered, and may
change it. It cannot give a graph twice or another output: so an op takes the packed statistics out, in every call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import fx

from ampcheck.telemetry.sites import Level, Site, select_sites
from ampcheck.telemetry.statistics import Layout, append_statistics
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.interception import BACKWARD, FORWARD

Keep = Callable[[torch.Tensor], None]
"""What is done with the packed statistics of one call; the tensor is nobody else's."""

_KEEPERS: dict[int, Keep] = {}
_LOCK = threading.Lock()


@contextmanager
def passing(
    level: Level, take: Callable[[str, tuple[Site, ...], Layout], Keep], lost: Callable[[Exception], None]
) -> Iterator[None]:
    """Add statistics to every graph that Inductor compiles inside.

    take: is told of each graph (its phase, sites and layout) and says what to do with the statistics of its calls;
    lost: is told why a graph could not be measured. Compiled code is neither taken from caches nor put into them
    meanwhile: statistics belong to this process. Raises `UsageError` where the hook is missing.
    """

    def changed(graph: fx.Graph) -> None:
        before(graph)
        try:
            phase = BACKWARD if any(_is_tangent(node) for node in graph.nodes) else FORWARD
            sites = select_sites(graph, level, phase)
            if sites and (module := graph.owning_module) is not None:
                _append(module, sites, lambda layout: take(phase, tuple(sites.values()), layout))
        except Exception as error:  # noqa: BLE001  # whatever a graph holds that we do not know, the user's run goes on
            lost(error)

    before = dynamo.setting(_HOOK) or (lambda graph: None)
    with dynamo.configured({_HOOK: changed, **dict.fromkeys(_CACHES, False)}):
        yield


_HOOK = "torch._inductor.config.post_grad_custom_pre_pass"
_CACHES = ("torch._inductor.config.fx_graph_cache", "torch._functorch.config.enable_autograd_cache")


def available() -> bool:
    """Whether this release has the hook."""
    try:
        for name in (_HOOK, *_CACHES):
            dynamo.setting(name)
    except (ImportError, AttributeError):
        return False
    return True


def _append(module: fx.GraphModule, sites: dict[fx.Node, Site], take: Callable[[Layout], Keep]) -> None:
    layout = append_statistics(module, sites, full=True)
    graph = module.graph
    output = list(graph.nodes)[-1]
    *outputs, packed = output.args[0]
    output.args = (tuple(outputs),)
    with _LOCK:
        slot = len(_KEEPERS)
        _KEEPERS[slot] = take(layout)
    with graph.inserting_before(output):
        graph.call_function(_taker(), (packed, slot)).meta["val"] = None


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("tangents")


def _taker() -> torch._ops.OpOverload:
    """The op that hands statistics out. It says that it writes to them, since an op without an effect is removed."""
    if not hasattr(torch.ops.ampcheck, "take_statistics"):
        unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # a replay would not come by here (2.9)
        tags = (unsafe,) if unsafe is not None else None

        @torch.library.custom_op("ampcheck::take_statistics", mutates_args=("packed",), tags=tags)
        def take_statistics(packed: torch.Tensor, slot: int) -> None:
            _KEEPERS[slot](packed.clone())

    found: torch._ops.OpOverload = torch.ops.ampcheck.take_statistics.default
    return found
