"""Every tensor that lives across steps: its dtype, size and device, against what a policy allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Scalar, Table
from ampcheck.training.loop import Resident, Role, TrainingLoop
from ampcheck.training.state_dtypes.policies import ResidencyPolicy, policy_of

_ROWS = 40
_CPU = torch.device("cpu")
_SAMPLE = 256

_Place = tuple[tuple[int, ...], torch.device]


@dataclass(frozen=True, slots=True)
class ResidentStats:
    """One tensor that lives across steps.

    shape: of the whole tensor. elements, bytes: what this process holds, of a DTensor the local shard.
    trained: whether it requires a gradient. changed: whether a step changed it; None where that was not looked at.
    master: of a 16-bit weight, the float32 tensor of an optimizer that rounds to it.
    error: relative error, in the Euclidean norm, against a reference, where one was given.
    version: what changes with every write: PyTorch's own count (blind to writes through `.data`), the sum of the bits.
    """

    role: Role
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    device: str
    floating: bool
    trained: bool = False
    changed: bool | None = None
    master: str = ""
    error: float | None = None
    version: tuple[int, ...] = ()

    @property
    def low(self) -> bool:
        """Whether it holds floating-point numbers of 16 bits or fewer."""
        return self.floating and self.dtype not in ("float32", "float64")


@dataclass(frozen=True, slots=True)
class ResidencyStats:
    """What lives across steps. after_step: whether a step ran before, so that gradients and state can be there.

    scaled: whether an enabled GradScaler is there, and, after a step, was used.
    """

    subject: str
    residents: tuple[ResidentStats, ...]
    after_step: bool
    scaled: bool = False
    policy: ResidencyPolicy | None = None


def measure_residency(
    loop: TrainingLoop,
    after_step: bool,
    *,
    before: ResidencyStats | None = None,
    references: Mapping[str, torch.Tensor] | None = None,
) -> ResidencyStats:
    """What lives across the steps of a loop, as it is now. Runs no step; gathers no sharded tensor.

    before: stats from before the steps, which tell what the steps have changed. references: values by name, in higher
    precision, for the error of what is held here. Raises `UsageError` for a policy that means nothing.
    """
    residents = loop.residents()
    earlier = {(one.role, one.name): one.version for one in before.residents} if before is not None else None
    masters = _masters(residents)
    found = tuple(_measured(one, earlier, masters, references or {}) for one in residents)
    scalers = [one for one in loop.reached.scalers.values() if one.is_enabled()]
    used = any(getattr(one, "_scale", None) is not None for one in scalers) if after_step else bool(scalers)
    return ResidencyStats(loop.name, found, after_step, used, policy_of(loop.shape.get("policy"), loop.name))


def _measured(
    one: Resident,
    earlier: Mapping[tuple[Role, str], tuple[int, ...]] | None,
    masters: Mapping[int, str],
    references: Mapping[str, torch.Tensor],
) -> ResidentStats:
    tensor, local = one.tensor, _local(one.tensor)
    version = (id(tensor), 0 if tensor.is_inference() else tensor._version, _bits(local))
    changed = None if earlier is None else earlier.get((one.role, one.name)) != version
    reference = references.get(one.name)
    return ResidentStats(
        one.role, one.name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), *_size(local),
        str(tensor.device), tensor.dtype.is_floating_point, tensor.requires_grad, changed,
        masters.get(id(tensor), ""), None if reference is None else _error(local, _local(reference)), version,
    )  # fmt: skip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds; any other tensor itself."""
    local = getattr(tensor.detach(), "to_local", None)
    return tensor.detach() if local is None else local()


def _size(local: torch.Tensor) -> tuple[int, int]:
    """Elements and bytes; of a sparse tensor those that are stored, of a subclass what it holds inside."""
    if local.layout is torch.sparse_coo:
        local = local.coalesce() if not local.is_coalesced() else local
        parts = [local.indices(), local.values()]
        return parts[1].numel(), sum(part.numel() * part.element_size() for part in parts)
    names: Any = None
    with suppress(AttributeError, TypeError):
        names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
    if names:
        parts = [_local(getattr(local, name)) for name in names]
        return local.numel(), sum(_size(part)[1] for part in parts)
    return local.numel(), local.numel() * local.element_size()


def _bits(local: torch.Tensor) -> int:
    """The sum of the bits of a 16-bit tensor; of any other 0, as nobody asks."""
    integers = {2: torch.int16, 1: torch.int8}.get(local.element_size())
    if integers is None or not _is_low(local.dtype) or local.layout is not torch.strided:
        return 0
    with suppress(RuntimeError, NotImplementedError):  # a subclass that has no view of its bits
        return int(local.view(integers).sum(dtype=torch.int64))
    return 0


def _error(value: torch.Tensor, reference: torch.Tensor) -> float | None:
    if value.shape != reference.shape:
        return None
    exact = reference.detach().to(_CPU, torch.float64)
    size = float(exact.norm())
    distance = float((value.to(_CPU, torch.float64) - exact).norm())
    return distance / size if size else distance


def _masters(residents: list[Resident]) -> dict[int, str]:
    """For each 16-bit weight the float32 tensor of an optimizer whose values round to it, to either neighbour.

    Stochastic rounding takes the farther neighbour now and then, so a weight may be a whole unit away.
    """
    low = [one for one in residents if one.role in (Role.PARAMETER, Role.COPY) and _is_low(one.tensor.dtype)]
    wanted = {_place(_local(one.tensor)) for one in low}
    full: dict[_Place, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for one in residents:
        if one.role in (Role.PARAMETER, Role.STATE) and one.tensor.dtype in (torch.float32, torch.float64):
            local = _local(one.tensor)
            if local.layout is torch.strided and _place(local) in wanted:
                full[_place(local)].append((one.name, local))
    samples = {place: torch.stack([_sample(local) for _, local in held]) for place, held in full.items()}
    found: dict[int, str] = {}
    for weight in low:
        local = _local(weight.tensor)
        if local.layout is not torch.strided or _place(local) not in full:
            continue
        # In a model of equal layers each weight meets the tensors of all of them: few survive a look at a few elements.
        likely = _rounds(samples[_place(local)], _sample(local), local.dtype).all(1).nonzero().flatten().tolist()
        for name, candidate in (full[_place(local)][number] for number in likely):
            if bool(_rounds(candidate.double(), local.double(), local.dtype).all()):
                found[id(weight.tensor)] = name
                break
    return found


def _place(local: torch.Tensor) -> _Place:
    return tuple(local.shape), local.device


def _sample(local: torch.Tensor) -> torch.Tensor:
    """About `_SAMPLE` elements in float64, the same ones of all tensors of a shape; an odd stride meets all columns."""
    flat = local.reshape(-1)
    return flat[:: flat.numel() // _SAMPLE | 1].double()


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype not in (torch.float32, torch.float64)


def _rounds(full: torch.Tensor, low: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where numbers round to those of a dtype; both in float64."""
    form = format_of(dtype)
    return (low - full).abs() <= full.abs() * (2 * form.unit_roundoff) + form.smallest_subnormal


def residency_tables(stats: ResidencyStats) -> tuple[Table, ...]:
    """By role, dtype and device; then the tensors, those of 16 bits first, the largest first among them."""
    if not stats.residents:
        return ()
    groups: dict[tuple[str, str, str], list[ResidentStats]] = defaultdict(list)
    for one in stats.residents:
        groups[(one.role.value, one.dtype, one.device)].append(one)
    rows: list[tuple[Scalar, ...]] = [
        (*key, len(held), sum(one.elements for one in held), sum(one.bytes for one in held))
        for key, held in groups.items()
    ]
    total = sum(one.bytes for one in stats.residents)
    note = f"{total:,} bytes in this process" + ("" if stats.after_step else "; before the first step")
    if stats.policy is not None:
        note += f"; the policy '{stats.policy.name}' is declared"
    columns = ("role", "dtype", "device", "tensors", "elements", "bytes")
    whole = Table(f"What lives across steps: {stats.subject}", columns, rows, "master-weights", note)
    ordered = sorted(stats.residents, key=lambda one: (not one.low, -one.bytes))[:_ROWS]
    parts: list[tuple[Scalar, ...]] = [
        (one.name, one.role.value, one.dtype, str(one.shape), one.elements, one.bytes, one.device, one.master)
        for one in ordered
    ]
    note = f"{len(parts)} of {len(stats.residents)} tensors, those of 16 bits first, then the largest"
    names = ("tensor", "role", "dtype", "shape", "elements", "bytes", "device", "float32 copy")
    return whole, Table(f"Tensors that live across steps: {stats.subject}", names, parts, "master-weights", note)
