"""One run of a subject with everything kept that is compared: results, and what becomes of weights and buffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.numerics.run import Blocks, Outcome, Plan, has_values, run_subject
from ampcheck.shadow import Reference, Shadow
from ampcheck.shadow.companions import MOVE, has_companions, roundoff
from ampcheck.shadow.compare import Key, Result, result_of
from ampcheck.torchtools.copying import Prepared
from ampcheck.torchtools.pytree import tensors

KEPT_BYTES = 2 << 30
"""How much of its results one run keeps; beyond it the rest is counted as unseen."""

_COUNTS = 2.0**16
"""Whole numbers from here on are no masks, positions or indices."""


@dataclass(slots=True)
class Recorded:
    """What one run gave.

    values: copies; an update is a weight after all calls less the same before. results: the same with their companions,
    of a shadowed run. dropped: what was not kept, and why. begun, streams: where all random streams are at the start
    and at the end. ran: what happened otherwise.
    """

    shadow: Shadow | None = None
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    results: dict[Key, Result] = field(default_factory=dict)
    dropped: dict[Key, str] = field(default_factory=dict)
    begun: tuple[object, ...] = ()
    streams: tuple[object, ...] = ()
    ran: Outcome = field(default_factory=Outcome)
    kept: int = 0

    @property
    def random(self) -> bool:
        """Whether it drew random numbers."""
        return self.streams != self.begun

    def keep(self, key: Key, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor, and of its companions, unless this run has kept too much already."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            self.dropped[key] = f"{key[0]}s of another layout than strided"
        elif tensor.is_floating_point() and tensor.dtype.itemsize < 2:
            self.dropped[key] = f"{key[0]}s in 8 bits or fewer"
        elif tensor.numel():
            self._add(key, self.copied(tensor))

    def keep_change(self, key: Key, tensor: torch.Tensor, before: Result) -> None:
        """Keep by how much a weight or buffer has changed, if it has."""
        old = before.value
        if tensor.shape != old.shape or (self.shadow is None and torch.equal(old, tensor)):
            return
        width = torch.int64 if not has_companions(old) else torch.complex128 if old.is_complex() else torch.float64
        after = self.copied(tensor)
        value, reference = after.value.to(width) - old.to(width), None
        if after.reference is not None and before.reference is not None:
            reference = _change(after.reference, before.reference, roundoff(old.dtype) * (key[2] + 1) ** 0.5)
            if not bool(value.any()) and not bool(reference.exact.any()):
                return
        self._add(key, Result(value, reference, after.terms))

    def copied(self, tensor: torch.Tensor) -> Result:
        """A copy of a tensor, in a shadowed run with its companions."""
        if self.shadow is not None:
            return result_of(self.shadow, tensor)
        with _disable_current_modes():
            return Result(tensor.detach().clone(), None)

    def _add(self, key: Key, result: Result) -> None:
        self.kept += result.nbytes
        if self.kept > KEPT_BYTES:
            self.dropped[key] = f"{key[0]}s beyond the memory that one run keeps"
            return
        self.values[key] = result.value
        if self.shadow is not None:
            self.results[key] = result


def _change(after: Reference, before: Reference, stored: float) -> Reference:
    """The companions of a change. stored: the relative rounding that storing what is changed costs by itself."""
    exact = after.exact - before.exact
    apart = (after.moved - after.exact) - (before.moved - before.exact)
    apart = apart + stored * MOVE / after.unit * after.exact.abs() * torch.where(apart.real < 0, -1.0, 1.0)
    return replace(after, exact=exact, moved=exact + apart)


def run_plan(
    plan: Plan,
    prepared: Prepared,
    *,
    compiled: Callable[[Prepared], Blocks] | None = None,
    shadow: Shadow | None = None,
    around: Iterable[AbstractContextManager[Any]] = (),
) -> Recorded:
    """Run all steps of a plan on a prepared copy, which they change.

    compiled: gives the blocks as they are to run. shadow: of the run, entered before `around`, which is entered in
    order for all of it. An exception of the model is kept.
    """
    recorded, root = Recorded(shadow), prepared.root
    changing: dict[tuple[str, str], torch.Tensor] = {}
    if root is not None:
        changing |= {("update", name): p for name, p in root.named_parameters() if p.requires_grad and has_values(p)}
        changing |= {("buffer", name): buffer for name, buffer in root.named_buffers() if has_values(buffer)}
    if shadow is not None and plan.autocast is None:
        _move_counts(shadow, prepared)
    before = {key: recorded.copied(tensor) for key, tensor in changing.items()}
    contexts = [_noting_streams(recorded, plan.device), shadow or nullcontext(), *around]
    recorded.ran = run_subject(prepared, plan, recorded.keep, around=contexts, transform=compiled)
    if recorded.ran.error is None:
        for (kind, name), tensor in changing.items():
            recorded.keep_change((kind, name, recorded.ran.step), tensor.detach(), before[kind, name])
    recorded.shadow = None  # it holds the model
    return recorded


def _move_counts(shadow: Shadow, prepared: Prepared) -> None:
    """Let large whole numbers among the inputs be data as others are: float32 may not even hold their sums exactly."""
    for call in prepared.calls:
        for _, tensor in tensors((call.args, dict(call.kwargs))):
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
