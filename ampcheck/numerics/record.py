"""One run of a subject with everything kept that is compared: its results, and what it does to weights, buffers and
arguments."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch.nn.parameter import is_lazy

from ampcheck.core.run import Where
from ampcheck.core.subject import Call
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.numerics.run import Blocks, Outcome, Receive, RunPlan, run_subject
from ampcheck.records.results import MOVE, Key
from ampcheck.shadow import Reference, Shadow
from ampcheck.shadow.compare import Result, result_of
from ampcheck.torchtools.copying import Prepared
from ampcheck.torchtools.private import is_traceable_subclass, without_modes
from ampcheck.torchtools.pytree import is_plain, tensors

KEPT_BYTES = 2 << 30
"""How much of its results a limited run keeps; beyond it the rest is counted as unseen."""

NUMPY = 1
"""The place of NumPy's global generator among the random streams of a run."""

_COUNTS = 2.0**16
"""Whole numbers from here on are no masks, positions or indices."""


@dataclass(slots=True)
class Recorded:
    """What one run gave.

    values: copies; for `CHANGES` see there. results: the same with their companions, of a shadowed run. dropped: what
    was not kept, and why. limited: whether `KEPT_BYTES` applies. begun, streams: where all random streams are at the
    start and at the end. ran: what happened otherwise. in_16_bits: of each op of a shadowed run, whether it took or
    gave values of 16 bits.
    """

    shadow: Shadow | None = None
    limited: bool = True
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    results: dict[Key, Result] = field(default_factory=dict)
    dropped: dict[Key, str] = field(default_factory=dict)
    begun: tuple[object, ...] = ()
    streams: tuple[object, ...] = ()
    ran: Outcome = field(default_factory=Outcome)
    kept: int = 0
    in_16_bits: Mapping[Where, bool] = field(default_factory=dict)

    @property
    def random(self) -> bool:
        """Whether it drew random numbers."""
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
        """Whether an op of the shadowed run wrote the tensor: its companions may differ where its values do not."""
        known = self.shadow.store.known(tensor) if self.shadow is not None and has_companions(tensor) else None
        return known is not None and known.written

    def _add(self, key: Key, result: Result) -> None:
        if self.limited and self.kept + result.nbytes > KEPT_BYTES:
            self.dropped[key] = f"{key[0]}s beyond the memory that one run keeps"
            return
        self.kept += result.nbytes
        self.values[key] = result.value
        if self.shadow is not None:
            self.results[key] = result


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 2


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a weight, buffer or argument can be compared with itself: not one that waits for its shape."""
    unlike = (is_lazy, is_traceable_subclass, _is_narrow)
    return is_plain(tensor) and not any(kind(tensor) for kind in unlike)


def _is_equal(old: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same values; NaN equals NaN."""
    with without_modes():
        return bool(((old == tensor) | ((old != old) & (tensor != tensor))).all())


def _change(after: Reference, before: Reference, stored: float) -> Reference:
    """The companions of a change. stored: the relative rounding that storing what is changed costs by itself."""
    exact = after.exact - before.exact
    apart = (after.moved - after.exact) - (before.moved - before.exact)
    apart = apart + stored * MOVE / after.unit * after.exact.abs() * torch.where(apart.real < 0, -1.0, 1.0)
    return replace(after, exact=exact, moved=exact + apart)


def run_plan(
    plan: RunPlan,
    prepared: Prepared,
    *,
    compiled: Callable[[Prepared], Blocks] | None = None,
    shadow: Shadow | None = None,
    around: Iterable[AbstractContextManager[Any]] = (),
    receive: Receive = lambda key, tensor: None,
    masked: Collection[Key] = (),
    module_output: Callable[[str, torch.Tensor], None] | None = None,
    limited: bool = True,
) -> Recorded:
    """Run all steps of a plan on a prepared copy, which they change.

    compiled: gives the blocks as they are to run. shadow: of the run. around: entered in order for all of it, before
    the shadow. receive: called with each result after it was kept. masked, module_output: see `run_subject`. limited:
    whether `KEPT_BYTES` applies. An exception of the model is kept.
    """
    recorded, root = Recorded(shadow, limited), prepared.root
    updated: dict[tuple[str, str], torch.Tensor] = {}
    others = {("input", name): tensor for name, tensor in arguments(prepared.calls) if _has_values(tensor)}
    if root is not None:
        weights = {("update", name): p for name, p in root.named_parameters() if _has_values(p)}
        updates = bool(plan.rate) or plan.optimizer is not None
        updated |= {key: p for key, p in weights.items() if updates and p.requires_grad}
        updated |= {("buffer", name): buffer for name, buffer in root.named_buffers() if _has_values(buffer)}
        others |= {key: p for key, p in weights.items() if key not in updated}
    if shadow is not None and plan.autocast is None:
        _move_counts(shadow, prepared)
    before = {key: recorded.copied(tensor) for key, tensor in updated.items()}
    # Arguments, and weights that no optimizer updates, hardly ever change: only a copy of their values is taken.
    before |= {key: recorded.copied(tensor, companions=False) for key, tensor in others.items()}

    def keep(key: Key, tensor: torch.Tensor) -> None:
        recorded.keep(key, tensor)
        receive(key, tensor)

    contexts = [_noting_streams(recorded, plan.device), *around, shadow or nullcontext()]
    recorded.ran = run_subject(
        prepared, plan, keep, around=contexts, transform=compiled, masked=masked, module_output=module_output
    )
    if recorded.ran.error is None:
        for key, tensor in (updated | others).items():
            recorded.keep_change((*key, recorded.ran.step), tensor.detach(), before[key])
    recorded.in_16_bits = shadow.in_16_bits if shadow is not None else {}
    recorded.shadow = None  # it holds the model
    return recorded


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
            if float(plain.abs().amax()) >= _COUNTS and bool((plain == plain.round()).all()):
                shadow.store.lift(plain, moves=True)


@contextmanager
def _noting_streams(recorded: Recorded, device: str) -> Iterator[None]:
    recorded.begun = _streams(device)
    yield
    recorded.streams = _streams(device)


def _streams(device: str) -> tuple[object, ...]:
    place = torch.device(device)
    states = [torch.get_rng_state()]
    if place.type != "cpu":
        states.append(getattr(torch, place.type).get_rng_state(place))
    return random.getstate(), str(numpy.random.get_state()), *(bytes(state.cpu().numpy()) for state in states)
