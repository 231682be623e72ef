"""What the updates of narrow tensors came to over the observed steps of a loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ampcheck.core.formats import format_of
from ampcheck.torchtools.storage import Region
from ampcheck.torchtools.storage import region as region_of
from ampcheck.training.loop import Resident, Role
from ampcheck.training.stagnation.cures import Cure
from ampcheck.training.stagnation.shadows import NARROW
from ampcheck.training.stagnation.updates import UpdateWatch

_NOISE = 1e-12
"""Relative to a value, what float64 itself may make of an update that is none: 0.9 x + 0.1 x - x."""

_SAMPLE = 512
_SAMPLED_STEPS = 16
_COMPARED = 1024
_CARRIED_FROM = 0.1


@dataclass(frozen=True, slots=True)
class Decay:
    """What a factor below 1 does on its own, element by element: `stuck` of `looked` elements it leaves as they are."""

    factor: float = 1.0
    looked: int = 0
    stuck: int = 0
    op: str = ""

    def plus(self, factor: float, looked: int, stuck: int, op: str) -> Decay:
        """With one more multiplication."""
        if not looked:
            return self
        return Decay(factor, self.looked + looked, self.stuck + stuck, op)


NO_DECAY = Decay()


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A tensor that only adds increments of one sign to itself: it stops where they are half a spacing.

    increment: the typical one. stops_at: the magnitude from which it is lost. steps: how many are left until then.
    """

    increment: float
    stops_at: float
    steps: int


@dataclass(slots=True)
class TensorUpdates:
    """A tensor narrower than float32 over the observed steps.

    moved: updates of elements that are not zero without rounding; lost: those after which the element has the same
    value, without those that another tensor carries (`carried`, by `carriers`: a float32 copy, a compensation).
    set_anew: steps in which it was overwritten with values that do not depend on it; steps: the others in which it was
    written. gains: per step, what it is multiplied by; None where that is not one number. low, high: the smallest and
    largest of all that was added. squared_updates, squared_values: sums of the squares of the updates and of the old
    values. decay: what a multiplication by a factor below 1 does on its own; merged: what a factor that is rounded
    together with what is added could do, looked at only where that points away from zero.
    samples: old values and updates [at most 512 elements], float64, of each step.
    optimizer, rate: what steps a parameter, and its learning rate. compensates: whether it carries what others lose.
    """

    role: str
    name: str
    module: str
    dtype: str
    elements: int
    moved: int = 0
    lost: int = 0
    carried: int = 0
    carriers: set[str] = field(default_factory=set)
    set_anew: int = 0
    steps: int = 0
    gains: list[float | None] = field(default_factory=list)
    low: float = 0.0
    high: float = 0.0
    squared_updates: float = 0.0
    squared_values: float = 0.0
    decay: Decay = NO_DECAY
    merged: Decay = NO_DECAY
    samples: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    optimizer: str = ""
    rate: float = 1.0
    accumulation: Accumulation | None = None
    compensates: bool = False
    op: str = ""
    file: str = ""
    line: int | None = None
    cures: tuple[Cure, ...] = ()

    @property
    def share(self) -> float:
        """The share of its updates that is lost."""
        return self.lost / self.moved if self.moved else 0.0

    @property
    def relative_update(self) -> float:
        """The norm of the updates by that of the tensor."""
        return math.sqrt(self.squared_updates / self.squared_values) if self.squared_values else 0.0

    @property
    def pace(self) -> float:
        """The root of the mean of the squared updates, by the learning rate."""
        mean = self.squared_updates / (self.steps * self.elements) if self.squared_updates else 0.0
        return math.sqrt(mean) / self.rate

    @property
    def factors(self) -> list[float]:
        """The gains, if all are known; else empty."""
        known = [gain for gain in self.gains if gain is not None]
        return known if len(known) == len(self.gains) else []

    @property
    def lag(self) -> float:
        """How far, relative to its size, a decaying average may stay from what it follows; infinite for others."""
        factors = self.factors
        decays = bool(factors) and all(0.0 < factor < 1.0 for factor in factors)
        return format_of(self.dtype).unit_roundoff / (1.0 - max(factors)) if decays else math.inf


@dataclass(slots=True)
class _Before:
    resident: Resident
    tensor: torch.Tensor
    region: Region
    old: torch.Tensor


class Accounts:
    """Opened before each step and closed after it. `tensors` holds the accounts by role and name."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Role, str], TensorUpdates] = {}
        self.unseen: Counter[str] = Counter()
        self._before: list[_Before] = []
        self._versions: dict[int, int] = {}

    def open(self, residents: Sequence[Resident]) -> None:
        """Take down the values of the narrow tensors among `residents`, which hold plain or local tensors."""
        self._versions = {id(one.tensor): one.tensor._version for one in residents if not one.tensor.is_inference()}
        self._before = []
        for one in residents:
            region = region_of(one.tensor)
            if one.role is not Role.GRADIENT and one.tensor.dtype in NARROW and region is not None:
                held = one.tensor.detach()  # keeps the memory, and with it its number, should the loop let go of it
                self._before.append(_Before(one, held, region, held.clone()))

    def close(self, residents: Sequence[Resident], watch: UpdateWatch) -> None:
        """Book a step that came to its end."""
        with torch.no_grad():
            now = {(one.role, one.name): one.tensor for one in residents}
            carriers = _Carriers(residents, self._versions)
            for before in self._before:
                tensor = now.get((before.resident.role, before.resident.name))
                if tensor is not None and tensor.shape == before.old.shape and tensor.dtype is before.old.dtype:
                    self._book(before, tensor, watch, carriers)
        self._before = []

    def _book(self, before: _Before, tensor: torch.Tensor, watch: UpdateWatch, carriers: _Carriers) -> None:
        key = (before.resident.role, before.resident.name)
        role, name, dtype = before.resident.role.value, before.resident.name, str(tensor.dtype).removeprefix("torch.")
        account = self.tensors.setdefault(key, TensorUpdates(role, name, "", dtype, tensor.numel()))
        written = watch.written.get(before.region)
        if written is not None:
            account.op, account.file, account.line = written.op, written.file, written.line
            for scaling in written.scalings:
                account.decay = account.decay.plus(scaling.factor, scaling.looked, scaling.stuck, scaling.op)
        if not watch.shadows.holds(tensor):
            region = region_of(tensor)
            if region is not None and region[0] != before.region[0]:
                account.set_anew += 1
            elif not torch.equal(_bits(tensor), _bits(before.old)):
                self.unseen["changes of a narrow tensor by ops that cannot be followed"] += 1
            return
        form = watch.shadows.form(tensor)
        if before.region not in form.origins:
            account.set_anew += 1
            return
        true, old, new = watch.shadows.value(tensor), before.old.double(), tensor.detach().double()
        update = true - old
        moved = torch.isfinite(update) & (update.abs() > _NOISE * old.abs())
        lost = moved & (new == old)
        account.moved += int(moved.sum())
        missed = int(lost.sum())
        if missed > _CARRIED_FROM * int(moved.sum()):
            carrier = carriers.of(before.resident, true, new)
            if carrier:
                account.carriers.add(carrier)
                account.carried += missed
                missed = 0
        account.lost += missed
        update = torch.where(moved, update, 0.0)
        account.squared_updates += float(update.square().sum())
        account.steps += 1
        account.squared_values += float(torch.where(torch.isfinite(old), old, 0.0).square().sum())
        gain = form.gain(before.region)
        account.gains.append(gain)
        if gain is not None and moved.any():
            inputs = torch.where(moved, true - gain * old, 0.0)
            account.low = min(account.low, float(inputs.min()))
            account.high = max(account.high, float(inputs.max()))
            if 0.0 < gain < 1.0 and not (written is not None and written.scalings):
                _merged(account, gain, old, inputs, before)
        if len(account.samples) < _SAMPLED_STEPS:
            account.samples.append((_spread(old, _SAMPLE), _spread(update, _SAMPLE)))


def _merged(account: TensorUpdates, gain: float, old: torch.Tensor, inputs: torch.Tensor, before: _Before) -> None:
    nonzero = old != 0
    looked = int(nonzero.sum())
    outward = int((nonzero & (inputs * old >= 0)).sum())
    if looked and outward >= 0.9 * looked:
        stuck = nonzero & ((gain * old).to(before.old.dtype).double() == old)
        account.merged = account.merged.plus(gain, looked, int(stuck.sum()), account.op)


class _Carriers:
    """Who could hold what a tensor loses: every tensor that changed, by its number of elements."""

    def __init__(self, residents: Sequence[Resident], versions: dict[int, int]) -> None:
        self._groups: dict[int, list[Resident]] = {}
        for one in residents:
            tensor = one.tensor
            if one.role is Role.GRADIENT or not tensor.is_floating_point() or tensor.layout is not torch.strided:
                continue
            if tensor.is_inference() or versions.get(id(tensor)) != tensor._version:
                self._groups.setdefault(tensor.numel(), []).append(one)
        self._rows: dict[int, torch.Tensor] = {}

    def of(self, resident: Resident, true: torch.Tensor, new: torch.Tensor) -> str:
        """The tensor that knows more than half of what was lost: a wide copy, or what is to be added or taken away."""
        group = self._groups.get(true.numel(), [])
        if not group:
            return ""
        if true.numel() not in self._rows:
            many = [_spread(one.tensor.detach().double(), _COMPARED).to(true.device) for one in group]
            self._rows[true.numel()] = torch.stack(many)
        rows, wanted, held = self._rows[true.numel()], _spread(true, _COMPARED), _spread(new, _COMPARED)
        missing = (held - wanted).abs().sum()
        ways = (rows, held + rows, held - rows)
        left = torch.stack([(way - wanted).abs().sum(1) for way in ways]).amin(0)
        for one, error in zip(group, left.tolist(), strict=True):
            if error < 0.5 * float(missing) and (one.role, one.name) != (resident.role, resident.name):
                return one.name
        return ""


def _spread(values: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many elements, evenly spread, the same ones each time."""
    flat = values.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))].clone()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
