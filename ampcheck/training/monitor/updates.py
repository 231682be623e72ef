"""Changes by optimizer steps: their size, how optimizers round, and how many elements keep their value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.records.stagnation import TensorUpdates
from ampcheck.records.state import Role
from ampcheck.torchtools.private import foreach_norm, foreach_subtract
from ampcheck.torchtools.spacing import spacing
from ampcheck.torchtools.storage import device_of, local
from ampcheck.training.monitor.sums import ParameterStats, Rows

_SAMPLE = 4096

_DROPPED_SHARE = 0.25
"""An update of this part of the spacing is one that rounding to nearest drops, also if it is twice as large."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")

CHUNK = 64 * 2**20
"""Bytes of float32 copies at once."""

_WIDE = 4
"""Bytes of an element from which on the change of a parameter is computed in its own format."""

_NORMS, _COUNTS = 4, 4
"""Columns of the sums: calls, squares of two norms, calls with a norm that is not finite; and those of `_unchanged`."""

_STEPS = 32
"""Steps whose norms wait to be added up together: many small ops on each of them would cost more than they do."""


def rounds_to_nearest(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether updates are known to be rounded to the nearest number, as those of PyTorch's optimizers are."""
    return type(optimizer).__module__.startswith("torch.optim")


def is_compensated(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether an optimizer keeps what a narrow parameter drops: a float32 copy, or (Kahan) the rounding errors.

    A compensation is as narrow as the parameter, and nowhere larger than the distance to the parameter's next number; a
    momentum is larger where weights are small.
    """
    state = optimizer.state.get(parameter, {})
    narrow = parameter.dtype.is_floating_point and parameter.dtype.itemsize < _WIDE
    if not narrow or rounds_to_nearest(optimizer) or not isinstance(state, dict):
        return False
    plain = local(parameter)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        tensor = local(value)
        if tensor.shape != plain.shape or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        if tensor.dtype.itemsize >= _WIDE:
            if bool((tensor.to(plain.dtype) == plain).float().mean() > 0.9):
                return True
            continue
        if name in _MOMENTS:
            continue
        if bool((tensor != 0).any() & (tensor.abs() <= spacing(plain.double(), format_of(plain.dtype))).all()):
            return True
    return False


def sampled(numel: int) -> int:
    """Return how many of the elements of a parameter `expected_moves` samples."""
    return len(range(0, numel, numel // _SAMPLE | 1))


def expected_moves(
    before: torch.Tensor,
    after: torch.Tensor,
    gradient: torch.Tensor,
    group: Mapping[str, Any],
    state: Mapping[Any, Any],
) -> torch.Tensor:
    """[2], float64: how many of a sample of elements unbiased rounding would have moved in a step, and how many moved.

    Only of those whose update is so small, by their spacing, that rounding to nearest drops it. A change of `u` moves a
    number of spacing `s` with a probability of `u / s`, be it rounded stochastically or, in the long run, compensated.
    """
    old, slope = _sample(before).double(), _sample(gradient).double()
    share = _step_size(slope, group, state, before.shape) / spacing(old, format_of(before.dtype))
    far = (slope != 0) & (share < _DROPPED_SHARE)
    return torch.stack(((share * far).sum(), (far & (_sample(after) != _sample(before))).sum().double()))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: flat.numel() // _SAMPLE | 1]


def _step_size(
    slope: torch.Tensor, group: Mapping[str, Any], state: Mapping[Any, Any], shape: torch.Size
) -> torch.Tensor:
    """A lower bound of the step: by moments where there are any, else in proportion to the gradient or by its sign,
    whichever is less."""
    moments = [local(m) for name in ("exp_avg", "exp_avg_sq") if isinstance(m := state.get(name), torch.Tensor)]
    if len(moments) == 2 and all(moment.shape == shape for moment in moments):
        mean, square = (_sample(moment).double() for moment in moments)
        steps, betas = state.get("step", group.get("step")), group.get("betas")
        if steps is not None and betas is not None:
            mean, square = mean / (1 - betas[0] ** steps), square / (1 - betas[1] ** steps)
        ratio = mean.abs() / (square.sqrt() + group.get("eps", 1e-8))
    else:
        ratio = slope.abs()
    size: torch.Tensor = ratio.nan_to_num(0.0).clamp(max=1.0) * group.get("lr", 0.0)
    return size


@dataclass(slots=True)
class Entry:
    """A parameter in a measured step. before: a copy of it, which is overwritten.

    alive: whether the step is to change it; a tensor if only the device knows. group: its optimizer's settings, state:
    its optimizer state; both None where the rounding is known.
    """

    key: int
    parameter: torch.Tensor
    before: torch.Tensor | None
    gradient: torch.Tensor | None
    alive: torch.Tensor | bool
    group: Mapping[str, Any] | None = None
    state: Mapping[Any, Any] | None = None


class Updates:
    """Sums of what steps change. unseen: counts what cannot be measured."""

    def __init__(self, unseen: Counter[str]) -> None:
        self._unseen = unseen
        self._sums: dict[torch.device, _Sums] = {}
        self._first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the values, and which elements were due since

    def add(self, entries: Sequence[Entry]) -> None:
        """The updates of one step, after it."""
        devices: dict[torch.device, list[tuple[Entry, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for entry in entries:
            before, after = entry.before, local(entry.parameter)
            if before is None or entry.gradient is None:
                continue
            if (after.shape, after.dtype, device_of(after)) == (before.shape, before.dtype, device_of(before)):
                devices[device_of(after)].append((entry, before, after))
            else:
                self._unseen["updates that gave a parameter another shape, dtype or device"] += 1
        for device, changed in devices.items():
            if device not in self._sums:
                self._sums[device] = _Sums(device)
            counts = {
                number: self._unchanged(entry, before, after)
                for number, (entry, before, after) in enumerate(changed)
                if after.dtype.is_floating_point and after.dtype.itemsize < _WIDE
            }
            norms = _norms([(before, after) for _, before, after in changed])
            self._sums[device].add(tuple(entry.key for entry, _, _ in changed), norms, counts)

    def still(self, parameters: Mapping[int, torch.Tensor]) -> dict[int, float]:
        """The share of the updated elements that are what they were at the first measured step. Waits for them."""
        shares: dict[int, float] = {}
        for key, (first, moved) in self._first.items():
            now = local(parameters[key])
            if now.shape == first.shape:
                due, still = torch.stack([_counts(*piece) for piece in _pieces(moved, first, now)]).sum(0).tolist()
                shares |= {key: still / due} if due else {}
        return shares

    def forget(self) -> None:
        """Drop all copies."""
        self._first.clear()

    def read(self, parameters: Sequence[ParameterStats]) -> dict[int, TensorUpdates]:
        """The sums by key. Waits for the device. parameters: by their keys."""
        sums = {}
        for device_sums in self._sums.values():
            for key, (calls, update, weight, poisoned, due, unchanged, expected, jumped) in device_sums.read():
                if calls:
                    named = Role.PARAMETER.value, parameters[key].name, parameters[key].dtype, parameters[key].numel
                    sums[key] = updates = TensorUpdates(*named, int(due), int(unchanged), steps=int(calls))
                    updates.squared_updates, updates.squared_values, updates.poisoned = update, weight, int(poisoned)
                    updates.expected, updates.jumped = expected, int(jumped)
        return sums

    def _unchanged(self, entry: Entry, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """[4]: elements with a nonzero gradient, how many of them kept their value, and `expected_moves`."""
        assert entry.gradient is not None
        gradient = local(entry.gradient)
        if gradient.layout is not torch.strided:
            self._unseen["updates by sparse gradients, as to whether they changed anything"] += 1
            return torch.zeros(_COUNTS, dtype=torch.float64, device=device_of(after))
        if entry.key not in self._first:
            self._first[entry.key] = before, torch.zeros_like(before, dtype=torch.bool)
        counts = []
        for moved, slope, old, new in _pieces(self._first[entry.key][1], gradient, before, after):
            due = slope != 0
            due &= entry.alive
            moved |= due
            counts.append(_counts(due, old, new))
        counted = torch.stack(counts).sum(0).double()
        if entry.group is None or entry.state is None:
            return torch.cat((counted, counted.new_zeros(2)))
        return torch.cat((counted, expected_moves(before, after, gradient, entry.group, entry.state) * entry.alive))


class _Sums:
    """Sums over steps for the parameters on one device; the norms of some steps wait to be added up together."""

    def __init__(self, device: torch.device) -> None:
        self._rows = Rows(torch.zeros(_NORMS + _COUNTS, dtype=torch.float64, device=device))
        self._keys: tuple[int, ...] = ()
        self._waiting: list[torch.Tensor] = []

    def add(self, keys: tuple[int, ...], norms: torch.Tensor, counts: Mapping[int, torch.Tensor]) -> None:
        """One step. norms: as `_norms` has them; counts: of narrow parameters, by their place in `keys`."""
        if keys != self._keys:
            self._add_up()
        self._keys = keys
        self._waiting.append(norms)
        if len(self._waiting) == _STEPS:
            self._add_up()
        for number, count in counts.items():
            self._rows.index(keys)
            self._rows.values[keys[number], _NORMS:] += count

    def read(self) -> Iterator[tuple[int, list[float]]]:
        """Each row with its key. Waits for the device."""
        self._add_up()
        return self._rows.read()

    def _add_up(self) -> None:
        if not self._waiting:
            return
        norms = torch.stack(self._waiting).double()  # [steps, parameters, 2]
        self._waiting = []
        calls, poisoned = torch.ones_like(norms[..., :1]), ~norms[..., 1:].isfinite()
        row = torch.cat((calls, norms.square().nan_to_num(0.0, 0.0, 0.0), poisoned), -1).sum(0)
        index = self._rows.index(self._keys)
        self._rows.values[index, :_NORMS] += row


def _counts(due: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[2]: how many are due, and how many of them kept their value. A sum would take eight bytes for each element."""
    same = old == new
    same &= due
    return torch.stack((due.count_nonzero(), same.count_nonzero()))


def _norms(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[pairs, 2]: the norms of the changes and of the weights, float32. Wide copies of `before` are overwritten.

    Underscored functions, but in PyTorch's reference: one call for many parameters, as its own optimizers do.
    """
    wide = [number for number, (_, after) in enumerate(pairs) if after.dtype.itemsize >= _WIDE]
    was, now = [pairs[number][0] for number in wide], [pairs[number][1] for number in wide]
    norms: dict[int, torch.Tensor] = {}
    if wide:
        foreach_subtract(was, now)
        both = torch.stack(foreach_norm(was + now)).view(2, -1).T.float()
        if len(wide) == len(pairs):
            return both
        norms = dict(zip(wide, both, strict=True))
    narrow = {number: list(_pieces(*pair)) for number, pair in enumerate(pairs) if number not in norms}
    # One memory for all: an allocator that allocates and frees pieces in turn may retain many of them.
    most = max((new.numel() for pieces in narrow.values() for _, new in pieces), default=0)
    scratch = torch.empty(2, most, dtype=torch.float32, device=device_of(pairs[0][1]))
    for number, pieces in narrow.items():
        parts = []
        for piece in pieces:
            before, after = (s[: t.numel()].view(t.shape).copy_(t) for s, t in zip(scratch, piece, strict=True))
            parts.append(torch.stack((before.sub_(after).norm(), after.norm())))
        norms[number] = torch.stack(parts).norm(dim=0)
    return torch.stack([norms[number] for number in range(len(pairs))])


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape, split along their longest side so that two float32 copies of a piece fit into `CHUNK`."""
    shape, pieces = tensors[0].shape, -(-tensors[0].numel() * _WIDE * 2 // CHUNK)
    side = max(range(len(shape)), key=lambda dim: shape[dim], default=0)
    if pieces > 1:
        yield from zip(*(torch.split(tensor, -(-shape[side] // pieces), side) for tensor in tensors), strict=True)
    else:
        yield tensors
