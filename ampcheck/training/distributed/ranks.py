"""Records of several processes put together: each element counted once, nothing gathered but the records."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.health import Unmeasured, health_of
from ampcheck.torchtools.storage import holds_first_copy, is_pending, placements

Record = TypeVar("Record")

PATIENCE = timedelta(minutes=30)
"""How much longer than a collective of the loop the ranks wait for each other's word: for what they compute alone."""

_SIDE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def world_size() -> int:
    """How many processes work together; 1 where no process group is set up."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process; 0 where no process group is set up."""
    return dist.get_rank() if world_size() > 1 else 0


def side_group() -> Any:
    """A gloo group of our own, of all ranks; None, the group of the loop, where there can be none.

    A collective that fails closes its group, and one that a rank still waits in would take our message for its own. So
    what ranks tell each other does not go through the loop's group. The first call on each rank makes it.
    """
    whole = dist.group.WORLD
    if (
        whole is None
        or not dist.is_gloo_available()
        or not {"gloo", "nccl"} & set(re.findall(r"\w+", dist.get_backend()))
    ):
        return None
    if whole not in _SIDE:
        _SIDE[whole] = dist.new_group(backend="gloo", timeout=_timeout(whole) + PATIENCE)
    return _SIDE[whole]


def _timeout(group: Any) -> timedelta:
    """How long a collective of a group may take."""
    longest = timedelta()
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):  # no backend for this kind of device, or another torch
            longest = max(longest, group._get_backend(torch.device(kind)).options._timeout)  # no public name
    return longest or timedelta(minutes=30)


def gather(value: Any) -> list[Any]:
    """The values of all processes, in order of rank. Every process must call it; the values must be picklable."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    with _disable_current_modes():  # a step may be watched while ranks agree on it
        dist.all_gather_object(found, value, group=side_group())
    return found


def handed_by(source: int, value: Any) -> Any:
    """The value of one process, on all of them. Every process must call it."""
    made = [value if rank() == source else None]
    if world_size() > 1:
        with _disable_current_modes():
            dist.broadcast_object_list(made, src=source, group=side_group())
    return made[0]


def on_first(value: Any, function: Callable[[list[Any]], Record]) -> Record:
    """`function` of the values of all processes, computed on the first of them and handed to all.

    For what is large before and small after. Every process must call it.
    """
    if world_size() == 1:
        return function([value])
    found: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, found, group=side_group())
    result: Record = handed_by(0, None if found is None else function(found))
    return result


def agreed(flag: bool) -> bool:
    """Whether any process says so: what decides how often a step runs must be decided alike on all of them."""
    return any(gather(flag))


@dataclass(frozen=True, slots=True)
class LocalRecord(Generic[Record]):
    """What one process measured of a tensor. copy: another process has the same elements, and counts them."""

    record: Record
    copy: bool = False
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class MergedRecords(Generic[Record]):
    """The records of all processes by name; `differing` names tensors of which two copies gave different records."""

    records: Mapping[str, Record]
    differing: tuple[str, ...] = ()
    unmeasured: Mapping[str, str] = field(default_factory=dict)


def local_record(tensor: torch.Tensor, record: Record) -> LocalRecord[Record]:
    """A record of what this process holds of a tensor, with its share in the whole, as its placements tell it."""
    return LocalRecord(record, not holds_first_copy(tensor), bool(placements(tensor)))


def merge_across_ranks(records: Mapping[str, LocalRecord[Record]]) -> MergedRecords[Record]:
    """The records of all processes, added up with `+` in order of rank: shards all, copies once.

    Padding is not part of a local shard and so is not counted. A tensor without placements counts by the first process
    that has it, as DDP replicates parameters and pipeline stages own theirs. Every process must call it.
    """
    merged: dict[str, Record] = {}
    plain: dict[str, Record] = {}
    differing: dict[str, None] = {}
    for of_rank in gather(dict(records)):
        for name, one in of_rank.items():
            if one.sharded:
                if not one.copy:
                    merged[name] = merged[name] + one.record if name in merged else one.record
            elif name not in plain:
                merged[name] = plain[name] = one.record
            elif plain[name] != one.record:
                differing[name] = None
    return MergedRecords(merged, tuple(differing))


def measure_across_ranks(
    tensors: Mapping[str, torch.Tensor], measure: Callable[[torch.Tensor], Any] | None = None
) -> MergedRecords[Any]:
    """Measure what each process holds of these tensors, and put the records together; nothing is gathered.

    measure: gives a record that adds up with `+`; by default the health with its histogram of exponents. It is given
    the tensor as it is, a DTensor too. A DTensor that is still to be summed (`Partial`) cannot be measured, and is
    named in `unmeasured`. Every process must call it, each with the tensors that it has.
    """
    found, unmeasured = measure_here(tensors, measure)
    merged = merge_across_ranks(found)
    return MergedRecords(merged.records, merged.differing, unmeasured)


def measure_here(
    tensors: Mapping[str, torch.Tensor], measure: Callable[[torch.Tensor], Any] | None = None
) -> tuple[dict[str, LocalRecord[Any]], dict[str, str]]:
    """The part of `measure_across_ranks` that needs no other process: records for `merge_across_ranks`, and reasons."""
    found: dict[str, LocalRecord[Any]] = {}
    unmeasured: dict[str, str] = {}
    for name, tensor in tensors.items():
        if is_pending(tensor):
            unmeasured[name] = "its addends are still to be summed over processes"
            continue
        record = measure(tensor) if measure is not None else health_of(tensor, histogram=True)
        if isinstance(record, Unmeasured):
            unmeasured[name] = record.reason
        else:
            found[name] = local_record(tensor, record)
    return found, unmeasured


def by_value(values: list[Any]) -> dict[Any, tuple[int, ...]]:
    """Which ranks have which value."""
    found: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        found.setdefault(value, []).append(place)
    return {value: tuple(ranks) for value, ranks in found.items()}


def name_ranks(ranks: tuple[int, ...]) -> str:
    """`rank 3`; `ranks 0, 2`; of many `ranks 0, 1, 2, 3 and 12 more`."""
    told = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"
