"""State that an update is divided by, and that becomes zero in its format: second moments in float16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.facts.memory import has_companions
from ampcheck.records.state import Role, VanishedState, excess_of
from ampcheck.shadow import Shadow
from ampcheck.stream.ops import OpEvent, leaves
from ampcheck.torchtools.private import NO_DISPATCH
from ampcheck.torchtools.spacing import spacing
from ampcheck.training.lineage import NARROW, Lineage
from ampcheck.training.loop import Resident, TrainingLoop

_LARGER = 2.0
"""Times the exact update, from which on an update is too large; rounding in 16 bits stays far below."""

_ROUNDINGS = 2.0
"""In spacings of the weight, what rounding may add to an update."""

_TINY = 1e-300


@dataclass(slots=True)
class _Before:
    old: torch.Tensor
    exact: torch.Tensor
    tensor: torch.Tensor
    eps: float


@dataclass(slots=True)
class _Zeros:
    """Of a state, the elements that vanished in every step since one, and the sum of their exact values."""

    lost: torch.Tensor
    sum: torch.Tensor
    since: int


class MomentWatch:
    """Compares narrow optimizer state, and the updates of its parameters, with their exact values after each step.

    It is one of the `additions` of a `Lineage`, and sees which state is divided by.
    """

    def __init__(self, shadow: Shadow, loop: TrainingLoop) -> None:
        self._worst: tuple[VanishedState, ...] = ()
        self._coming: tuple[VanishedState, ...] = ()
        self._zeros: dict[str, _Zeros] = {}
        self._shadow, self._loop = shadow, loop
        self._before: dict[str, _Before] = {}
        self._divisors = self._steps = 0
        self._lineage: Lineage | None = None

    @property
    def vanished(self) -> tuple[VanishedState, ...]:
        """The vanished elements of the worst step, or of all steps if the updates that follow from these are worse."""
        return max(self._worst, self._coming, key=excess_of)

    def begin(self, lineage: Lineage) -> None:
        """A step begins, with origins of its own."""
        self._lineage, self._divisors = lineage, 0

    def divided(self, call: OpEvent, lineage: Lineage) -> None:
        """Note the origins of what an op divides by."""
        for name in call.traits.divides:
            for tensor in leaves(call.argument(name)):
                self._divisors |= lineage.facts.form(tensor).mask

    def start(self, residents: Sequence[Resident]) -> None:
        """Copy the values of the narrow parameters, before a step."""
        groups = [group for optimizer in self._loop.optimizers.values() for group in optimizer.param_groups]
        guards = {id(parameter): _guard(group) for group in groups for parameter in group["params"]}
        self._before = {}
        for resident in residents:
            tensor = resident.tensor
            if resident.role is Role.PARAMETER and tensor.dtype in NARROW and _is_plain(tensor):
                old = tensor.detach().double()
                self._before[resident.name] = _Before(old, self._exact(tensor), tensor, guards.get(id(tensor), 0.0))

    @torch.no_grad()
    def end(self, residents: Sequence[Resident]) -> None:
        """Compare after a step that came to its end."""
        exacts = [self._exact(before.tensor) - before.exact for before in self._before.values()]
        size = math.sqrt(sum(float(exact.square().sum()) for exact in exacts))
        elements = sum(exact.numel() for exact in exacts)
        measured: list[VanishedState | None] = []
        coming: list[VanishedState | None] = []
        for resident in residents if self._before and math.isfinite(size) else ():
            state = resident.tensor
            before = self._before.get(resident.name.rpartition(".")[0]) if resident.role is Role.STATE else None
            if before is None or state.dtype not in NARROW or state.shape != before.old.shape or not _is_plain(state):
                continue
            exact = self._exact(state)
            lost = (state == 0) & (exact != 0)
            if bool(lost.any()):
                measured.append(self._measured(resident, before, lost, size))
            zeros = self._zeros.setdefault(resident.name, _Zeros(lost, torch.zeros_like(exact), self._steps))
            zeros.lost, zeros.sum = zeros.lost & lost, zeros.sum + exact.clamp(min=0.0)
            coming.append(self._foreseen(resident, before, zeros, elements))
        self._worst = max(self._worst, tuple(filter(None, measured)), key=excess_of)
        self._coming = tuple(filter(None, coming))
        self._before = {}
        self._steps += 1

    def _measured(self, state: Resident, before: _Before, lost: torch.Tensor, size: float) -> VanishedState | None:
        """The updates of this step that are too large where state became zero."""
        exact = self._exact(before.tensor) - before.exact
        update = before.tensor.detach().double() - before.old
        allowed = _LARGER * exact.abs() + _ROUNDINGS * spacing(before.old, format_of(before.tensor.dtype))
        large = lost & ~(update.abs() <= allowed)  # NaN is larger than anything
        if not bool(large.any()):
            return None
        largest = (update / exact).abs()[large].nan_to_num(nan=math.inf, posinf=math.inf).max()
        excess = float((update - exact)[large].norm()) / size if size else math.inf
        return self._vanished(state, large, excess, float(largest), foreseen=False)

    def _foreseen(self, state: Resident, before: _Before, zeros: _Zeros, elements: int) -> VanishedState | None:
        """Return how much too large updates become where an average of squares was zero after every step.

        A kernel that computes in float32 divides by the addend of its own step at least: (1 - beta) of what the average
        would come to. The eps counts as if it stood beneath the root, where it is largest. The updates of an optimizer
        that divides by the root of an average are of one size.
        """
        lineage, tensor = self._lineage, state.tensor
        bit = lineage.facts.bit_of(tensor) if lineage is not None else 0
        gain = lineage.facts.form(tensor).gain(bit) if lineage is not None and bit else None
        if not bit & self._divisors or gain is None or not 0.0 < gain < 1.0 or bool((tensor < 0).any()):
            return None
        addend = zeros.sum / (self._steps - zeros.since + 1)
        factors = ((addend / (1.0 - gain) + before.eps) / (addend + before.eps).clamp(min=_TINY)).sqrt()
        large = zeros.lost & (factors > _LARGER)
        if not bool(large.any()):
            return None
        excess = math.sqrt(float((factors[large] - 1.0).square().sum()) / elements)
        return self._vanished(state, large, excess, float(factors[large].max()), foreseen=True)

    def _vanished(
        self, state: Resident, large: torch.Tensor, excess: float, largest: float, *, foreseen: bool
    ) -> VanishedState:
        dtype, elements = str(state.tensor.dtype).removeprefix("torch."), state.tensor.numel()
        excess = math.inf if math.isnan(excess) else excess
        return VanishedState(state.name, dtype, elements, int(large.sum()), excess, largest, self._steps, foreseen)

    def _exact(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if has_companions(tensor) and self._shadow.store.known(tensor) is not None:
            return self._shadow.exact(tensor).clone()
        return tensor.double()


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is NO_DISPATCH
    return plain and has_companions(tensor)


def _guard(group: Mapping[str, Any]) -> float:
    """The largest of the options of a group that are called eps; 0.0 without any."""
    options = [option for name, option in group.items() if name.startswith("eps")]
    values = [v for option in options for v in (option if isinstance(option, (list, tuple)) else (option,))]
    return max((0.0, *(float(value) for value in values if isinstance(value, (int, float)))))
