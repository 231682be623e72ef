"""The record of one run of a subject: its results, what it does to weights, buffers and arguments, and how it ended."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch.nn.parameter import is_lazy

from ampcheck.core.run import Where
from ampcheck.core.subject import Call
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.records.results import MOVE, Key
from ampcheck.shadow import Reference, Shadow
from ampcheck.shadow.compare import Result, result_of
from ampcheck.shadow.freedom import Freedom
from ampcheck.torchtools.copying import Prepared
from ampcheck.torchtools.private import is_traceable_subclass, without_modes
from ampcheck.torchtools.pytree import is_plain, tensors

KEPT_BYTES = 2 << 30
"""Bytes of results that a limited run keeps; beyond it the rest is counted as unseen."""

NUMPY = 1
"""The place of NumPy's global generator among the random streams of a run."""

_LARGEST_COUNT = 2.0**16
"""Whole numbers from here on are no masks, positions or indices."""


@dataclass(slots=True)
class Execution:
    """Results of one run, and the events in it.

    results: copies, in a shadowed run with their companions; for `CHANGES` see there. dropped: what was not kept, and
    why. limited: whether `KEPT_BYTES` applies. begun, streams: where all random streams are at the start and at the
    end. freedom, in_16_bits: see `Shadow`.

    modules: dtypes of the floating results of each module. losses: dtypes in which losses were computed; totals: what
    was differentiated in each call, the user's loss or the default one. shapes: dtype and shape of everything that a
    call gave, by its path. plain: numbers, texts and None among it. error, phase, step: an exception of the subject,
    and where. no_backward: why there are no gradients; prevented: there are tensors to take gradients of, and the
    subject's own code keeps backward from them. left: the switches that forward, loss or backward left changed, with
    their values before and after; they are restored. without_grad: modules that ran while gradients were off.
    gradients: names of those that were received.
    """

    shadow: Shadow | None = None
    limited: bool = True
    results: dict[Key, Result] = field(default_factory=dict)
    dropped: dict[Key, str] = field(default_factory=dict)
    begun: tuple[object, ...] = ()
    streams: tuple[object, ...] = ()
    kept: int = 0
    freedom: Freedom | None = None
    in_16_bits: Mapping[Where, bool] = field(default_factory=dict)
    modules: dict[str, dict[str, None]] = field(default_factory=dict)
    losses: list[torch.dtype] = field(default_factory=list)
    totals: list[torch.Tensor] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    plain: dict[str, object] = field(default_factory=dict)
    error: BaseException | None = None
    phase: str = "forward"
    step: int = 0
    no_backward: str = ""
    prevented: bool = False
    unseen: Counter[str] = field(default_factory=Counter)
    left: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    without_grad: set[str] = field(default_factory=set)
    gradients: set[str] = field(default_factory=set)

    @property
    def values(self) -> dict[Key, torch.Tensor]:
        """The results without their companions."""
        return {key: result.value for key, result in self.results.items()}

    @property
    def random(self) -> bool:
        """True if it drew random numbers."""
        return self.streams != self.begun

    def keep(self, key: Key, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor, and of its companions, unless this run has kept too much already."""
        if not is_plain(tensor):
            self.dropped[key] = f"{key[0]}s that are sparse, nested, quantised or on meta"
        elif _is_narrow(tensor):
            self.dropped[key] = f"{key[0]}s in 8 bits or fewer"
        elif tensor.numel():
            self._add(key, self.copied(tensor))

    def keep_change(self, key: Key, tensor: torch.Tensor, before: Result) -> None:
        """Keep by how much a weight, buffer or argument has changed, if it has."""
        old = before.value
        if tensor.shape != old.shape or (_is_equal(old, tensor) and not self._is_written(tensor)):
            return
        width = torch.int64 if not has_companions(old) else torch.complex128 if old.is_complex() else torch.float64
        after = self.copied(tensor)
        value, reference = after.value.to(width) - old.to(width), None
        if after.reference is not None:
            origin = before.reference or Reference(old.to(width), old.to(after.reference.moved.dtype), 0.0)
            reference = _change(after.reference, origin, roundoff(old.dtype) * (key[2] + 1) ** 0.5)
            if not bool(value.any()) and not bool(reference.exact.any()):
                return
        self._add(key, Result(value, reference, after.terms))

    def copied(self, tensor: torch.Tensor, *, companions: bool = True) -> Result:
        """A copy of a tensor, in a shadowed run with its companions."""
        if self.shadow is not None and companions:
            return result_of(self.shadow, tensor)
        with without_modes():
            return Result(tensor.detach().clone(), None)

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Return whether an op of the shadowed run wrote the tensor: its companions may differ where its values do
        not."""
        known = self.shadow.store.known(tensor) if self.shadow is not None and has_companions(tensor) else None
        return known is not None and known.written

    def _add(self, key: Key, result: Result) -> None:
        if self.limited and self.kept + result.nbytes > KEPT_BYTES:
            self.dropped[key] = f"{key[0]}s beyond the memory that one run keeps"
            return
        self.kept += result.nbytes
        self.results[key] = result


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 2


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether a weight, buffer or argument can be compared with itself: not one that waits for its shape."""
    unlike = (is_lazy, is_traceable_subclass, _is_narrow)
    return is_plain(tensor) and not any(kind(tensor) for kind in unlike)


def _is_equal(old: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether two tensors of one shape hold the same values; NaN equals NaN."""
    with without_modes():
        return bool(((old == tensor) | ((old != old) & (tensor != tensor))).all())


def _change(after: Reference, before: Reference, stored: float) -> Reference:
    """The companions of a change. stored: the relative rounding that storing what is changed costs by itself."""
    exact = after.exact - before.exact
    apart = (after.moved - after.exact) - (before.moved - before.exact)
    apart = apart + stored * MOVE / after.unit * after.exact.abs() * torch.where(apart.real < 0, -1.0, 1.0)
    return replace(after, exact=exact, moved=exact + apart)


@contextmanager
def keeping_changes(run: Execution, prepared: Prepared, *, updates: bool, moves: bool) -> Iterator[None]:
    """Keep what a run inside changes in weights, buffers and arguments, unless it raises.

    updates: of weights, which an optimizer updates. moves: large whole numbers among the inputs are data.
    """
    updated: dict[tuple[str, str], torch.Tensor] = {}
    others = {("input", name): tensor for name, tensor in arguments(prepared.calls) if _has_values(tensor)}
    if prepared.root is not None:
        weights = {("update", name): p for name, p in prepared.root.named_parameters() if _has_values(p)}
        updated |= {key: p for key, p in weights.items() if updates and p.requires_grad}
        updated |= {("buffer", name): buffer for name, buffer in prepared.root.named_buffers() if _has_values(buffer)}
        others |= {key: p for key, p in weights.items() if key not in updated}
    if run.shadow is not None and moves:
        _move_counts(run.shadow, prepared)
    before = {key: run.copied(tensor) for key, tensor in updated.items()}
    # Arguments, and weights that no optimizer updates, hardly ever change: only a copy of their values is taken.
    before |= {key: run.copied(tensor, companions=False) for key, tensor in others.items()}
    yield
    for key, tensor in (updated | others).items() if run.error is None else ():
        run.keep_change((*key, run.step), tensor.detach(), before[key])


def arguments(calls: Sequence[Call]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that go into the calls, by a name that is the same in every copy."""
    for number, call in enumerate(calls):
        prefix = f"{number}." if len(calls) > 1 else ""
        for path, tensor in tensors({"args": call.args, "kwargs": dict(call.kwargs)}):
            yield prefix + path, tensor


def _move_counts(shadow: Shadow, prepared: Prepared) -> None:
    """Let large whole numbers among the inputs be data as others are: float32 may not even hold their sums exactly."""
    for _, tensor in arguments(prepared.calls):
        if has_companions(tensor) and tensor.numel() and not tensor.is_complex():
            plain = tensor.detach()
            if float(plain.abs().amax()) >= _LARGEST_COUNT and bool((plain == plain.round()).all()):
                shadow.store.lift(plain, moves=True)


@contextmanager
def noting_streams(run: Execution, device: str) -> Iterator[None]:
    """Note where all random streams are before and after the block."""
    run.begun = streams(device)
    yield
    run.streams = streams(device)


def streams(device: str) -> tuple[object, ...]:
    """Where the random streams of Python, NumPy, the CPU and a device are."""
    place = torch.device(device)
    states = [torch.get_rng_state()]
    if place.type != "cpu":
        states.append(getattr(torch, place.type).get_rng_state(place))
    return random.getstate(), str(numpy.random.get_state()), *(bytes(state.cpu().numpy()) for state in states)
