"""Higher-order and composed ops: how to run what they call, op by op, under the mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ampcheck.stream.ops import OpEvent
from ampcheck.torchtools.private import DispatchKey, flex_attention, flex_attention_backward, tree_leaves


def _cond(predicate: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], operands: Any = ()) -> Any:
    return (if_true if predicate else if_false)(*operands)


def _while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], additional: Sequence[Any] = ()
) -> Any:
    carried = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in carried)
    while condition(*carried, *additional):
        carried = tuple(body(*carried, *additional))
    return carried


def _scan(
    combine: Callable[..., Any], initial: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any] = ()
) -> Any:
    """Carries and stacked outputs, along the first dimension."""
    carry, rows = list(initial), []
    for position in range(len(xs[0])):
        results = combine(*carry, *(x.select(0, position) for x in xs), *additional)
        flat = tree_leaves(results)
        carry, row = flat[: len(initial)], flat[len(initial) :]
        rows.append(row)
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    return (*(c.clone() for c in carry), *stacked)


def _called(graph: Callable[..., Any], *operands: Any, **_: Any) -> Any:
    return graph(*operands)


def _named(graph: Callable[..., Any], _: Any, *operands: Any) -> Any:
    return graph(*operands)


def _listed(graph: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return graph(*operands)


def composed(event: OpEvent, key: str) -> Any:
    """An op whose kernel for `key` calls others, such as those that copy shards to the buffers of FSDP2."""
    with event.again():
        return event.op._op_dk(getattr(DispatchKey, key), *event.args, **event.kwargs)


HIGHER: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "invoke_subgraph": _named,
    "run_const_graph": _listed,
    "wrap": _called,
    "wrap_activation_checkpoint": _called,
    "tag_activation_checkpoint": _called,
    "flex_attention": flex_attention,
    "flex_attention_backward": flex_attention_backward,
}
"""Function that runs in the place of a higher-order op, by its name."""
