"""Requires: A block leaves autocast and the precision switches as it found them; in a training loop over several ranks
each module runs under the same autocast on all. A model must also restore grad mode. Fails with each switch and module
that differs.

Measured: Autocast on or off, its dtype, cache and nesting depth for every device, float32 matmul precision, TF32,
reduced-precision reductions, fp32_precision, default dtype, default device and determinism are read before and after:
around a block, and around each forward, loss and backward of a model. Changed settings are restored. Nothing is hooked
for that: it costs a fraction of a millisecond.

Causes: A torch.set_autocast_enabled or a precision flag that is never restored, autocast entered by hand, an exception
inside a region of a torch.compile'd function, which leaves the region open.

Fix: Use `with torch.autocast(...)`; restore flags in a finally block or a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits, Limits
from ampcheck.core.run import Finding, Where
from ampcheck.core.subject import EVERY
from ampcheck.records.autocast import GuardStats
from ampcheck.records.graphs import GraphStats
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.reductions import DistributedStats, name_ranks

CHECK = Check(
    "autocast-state",
    "autocast",
    __doc__,
    unit="switches",
    subjects=EVERY,
    needs=("GuardStats", "NumericsStats", "GraphStats", "DistributedStats"),
    order=304,
    evidence=("docs/examples/checks/autocast-state", "odd_forwards:forward: leaves autocast off"),
)


def _of_block(stats: GuardStats) -> Iterator[Finding]:
    if not stats.changed:
        message = f"{stats.settings} switches are as they were"
        yield CHECK.passed(stats.subject, message, stats.settings)
        return
    items = [f"{name} was {_plain(old)} and is {_plain(new)}" for name, (old, new) in stats.changed.items()]
    message = f"code must leave autocast and the precision switches as it found them, but {'; '.join(items)}. "
    message += "The guard has restored them"
    hint = "restore the switch in a finally block or a fixture"
    if any(name.startswith("autocast") for name in stats.changed):
        hint = (
            "use `with torch.autocast(...)`; an exception inside a region of a torch.compile'd function leaves the "
            "region open"
        )
    yield CHECK.fail(stats.subject, message, observed=len(items), limit=0, hint=hint)


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def _of_model(stats: NumericsStats) -> Iterator[Finding]:
    if stats.left:
        items = [f"{name} was {old} and is {new}" for name, (old, new) in stats.left.items()]
        message = (
            "a model must leave autocast, grad mode, default dtype and device and the precision switches as it found "
            f"them, but {'; '.join(items)}. They were restored after the call"
        )
        hint = (
            "change them in a with statement (torch.no_grad(), torch.autocast(...), torch.device(...)) or restore them"
        )
        yield CHECK.fail(stats.name, message, where=Where("forward"), observed=len(items), limit=0, hint=hint)


def _of_graphs(stats: GraphStats) -> Iterator[Finding]:
    if stats.state_changes:
        changes = ", ".join(f"{name} {old} before and {new} after" for name, (old, new) in stats.state_changes.items())
        message = f"a compiled call must leave autocast's state as the eager call does; {changes}"
        message += f" under backend={stats.changed_by!r}" if stats.changed_by else ""
        message += f"; it raises {stats.error.eager or stats.error.message}" if stats.error is not None else ""
        hint = "enter autocast outside of the compiled function, where an exception closes it again"
        where = stats.error.where if stats.error is not None else Where("compile")
        yield CHECK.fail(stats.subject, message, where=where, hint=hint)


def _of_ranks(stats: DistributedStats) -> Iterator[Finding]:
    """A module must run under the same autocast state and precision settings on all ranks."""
    if stats.skipped:
        yield CHECK.skip(stats.subject, stats.skipped)
        return
    if stats.autocast:
        name, values = next(iter(stats.autocast.items()))
        others = f" ({len(stats.autocast)} modules differ)" if len(stats.autocast) > 1 else ""
        message = (
            f"all ranks must run a module under the same autocast state; {name or 'the model'} ran with autocast "
            f"{_by_rank(values)}{others}: the ranks average gradients of different precision"
        )
        hint = (
            "enter torch.autocast with the same enabled and dtype on every rank; decide from the config, not the rank"
        )
        where, count = Where(phase="forward", module=name), len(stats.autocast)
        yield CHECK.fail(stats.subject, message, where=where, observed=count, limit=0, unit="modules", hint=hint)
    for name, values in stats.settings.items():
        message = f"all ranks must run with the same precision settings; {name} is {_by_rank(values)}"
        hint = "change the setting before the ranks part, or on all of them"
        yield CHECK.warn(stats.subject, message, observed=1, limit=0, unit="settings", hint=hint)
    if stats.autocast or stats.settings:
        return
    if stats.modules:
        text = f"{stats.modules} modules ran under the same autocast state on {stats.world} ranks"
        yield CHECK.passed(stats.subject, text, stats.modules)
    else:
        yield CHECK.skip(stats.subject, "no module ran on all ranks")


def _by_rank(values: Mapping[str, tuple[int, ...]]) -> str:
    return "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values.items())


_JUDGES: Mapping[type, Callable[[Any], Iterator[Finding]]] = {
    GuardStats: _of_block,
    NumericsStats: _of_model,
    GraphStats: _of_graphs,
    DistributedStats: _of_ranks,
}


def check(
    stats: GuardStats | NumericsStats | GraphStats | DistributedStats, limits: Limits | GraphLimits
) -> Iterator[Finding]:
    """Every setting is at the end what it was at the start."""
    return _JUDGES[type(stats)](stats)
