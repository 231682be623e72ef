"""Updates of narrow tensors over the observed steps of a loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.facts.memory import has_companions
from ampcheck.records.stagnation import Decay, TensorUpdates, VanishedConstant
from ampcheck.records.state import Role
from ampcheck.torchtools.saving import same_bits
from ampcheck.torchtools.spacing import spacing
from ampcheck.torchtools.storage import storage_number
from ampcheck.training.lineage import NARROW, Lineage, Written
from ampcheck.training.loop import LoopShadow, Resident, TrainingLoop
from ampcheck.training.stagnation.forecast import APART, COARSE, ONCE, Course, Sample, course_of

_FALLS = 0.99
"""A sum of increments of one sign never becomes smaller; below this part of what it was, it was cleared."""

_NOISE = 1e-12
"""Relative to a value, what float64 itself may make of an update that is none: 0.9 x + 0.1 x - x."""

_SAMPLE = 512
_SAMPLED_STEPS = 16
_COMPARED = 1024
_CARRIED_FROM = 0.1

_NOISY = 0.1
"""In spacings, between an update that gets lost and the quarter that noise for rounding has on average."""

_SMALL = 0.24
"""In spacings, updates that rounding to nearest never lets move a value, not even at a power of two."""

_MOST_STEPS = 0.75
"""The part of the steps in which a tensor must carry what another one loses."""

_JUMPS = 0.3
"""The part of the expected movements from which small updates count as rounded at random."""


class Rate(NamedTuple):
    """A learning rate: the one of now, NaN for no number, and the largest that the schedule of its group names.

    A warm-up begins far below the rate that an optimizer was made with.
    """

    now: float
    largest: float


def rates_of(loop: TrainingLoop) -> Mapping[str, Rate]:
    """The learning rates by the names of parameters."""
    names = {id(parameter): name for name, parameter in loop.parameters()}
    return {
        names[id(parameter)]: _rate(group)
        for optimizer in loop.optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def _rate(group: Mapping[str, Any]) -> Rate:
    values = [group.get(key) for key in ("lr", "initial_lr", "max_lr")]  # the others are written by schedulers
    rates = [float(value) if isinstance(value, (int, float, torch.Tensor)) else math.nan for value in values]
    return Rate(rates[0], max((rate for rate in rates if math.isfinite(rate)), default=math.nan))


@dataclass(slots=True)
class FollowedUpdates(TensorUpdates):
    """The updates of a tensor while they are followed.

    candidates: of steps with many lost updates, how many, and the tensors that may carry them; uncarried: such steps
    without any.
    """

    candidates: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    uncarried: int = 0
    samples: list[Sample] = field(default_factory=list)

    def not_carried(self, missed: int, names: tuple[str, ...]) -> int:
        """Return how many of the updates that are missed no other tensor may hold. names: of those that may hold them,
        which is decided later."""
        if names:
            self.candidates.append((missed, names))
            return 0
        self.uncarried += 1
        return missed

    def settle(self) -> None:
        """Decide what carries the lost updates: a tensor that does in most of the steps, as a compensation does in all.

        A first moment is of the size of the learning rate now and then, by chance.
        """
        seen = Counter(name for _, names in self.candidates for name in names)
        carrier, steps = seen.most_common(1)[0] if seen else ("", 0)
        if steps < _MOST_STEPS * (len(self.candidates) + self.uncarried):
            carrier = ""
        for missed, names in self.candidates:
            if carrier and carrier in names:
                self.carriers.add(carrier)
                self.carried += missed
            else:
                self.lost += missed
        self.candidates.clear()

    def course(self, endless: bool, horizon: int) -> Course | None:
        """Return what will stop a tensor that builds on its own value, unless another carries what it loses.

        endless: a sum that is reset now and then does not stop, nor does one of updates, as a weight is.
        """
        factors = self.factors
        if self.role == Role.PARAMETER.value or not factors or self.compensates or self.carriers or self.random:
            return None
        if self.steps <= self.overwritten or (factors[-1] == 1.0 and (endless or self.overwritten)):
            return None
        # PyTorch's kernels for the CPU multiply running statistics in their own format.
        likely = COARSE if "batch_norm" in self.where.op else APART if self.decay.looked else ONCE
        return course_of(self.samples, factors, getattr(torch, self.dtype), horizon, likely)


@dataclass(slots=True)
class _Before:
    resident: Resident
    tensor: torch.Tensor  # keeps the memory, and with it its number, should the loop let go of it
    bit: int
    old: torch.Tensor
    exact: torch.Tensor


class UpdateWatch:
    """Books what each step does to the narrow tensors that live across steps. `tensors` holds them by role and name.

    looked: tensors that live across steps; narrow: those of them narrower than float32. restarted: the names of those
    of 16 bits whose magnitude fell. waiting: the names of narrow parameters that have a gradient. most: how many
    updates of each tensor are recorded, in whichever steps they come.
    """

    def __init__(self, shadow: LoopShadow, lineage: Lineage, most: int) -> None:
        self.tensors: dict[tuple[Role, str], FollowedUpdates] = {}
        self.vanished: dict[tuple[float, str], VanishedConstant] = lineage.vanished
        self.iterates = lineage.iterates
        self.unseen: Counter[str] = Counter()
        self.looked = self.narrow = self.steps = 0
        self._shadow, self._lineage = shadow, lineage
        lineage.overwritten = shadow.accept  # an overwritten tensor has lost nothing by rounding
        self.restarted: set[str] = set()
        self.waiting: set[str] = set()
        self._changing: set[str] = set()
        self._most = most
        self._before: list[_Before] = []
        self._entered: dict[tuple[Role, str], torch.Tensor] = {}  # the errors that values had before their first update
        self._rates: Mapping[str, float] = {}
        self._versions: dict[int, int] = {}
        self._magnitudes: dict[str, float] = {}

    def begin(self, residents: Sequence[Resident], loop: TrainingLoop) -> bool:
        """Take down the values of the narrow tensors, before a step. loop: whose learning rates they follow.

        Returns whether there is something to follow: after the first steps weights that have gradients, and others that
        changed, of which fewer updates than wanted were recorded.
        """
        self._rates = {name: rate.now for name, rate in rates_of(loop).items()}
        self._lineage.begin(residents)
        before = self._versions
        self._versions = {id(r.tensor): r.tensor._version for r in residents if not r.tensor.is_inference()}
        self._before = []
        for resident in residents:
            bit, number = self._lineage.facts.bit_of(resident.tensor), id(resident.tensor)
            if self.steps and before.get(number) != self._versions.get(number):
                self._changing.add(resident.name)
            recorded = self.tensors.get((resident.role, resident.name))
            due = self.steps < self._most or resident.name in self._changing | self.waiting
            if not due or (recorded is not None and recorded.steps + recorded.overwritten >= self._most):
                continue
            if resident.role is not Role.GRADIENT and resident.tensor.dtype in NARROW and bit:
                tensor = resident.tensor.detach()
                known = self._shadow.store.known(tensor) is not None
                exact = self._shadow.exact(tensor).clone() if known else tensor.double()
                self._before.append(_Before(resident, tensor, bit, tensor.clone(), exact))
                self._entered.setdefault((resident.role, resident.name), _spread(exact - tensor, _COMPARED))
        return self.steps < self._most or bool(self._before)

    @torch.no_grad()
    def look(self, residents: Sequence[Resident]) -> None:
        """Record the magnitude of each tensor of 16 bits after a step."""
        for resident in residents:
            if resident.tensor.dtype.itemsize == 2:
                now = float(resident.tensor.abs().sum(dtype=torch.float64))
                if now < _FALLS * self._magnitudes.get(resident.name, 0.0):
                    self.restarted.add(resident.name)
                self._magnitudes[resident.name] = now

    def end(self, residents: Sequence[Resident]) -> None:
        """Book a step that came to its end."""
        self.steps += 1
        self.looked = max(self.looked, len(residents))
        self.narrow = max(self.narrow, sum(resident.tensor.dtype in NARROW for resident in residents))
        with torch.no_grad():
            parameters = (resident for resident in residents if resident.role is Role.PARAMETER)
            narrow = (r for r in parameters if r.tensor.dtype in NARROW and r.tensor.grad is not None)
            self.waiting |= {resident.name for resident in narrow if resident.tensor.requires_grad}
            now = {(resident.role, resident.name): resident.tensor for resident in residents}
            after = [(before, now.get((before.resident.role, before.resident.name))) for before in self._before]
            pairs = [(before, tensor) for before, tensor in after if tensor is not None]
            # A tensor that the step set to values which do not depend on it has lost what it held.
            lost = {id(tensor) for before, tensor in pairs if not self._lineage.facts.form(tensor).mask & before.bit}
            carriers = _Carriers([r for r in residents if id(r.tensor) not in lost], self._versions)
            for before, tensor in pairs:
                if tensor.shape == before.old.shape and tensor.dtype is before.old.dtype:
                    self._book(before, tensor, carriers)
        self._before = []

    def _made_at(self, tensor: torch.Tensor) -> Where | None:
        """The statement that makes a tensor of its own result in the step before: `total = total + loss`."""
        companions = self._shadow.store.known(tensor.detach()) if has_companions(tensor) else None
        return min(companions.sites, key=str, default=None) if companions is not None else None

    def _book(self, before: _Before, tensor: torch.Tensor, carriers: _Carriers) -> None:
        resident, lineage = before.resident, self._lineage
        updates = self.tensors.setdefault(
            (resident.role, resident.name),
            FollowedUpdates(resident.role.value, resident.name, format_of(tensor.dtype).name, tensor.numel()),
        )
        number = storage_number(before.tensor)
        written: Written | None = lineage.written.get(-1 if number is None else number)
        moved_memory = storage_number(tensor) != number
        place = self._made_at(tensor) if moved_memory else None
        if (origin := place or written) is not None:
            updates.where = Where("update", op=origin.op, file=origin.file, line=origin.line)
        if written is None and not moved_memory:
            if not same_bits(tensor, before.old):
                self.unseen["changes of a narrow tensor by ops that cannot be followed"] += 1
            return
        form = lineage.facts.form(tensor)
        if not form.mask & before.bit or not has_companions(tensor):
            updates.overwritten += 1
            return
        updates.decay += written.decay if written is not None else Decay()
        old, new = before.old.double(), tensor.detach().double()
        update = self._shadow.exact(tensor) - before.exact
        moved = torch.isfinite(update) & (update.abs() > _NOISE * old.abs())
        lost = moved & (new == old)
        updates.moved += int(moved.sum())
        gap = spacing(old, format_of(updates.dtype))
        noise = (update.abs() / gap).clamp(max=0.5)
        if form.mask & lineage.drawn and float(noise.mean()) > _NOISY:
            lost = torch.zeros_like(lost)  # noise over a whole spacing was added: it rounds at random
            updates.random |= resident.role is Role.PARAMETER and bool((noise < 0.5).all())
        missed = int(lost.sum())
        if missed > _CARRIED_FROM * int(moved.sum()):
            true, entered = before.exact + update, self._entered[resident.role, resident.name]
            names = carriers.of(resident, true, new) or carriers.of(resident, true, new, entered)
            missed = updates.not_carried(missed, names)
        updates.lost += missed
        update = torch.where(moved, update, 0.0)
        opaque = written is not None and not written.op.startswith("aten::")
        if lineage.draws or opaque:  # rounding at random moves values in proportion to the size of small updates
            part = update.abs() / gap
            small = (part > 0) & (part < _SMALL)
            updates.jumped += int((small & (new != old)).sum())
            updates.expected += float(part[small].sum())
        updates.squared_updates += float(update.square().sum())
        updates.steps += 1
        updates.squared_values += float(torch.where(torch.isfinite(old), old, 0.0).square().sum())
        gain = form.gain(before.bit)
        updates.gains.append(gain)
        if len(updates.samples) < _SAMPLED_STEPS:
            added = update - ((1.0 if gain is None else gain) - 1.0) * before.exact
            added = torch.where(added.abs() > _NOISE * old.abs(), added, 0.0)
            values, after, change, rest = (_spread(part, _SAMPLE).cpu() for part in (old, new, update, added))
            updates.samples.append(Sample(values, after, change, rest, self._rates.get(updates.name, math.nan)))


def rounds_at_random(tensors: Sequence[FollowedUpdates]) -> bool:
    """Return whether the small updates of these tensors together arrive as often as random rounding lets them."""
    expected = sum(updates.expected for updates in tensors)
    return expected >= 2.0 and sum(updates.jumped for updates in tensors) > _JUMPS * expected


def by_slot(tensors: Sequence[FollowedUpdates], parameters: Iterable[str]) -> Iterable[list[FollowedUpdates]]:
    """The tensors that one operation updates: those of a role whose names differ in the parameter only.

    First moments may be rounded at random, and second moments not.
    """
    words = {word for name in parameters for word in name.split(".")}
    groups: dict[tuple[str, ...], list[FollowedUpdates]] = {}
    for updates in tensors:
        own = () if updates.role == Role.PARAMETER.value else updates.name.split(".")
        slot = (word for word in own if word not in words and not word.isdigit())
        groups.setdefault((updates.role, *slot), []).append(updates)
    return groups.values()


class _Carriers:
    """Tensors that may carry the lost updates of another: all that changed, by their number of elements."""

    def __init__(self, residents: Sequence[Resident], versions: dict[int, int]) -> None:
        self._groups: dict[int, list[Resident]] = {}
        for resident in residents:
            tensor = resident.tensor
            if resident.role is not Role.GRADIENT and (
                tensor.is_inference() or versions.get(id(tensor)) != tensor._version
            ):
                self._groups.setdefault(tensor.numel(), []).append(resident)
        self._rows: dict[int, torch.Tensor] = {}

    def of(
        self, resident: Resident, true: torch.Tensor, new: torch.Tensor, entered: torch.Tensor | float = 0.0
    ) -> tuple[str, ...]:
        """The tensors that know more than half of what was lost, the best first: a wide copy, or what is to be added or
        taken away. entered: an error that is older than they are."""
        group = self._groups.get(true.numel(), [])
        if not group:
            return ()
        if true.numel() not in self._rows:
            each = (_spread(other.tensor.detach().double(), _COMPARED).to(true.device) for other in group)
            self._rows[true.numel()] = torch.stack(list(each))
        rows, present = self._rows[true.numel()], _spread(new, _COMPARED)
        wanted = _spread(true, _COMPARED) - entered
        missing = (present - wanted).abs().sum()
        ways = (rows, present + rows, present - rows)
        left = torch.stack([(way - wanted).abs().sum(1) for way in ways]).amin(0)
        ranked = sorted(zip(left.tolist(), range(len(group)), strict=True))
        others = ((o.role, o.name) for o in (group[n] for error, n in ranked if error < 0.5 * float(missing)))
        return tuple(name for role, name in others if (role, name) != (resident.role, resident.name))


def _spread(values: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many elements, evenly spread, the same ones each time."""
    return values.reshape(-1)[:: max(1, -(-values.numel() // most))].clone()
