"""Measure whether the updates of narrow tensors change anything, and report it in tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ampcheck.catalog.training import STAGNATION
from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.run import Coverage, Table
from ampcheck.torchtools.storage import Region, local
from ampcheck.torchtools.storage import region as region_of
from ampcheck.training.loop import Resident, Role, StepError, TrainingLoop
from ampcheck.training.stagnation.accounts import NO_DECAY, Account, Accounts, Decay
from ampcheck.training.stagnation.cures import Cure, measure_cures
from ampcheck.training.stagnation.shadows import NARROW
from ampcheck.training.stagnation.updates import UpdateWatch

_ROWS = 40
_LONGEST = 8192
_MOST = 0.5
_FALLS = 0.99
"""A sum of increments of one sign never becomes smaller; below this part of what it was, it was cleared."""

_ADDS = (Role.BUFFER, Role.COPY, Role.STATE, Role.OTHER)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A tensor that only adds increments of one sign to itself: it stops where they are half a spacing.

    increment: the typical one. stops_at: the magnitude from which it is lost. steps: how many are left until then.
    """

    increment: float
    stops_at: float
    steps: int


@dataclass(frozen=True, slots=True)
class TensorUpdates:
    """A tensor narrower than float32 over the observed steps.

    moved: updates of elements that are not zero without rounding; lost: those that change nothing and that no other
    tensor carries; carried: those that `carriers` hold instead (a float32 copy, a compensation). set_anew: steps in
    which it was overwritten with values that do not depend on it; steps: the others in which it was written.
    relative_update: the norm of the updates by that of the tensor; pace: the root of the mean of
    their squares by the learning rate, of a parameter, and `optimizer` what steps it.
    decay: what a multiplication by a factor below 1 does on its own; merged: what the factor could do on its own of a
    tensor that is decayed and added to at once. lag: how far, relative to its size, a decaying average may stay from
    what it follows; infinite for what does not decay. compensates: whether it carries what others lose.
    """

    role: str
    name: str
    module: str
    dtype: str
    elements: int
    moved: int
    lost: int
    carried: int = 0
    carriers: tuple[str, ...] = ()
    set_anew: int = 0
    steps: int = 0
    relative_update: float = 0.0
    pace: float = 0.0
    optimizer: str = ""
    decay: Decay = NO_DECAY
    merged: Decay = NO_DECAY
    lag: float = math.inf
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


@dataclass(frozen=True, slots=True)
class VanishedConstant:
    """A constant that is zero in the format of what it is added to.

    of: names of the tensors that this is made of. zeros: how many results were exactly zero. option: which option of an
    optimizer has this value (`eps`); empty where none. smallest: the smallest value that the format holds.
    """

    constant: float
    dtype: str
    of: tuple[str, ...]
    op: str
    file: str
    line: int | None
    zeros: int
    option: str
    smallest: float


@dataclass(frozen=True, slots=True)
class StagnationStats:
    """What became of the updates of a loop in `steps` observed steps.

    looked: tensors that live across steps; narrow: those of them narrower than float32. error: why the loop stopped.
    """

    subject: str
    steps: int
    looked: int
    narrow: int
    tensors: tuple[TensorUpdates, ...] = ()
    vanished: tuple[VanishedConstant, ...] = ()
    error: str = ""
    coverage: Coverage = field(default_factory=Coverage)


def measure_stagnation(loop: TrainingLoop, steps: int) -> StagnationStats:
    """Run the steps 0 to `steps - 1` of a loop and follow every tensor narrower than float32 that lives across them.

    The loop is afterwards as it was. The twins take 8 bytes for each element of a narrow tensor while a step runs, and
    an old copy is kept. Of a DTensor the local shard is followed; nothing is gathered. A step that raises ends it.
    """
    accounts, unseen = Accounts(), Counter[str]()
    vanished: dict[tuple[float, torch.dtype], VanishedConstant] = {}
    looked = narrow = done = 0
    error = ""
    with loop.preserved():
        before = _residents(loop)
        for number in range(steps):
            watch = UpdateWatch(before)
            accounts.open(before)
            if any(one.tensor.dtype in NARROW for one in before):
                with watch:
                    value = loop.take(number)
            else:
                value = loop.take(number)
            if isinstance(value, StepError) and value.kind != "value":
                error = f"step {value.step}: {value.message}"
                break
            done += 1
            after = _residents(loop)
            accounts.close(after, watch)
            _collect(vanished, watch, before, loop)
            unseen += watch.unseen
            looked, narrow = max(looked, len(after)), max(narrow, sum(one.tensor.dtype in NARROW for one in after))
            before = after
        owners, rates = _owners(loop), _rates(loop)
    carriers = {name for account in accounts.tensors.values() for name in account.carriers}
    tensors = [_told(account, carriers, owners, rates) for account in accounts.tensors.values()]
    moved = sum(one.moved for one in tensors)
    coverage = Coverage({"tensors across steps": looked, "updates of elements": moved}, unseen + accounts.unseen)
    told = _with_cures(tensors, accounts)
    return StagnationStats(loop.name, done, looked, narrow, told, tuple(vanished.values()), error, coverage)


def bad_decay(one: TensorUpdates) -> Decay:
    """The decay that is worth telling: that of its own, else, of anything but a parameter, the merged one."""
    return one.decay if one.decay.looked or one.role == Role.PARAMETER.value else one.merged


def lost_decay(one: TensorUpdates) -> float:
    """The share of nonzero elements that the decay of a tensor leaves as they are."""
    decay = bad_decay(one)
    return decay.stuck / decay.looked if decay.looked else 0.0


def stagnation_tables(stats: StagnationStats) -> tuple[Table, ...]:
    """Every narrow tensor that was updated, the worst first; with the cures where they were measured."""
    if not stats.tensors:
        return ()
    ranked = sorted(stats.tensors, key=lambda one: (-max(one.share, lost_decay(one)), one.role, one.name))
    rows = [
        (
            *(one.role, one.name, one.dtype, one.elements, one.moved),
            *(one.share, one.carried / one.moved if one.moved else 0.0, one.relative_update),
            *(bad_decay(one).factor if bad_decay(one).looked else None, lost_decay(one)),
            *(one.accumulation.steps if one.accumulation else None,),
        )
        for one in ranked[:_ROWS]
    ]
    columns = (
        *("role", "tensor", "dtype", "elements", "updates", "lost", "carried elsewhere", "relative update"),
        *("decay factor", "decay lost", "stops after steps"),
    )
    left = len(ranked) - len(rows)
    note = f"{left} more tensors are not listed" if left else ""
    tables = [Table("Updates of tensors narrower than float32", columns, rows, STAGNATION.slug, note)]
    cures = [(one.name, *(f"{c.arrives:.3f} (error {c.error:.3f})" for c in one.cures)) for one in ranked if one.cures]
    if cures:
        names = next(tuple(c.name for c in one.cures) for one in ranked if one.cures)
        text = (
            "the share of the true displacement that arrives, and the relative error, of the observed updates replayed"
        )
        tables.append(Table("What would arrive", ("tensor", *names), cures, STAGNATION.slug, text))
    return tuple(tables)


def _residents(loop: TrainingLoop) -> list[Resident]:
    """The floating residents; of a DTensor the local shard, which is what its ops run on."""
    found = []
    with torch.no_grad():
        for one in loop.residents():
            if one.tensor.is_floating_point() and one.tensor.layout is torch.strided:
                local = one.tensor.to_local() if hasattr(one.tensor, "to_local") else one.tensor
                found.append(replace(one, tensor=local))
    return found


def _collect(
    kept: dict[tuple[float, torch.dtype], VanishedConstant],
    watch: UpdateWatch,
    residents: Sequence[Resident],
    loop: TrainingLoop,
) -> None:
    names: dict[Region, str] = {}
    for one in residents:
        region = region_of(one.tensor)
        if region is not None:
            names[region] = one.name
    for key, new in watch.vanished.items():
        of = tuple(sorted(names[region] for region in new.origins if region in names))
        old = kept.get(key)
        options = (
            name
            for optimizer in loop.optimizers.values()
            for group in optimizer.param_groups
            for name, value in group.items()
            if isinstance(value, float) and value == abs(new.constant)
        )
        kept[key] = VanishedConstant(
            constant=new.constant,
            dtype=_short(new.dtype),
            of=tuple(dict.fromkeys((*(old.of if old else ()), *of))),
            op=new.op,
            file=new.file,
            line=new.line,
            zeros=new.zeros + (old.zeros if old else 0),
            option=next(options, ""),
            smallest=format_of(new.dtype).smallest_subnormal,
        )


def _owners(loop: TrainingLoop) -> Mapping[str, str]:
    """The module of each parameter and buffer."""
    found = {}
    for path, module in loop.modules():
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[f"{path}.{name}" if path else name] = path
    return found


def _rates(loop: TrainingLoop) -> Mapping[str, tuple[str, float]]:
    """The optimizer of each parameter and its learning rate there, 1.0 where it is zero or not a number."""
    names = {id(parameter): name for name, parameter in loop.parameters()}
    found = {}
    for path, optimizer in loop.optimizers.items():
        for group in optimizer.param_groups:
            given = group.get("lr")
            rate = float(given) if isinstance(given, (int, float, torch.Tensor)) else 1.0
            for parameter in group["params"]:
                if id(parameter) in names:
                    found[names[id(parameter)]] = (path, rate if 0.0 < rate < math.inf else 1.0)
    return found


def _told(
    account: Account, carriers: set[str], owners: Mapping[str, str], rates: Mapping[str, tuple[str, float]]
) -> TensorUpdates:
    resident = account.resident
    optimizer, rate = rates.get(resident.name, ("", 1.0))
    name = resident.name
    owner = owners.get(name, owners.get(name.rpartition(".")[0], ""))
    gains = [gain for gain in account.gains if gain is not None]
    known = len(gains) == len(account.gains) > 0
    form = format_of(resident.tensor.dtype)
    decays = known and all(0.0 < gain < 1.0 for gain in gains)
    compensates = name in carriers and resident.tensor.dtype in NARROW
    return TensorUpdates(
        role=resident.role.value,
        name=name,
        module=owner,
        dtype=_short(resident.tensor.dtype),
        elements=account.elements,
        moved=account.moved,
        lost=account.lost,
        carried=account.carried,
        carriers=tuple(sorted(account.carriers)),
        set_anew=account.set_anew,
        steps=account.steps,
        relative_update=math.sqrt(account.update / account.size) if account.size else 0.0,
        pace=math.sqrt(account.update / (account.steps * account.elements)) / rate if account.update else 0.0,
        optimizer=optimizer,
        decay=account.decay,
        merged=account.merged,
        lag=form.unit_roundoff / (1.0 - max(gains)) if decays else math.inf,
        accumulation=None if compensates or not known else _accumulation(account, gains, form),
        compensates=compensates,
        op=account.op,
        file=account.file,
        line=account.line,
    )


def _accumulation(account: Account, gains: list[float], form: FloatFormat) -> Accumulation | None:
    """Where a tensor stops that adds to itself in each observed step, two of them at least, and never starts anew."""
    adds = len(gains) > 1 and all(gain == 1.0 for gain in gains) and (account.low < 0.0) != (account.high > 0.0)
    if account.resident.role is Role.PARAMETER or not adds or account.set_anew or account.carried:
        return None
    increments = torch.cat([update[update != 0].abs() for _, update in account.samples])
    old, update = account.samples[-1]
    if not increments.numel():
        return None
    increment = float(increments.median())
    now = float((old + update).abs().median())
    stops_at = math.ldexp(1.0, math.ceil(math.log2(2.0 * increment)) + form.mantissa_bits)
    return Accumulation(increment, min(stops_at, form.max), max(0, math.ceil((stops_at - now) / increment)))


def _with_cures(tensors: Sequence[TensorUpdates], accounts: Accounts) -> tuple[TensorUpdates, ...]:
    """Cures are measured for the worst tensor of each role, of lost updates, of lost decay and of accumulation."""
    worst: set[str] = set()
    for role in {one.role for one in tensors}:
        here = [one for one in tensors if one.role == role and not one.compensates]
        decays = {one.name: lost_decay(one) for one in here if one.share <= _MOST}
        ranks: tuple[Callable[[TensorUpdates], float], ...] = (
            lambda one: one.share,
            lambda one, decays=decays: decays.get(one.name, 0.0),  # type: ignore[misc]
            lambda one: float(one.accumulation is not None),
        )
        for rank in ranks:
            top = max(here, key=rank, default=None)
            if top is not None and rank(top) > _MOST:
                worst.add(f"{role} {top.name}")
    told = []
    for one, account in zip(tensors, accounts.tensors.values(), strict=True):
        if f"{one.role} {one.name}" in worst:
            decaying = one.share <= _MOST and lost_decay(one) > _MOST
            factor = bad_decay(one).factor if decaying else None
            length = min(_LONGEST, 2 * one.accumulation.steps) if one.accumulation else None
            cures = measure_cures(account.samples, account.resident.tensor.dtype, factor=factor, steps=length)
            one = replace(one, cures=cures)
        told.append(one)
    return tuple(told)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Restarts:
    """Detect 16-bit sums that are reset: called after each step; `names` are the tensors whose magnitude fell."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._before: dict[str, float] = {}

    def look(self, loop: TrainingLoop) -> None:
        """Record the magnitude of each tensor; a DTensor's is that of its shard."""
        with torch.no_grad():
            for one in loop.residents():
                tensor = local(one.tensor)
                if one.role not in _ADDS or not tensor.is_floating_point() or tensor.dtype.itemsize != 2:
                    continue
                now = float(tensor.abs().sum(dtype=torch.float64))
                if now < _FALLS * self._before.get(one.name, 0.0):
                    self.names.add(one.name)
                self._before[one.name] = now
