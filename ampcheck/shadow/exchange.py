"""Collectives: companions travel with the tensors, through the store of the process group.

Before a collective each rank posts the companions of what it contributes. When the collective is complete, all ranks on
which its result depends have posted, and each rank computes the result in float64 from their posts. No rank waits for
a shadow: where another rank has none, its post is missing, and the results become data. So nothing can deadlock that
does not without shadows, unless ranks start collectives of different groups in different orders, which PyTorch warns
against: a shadow waits for each collective where it starts.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.facts.history import Key
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.facts.values import CompanionStore
from ampcheck.ops.traits import Traits
from ampcheck.shadow.call import Call, floating_values, leaves
from ampcheck.shadow.rules.collectives import COLLECTIVES, Collective, Parts
from ampcheck.torchtools.process_groups import group_among, wait_for

NAMESPACES = frozenset(("c10d", "_c10d_functional", "c10d_functional"))
_WAITS = frozenset(("wait_tensor", "_wrap_tensor_autograd", "send", "barrier", "monitored_barrier_", "check_for_nan"))
"""Ops of these namespaces that bring no values from other ranks."""

_LARGEST = 1 << 23
"""Elements of one collective whose companions travel, on each rank; larger results become data."""

_PIECE = 4 << 20
"""Bytes of one entry of a store: the default store of PyTorch takes 8 MiB at the most."""


@dataclass(frozen=True, slots=True)
class Post:
    """Contribution of one rank to a collective. op: its name. unit, depth, faults: see `Companions`."""

    op: str
    exact: tuple[Any, ...]
    moved: tuple[Any, ...]
    unit: float
    depth: int
    faults: frozenset[Key]


def communicates(op: Traits) -> bool:
    """Return whether values of other ranks come with an op."""
    return op.namespace in NAMESPACES and op.name.partition("::")[2] not in _WAITS


class Exchange:
    """Posts the companions of this rank, and reads those of others."""

    def __init__(self, store: CompanionStore) -> None:
        self._companions = store
        self.settles = False
        self._posted: defaultdict[str, list[tuple[int, list[str]]]] = defaultdict(list)

    def begin(self, call: Call) -> tuple[Collective, str] | None:
        """Post what this rank contributes, before the op runs. None where companions cannot travel; else the collective
        and its key, the same on all ranks."""
        plan = COLLECTIVES.get(call.name.partition("::")[2])
        try:
            collective = plan(call, group_among((*call.args, *call.kwargs.values()))) if plan is not None else None
            if collective is None or sum(t.numel() for t in collective.gives) > _LARGEST:
                return None
            number = int(collective.group._get_sequence_number_for_group())  # no public name up to torch 2.13
            key = f"ampcheck/shadow/{collective.group.group_name}/{number}"
            self._post(call, collective, key, number)
        except (RuntimeError, AttributeError, KeyError):  # a backend without numbers, a group without a store
            return None
        call.inputs = [t.clone() for t in collective.gives]  # the op may overwrite them
        return collective, key

    def end(self, call: Call, begun: tuple[Collective, str] | None) -> frozenset[Key] | None:
        """Bring the companions of the results up to date, when the op has run; the faults in what they were made of.

        None where they do not follow: they become data when they are used, which is after the user waited for them.
        """
        results, received = [], None
        if begun is not None:
            collective, key = begun
            wait_for(call.out)
            results = floating_values(call.out) if collective.gets is None else collective.gets
            received = self._received(call, collective, key, results)
        if received is None:
            for tensor in leaves((call.args, tuple(call.kwargs.values()), call.out)):
                if has_companions(tensor):
                    self._companions.forget(tensor)
            return None
        posts, exact, moved = received
        for tensor, *sides in zip(results, exact, moved, strict=True):
            companions = self._companions.to_write(tensor)
            self._companions.write(tensor, *sides)
            companions.unit = max(roundoff(tensor.dtype), *(post.unit for post in posts))
            companions.depth = max(post.depth for post in posts)
            companions.written, companions.whole, companions.updates = True, False, 0
            companions.consumed = False
            companions.settled = self.settles = True
        call.written = results
        return frozenset[Key]().union(*(post.faults for post in posts))

    def repeats(self, call: Call) -> bool:
        """Return whether an op copies the result of a collective once more, from memory that only the collective has:
        gloo does so for `reduce_scatter_tensor` whenever it is waited for."""
        if call.name != "copy_" or not has_companions(call.args[1]):
            return False
        target, source = call.args[:2]
        companions = self._companions.known(target)
        if companions is None or not companions.settled or self._companions.known(source) is not None:
            return False
        return target.dtype == source.dtype and torch.allclose(target, source, rtol=0, atol=0, equal_nan=True)

    def _post(self, call: Call, collective: Collective, key: str, number: int) -> None:
        if not collective.gives:
            return
        companions = [self._companions.of(t) for t in collective.gives]
        sides = self._companions.exact, self._companions.moved
        exact, moved = (tuple(of(t).contiguous().cpu().numpy() for t in collective.gives) for of in sides)
        faults = frozenset[Key]().union(*(c.faults for c in companions))
        unit, depth = max(c.unit for c in companions), max(c.depth for c in companions)
        post = Post(call.name, exact, moved, unit, depth, faults)
        data, store, mine = pickle.dumps(post), _store_of(collective.group), f"{key}/{collective.rank}"
        starts = range(0, len(data), _PIECE)
        for start in starts:
            store.set(f"{mine}/{start}", data[start : start + _PIECE])
        store.add(mine, len(data))  # returns when all above is in the store, as `set` does not; who sees it can read
        self._posted[collective.group.group_name].append((number, [*(f"{mine}/{start}" for start in starts), mine]))

    def _received(
        self, call: Call, collective: Collective, key: str, results: Parts
    ) -> tuple[list[Post], Parts, Parts] | None:
        """The posts of all ranks that the results depend on, and both sides of the results."""
        store = _store_of(collective.group)
        try:
            posts = [_read(store, f"{key}/{rank}") for rank in collective.sources]
            if collective.full:
                self._delete(collective, store, int(key.rpartition("/")[2]))
        except RuntimeError:  # the process of the store has ended
            return None
        known = [post for post in posts if post is not None and post.op == call.name]
        if len(known) < len(posts):
            return None
        if not results:  # a rank that only contributes
            return known, [], []
        device = results[0].device
        exact, moved = (
            collective.combine([[torch.from_numpy(a).to(device) for a in part] for part in parts], results)
            for parts in ([post.exact for post in known], [post.moved for post in known])
        )
        if any([t.shape for t in side] != [t.shape for t in results] for side in (exact, moved)):
            return None
        return known, exact, moved

    def _delete(self, collective: Collective, store: Any, number: int) -> None:
        """Delete the posts of earlier collectives: whoever takes part in this one has read them."""
        posted = self._posted[collective.group.group_name]
        for _, keys in [entry for entry in posted if entry[0] < number]:
            for key in keys:
                store.delete_key(key)
        posted[:] = [entry for entry in posted if entry[0] >= number]


def _store_of(group: Any) -> Any:
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_world"].pg_map[group][1]  # no public name up to torch 2.13


def _read(store: Any, key: str) -> Post | None:
    if not store.check([key]):
        return None
    size = int(store.get(key))
    post: Post = pickle.loads(b"".join(store.get(f"{key}/{start}") for start in range(0, size, _PIECE)))
    return post
