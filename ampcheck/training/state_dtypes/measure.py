"""The dtypes of the tensors that live across steps, and those that a policy, declared or a preset, allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

import torch

from ampcheck.core.arguments import parse_choice, show
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.run import Scalar, Table
from ampcheck.records.state import ROLES, DtypePolicy, Role, StateDtypeStats, StateTensor
from ampcheck.torchtools.private import NO_DISPATCH, without_modes
from ampcheck.torchtools.storage import local
from ampcheck.training.loop import Resident, TrainingLoop

_FULL = ("float32", "float64")
_BFLOAT16 = ("bfloat16", *_FULL)

_ROWS = 40

_SAMPLE = 256

PRESETS: Mapping[str, DtypePolicy] = MappingProxyType(
    {
        "amp": DtypePolicy(_FULL, _FULL, _FULL, _FULL, _FULL, _FULL, name="amp"),
        "pure-bf16": DtypePolicy(_BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16, name="pure-bf16"),
        # The output dtype of a sharded module is its MixedPrecisionPolicy's to choose, and with it that of the loss.
        "fsdp2": DtypePolicy(_FULL, _FULL, _FULL, (), _FULL, name="fsdp2"),
        "master-weights-fp32": DtypePolicy(state=_FULL, masters=True, name="master-weights-fp32"),
    }
)
"""Policies by name.

`amp`: everything in float32, autocast casts. `pure-bf16`: everything may be bfloat16, nothing float16. `fsdp2`:
sharded parameters, gradients and optimizer state in float32, low precision for communication and activations.
`master-weights-fp32`: weights of 16 bits, each with a float32 copy that the optimizer steps or keeps. float64 is
allowed wherever float32 is.
"""


def parse_policy(value: object, subject: str = "subject") -> DtypePolicy | None:
    """The policy that a training subject declares under `policy`; None where it declares none.

    Accepted are the name of a preset, a `DtypePolicy`, and a mapping: `{"parameter": "float32", "state":
    ["bfloat16", torch.float32], "exceptions": {"**.norm.*": "float32"}}`, which may start from `"preset": NAME`.
    Raises `UsageError` for anything else.
    """
    if value is None or isinstance(value, DtypePolicy):
        return value
    name = f"policy of {subject}"
    if isinstance(value, str):
        return PRESETS[parse_choice(value, name, PRESETS)]
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{name} must be one of {', '.join(PRESETS)}, or a mapping of roles to dtypes; found {show(value)}"
        )
    values = {("state" if key == "optimizer state" else str(key)): dtypes for key, dtypes in value.items()}
    base = PRESETS[parse_choice(values.pop("preset"), name, PRESETS)] if "preset" in values else DtypePolicy()
    if unknown := sorted(set(values) - {*ROLES, "exceptions", "masters"}):
        raise UsageError(f"{name} names {unknown[0]!r}; there are preset, {', '.join(ROLES)}, exceptions and masters")
    return replace(base, **values, name=f"{base.name}, changed" if base.name in PRESETS else "declared")


def measure_state_dtypes(
    loop: TrainingLoop, after_step: bool, *, before: StateDtypeStats | None = None
) -> StateDtypeStats:
    """The tensors that live across the steps of a loop now. Runs no step; gathers no sharded tensor.

    before: stats from before the steps, which show what the steps have changed. Raises `UsageError` for a policy that
    means nothing.
    """
    residents = loop.residents()
    earlier = {(tensor.role, tensor.name): tensor.version for tensor in before.tensors} if before is not None else None
    masters = _masters(residents)
    tensors = tuple(_measured(resident, earlier, masters) for resident in residents)
    twins = _twins(loop) if before is None else before.twins
    if before is not None and twins:
        tensors = _untied(tensors, twins)
    scalers = [scaler for scaler in loop.reached.scalers.values() if scaler.is_enabled()]
    used = any(getattr(scaler, "_scale", None) is not None for scaler in scalers) if after_step else bool(scalers)
    policy = parse_policy(loop.shape.get("policy"), loop.name)
    return StateDtypeStats(loop.name, tensors, after_step, used, policy, twins=twins)


def _measured(
    resident: Resident, earlier: Mapping[tuple[Role, str], tuple[int, ...]] | None, masters: Mapping[int, str]
) -> StateTensor:
    tensor, part = resident.tensor, local(resident.tensor)
    version = (id(tensor), 0 if tensor.is_inference() else tensor._version, sum_of_bits(part))
    elements, size = _size(part)
    return StateTensor(
        resident.role,
        resident.name,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        elements,
        size,
        str(tensor.device),
        tensor.dtype.is_floating_point,
        tensor.requires_grad,
        None if earlier is None else earlier.get((resident.role, resident.name)) != version,
        masters.get(id(tensor), ""),
        version,
    )


def _size(part: torch.Tensor) -> tuple[int, int]:
    """Elements and bytes; of a sparse tensor those that are stored, of a subclass those of its inner tensors."""
    if part.layout is torch.sparse_coo:
        part = part.coalesce()
        values = part.values()
        return values.numel(), sum(inner.numel() * inner.element_size() for inner in (part.indices(), values))
    with suppress(AttributeError, TypeError):
        if names := part.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            return part.numel(), sum(_size(local(getattr(part, name)))[1] for name in names)
    return part.numel(), part.numel() * part.element_size()


def sum_of_bits(part: torch.Tensor) -> int:
    """Of a strided tensor, in which writes through `.data` must show; 0 of any other."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(part.element_size())
    if integers is None or part.layout is not torch.strided or part.is_meta:
        return 0
    with suppress(RuntimeError, TypeError, AttributeError), without_modes():  # a subclass may have no view of its bits
        return int(part.view(integers).sum(dtype=torch.int64))
    return 0


def _masters(residents: list[Resident]) -> dict[int, str]:
    """For each 16-bit weight the float32 tensor of an optimizer whose values round to it, to either neighbour.

    Stochastic rounding takes the farther neighbour now and then, so a weight may be a whole unit away.
    """
    low = [
        (resident, local(resident.tensor))
        for resident in residents
        if resident.role in (Role.PARAMETER, Role.COPY)
        and resident.tensor.is_floating_point()
        and resident.tensor.dtype not in (torch.float32, torch.float64)
    ]
    full: dict[object, list[tuple[str, torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for resident in residents:
        part = local(resident.tensor)
        wide = resident.role in (Role.PARAMETER, Role.STATE) and part.dtype in (torch.float32, torch.float64)
        plain = type(part).__torch_dispatch__ is NO_DISPATCH  # no packed format
        if wide and plain and part.layout is torch.strided:
            full[part.shape, part.device].append((resident.name, part, _sample(part)))
    masters: dict[int, str] = {}
    for weight, part in low:
        candidates = full[part.shape, part.device] if part.layout is torch.strided else []
        sample = _sample(part) if candidates else part
        for name, wide_part, wide_sample in candidates:
            # In a model of equal layers each weight is compared with the tensors of all: most differ in a sample.
            if _rounds(wide_sample, sample, part.dtype) and _rounds(wide_part.double(), part.double(), part.dtype):
                masters[id(weight.tensor)] = name
                break
    return masters


def _twins(loop: TrainingLoop) -> tuple[tuple[str, str], ...]:
    """Pairs of matrices of one module that differ in dtype alone: what was tied until a cast made another parameter."""
    pairs: list[tuple[str, str]] = []
    for path, module in loop.reached.modules.items():
        known: dict[object, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, parameter in module.named_parameters():
            part = local(parameter)
            plain = type(part).__torch_dispatch__ is NO_DISPATCH
            if part.dim() < 2 or not part.is_floating_point() or not plain or part.layout is not torch.strided:
                continue
            for other, twin in known[part.shape, part.device]:
                low, full = (part, twin) if part.dtype.itemsize < twin.dtype.itemsize else (twin, part)
                if low.dtype is not full.dtype and _is_rounded(low, full):
                    pairs.append((loop.path(path, name), loop.path(path, other)))
            known[part.shape, part.device].append((name, part))
    return tuple(pairs)


def _is_rounded(low: torch.Tensor, full: torch.Tensor) -> bool:
    """Return whether `low` is `full` in another dtype, and no constant, as which many weights begin."""
    sample = _sample(low)
    equal = torch.equal(_sample(full.to(low.dtype)), sample) and bool((sample != sample[:1]).any())
    return equal and torch.equal(full.to(low.dtype), low)


def _untied(tensors: tuple[StateTensor, ...], twins: tuple[tuple[str, str], ...]) -> tuple[StateTensor, ...]:
    """The tensors with the `twin` of each weight that stood still beside it."""
    weights = {tensor.name: tensor for tensor in tensors if tensor.role in (Role.PARAMETER, Role.COPY)}
    learning = {tensor.name.removesuffix(".grad") for tensor in tensors if tensor.role is Role.GRADIENT}
    still: dict[str, str] = {}
    for pair in twins:
        for name, other in (pair, pair[::-1]):
            one, twin = weights.get(name), weights.get(other)
            if one is None or twin is None or not one.trained or name not in learning:
                continue
            if one.changed is False and twin.changed:
                still[name] = other
    return tuple(replace(tensor, twin=still.get(tensor.name, "")) for tensor in tensors)


def _sample(part: torch.Tensor) -> torch.Tensor:
    """About `_SAMPLE` elements in float64, the same ones of all tensors of a shape; an odd stride meets all columns."""
    flat = part.reshape(-1)
    return flat[:: flat.numel() // _SAMPLE | 1].double()


def _rounds(full: torch.Tensor, low: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether numbers round to those of a dtype; both in float64."""
    form = format_of(dtype)
    return bool(((low - full).abs() <= full.abs() * (2 * form.unit_roundoff) + form.smallest_subnormal).all())


def state_dtype_tables(stats: StateDtypeStats) -> tuple[Table, ...]:
    """By role, dtype and device; then the tensors, those of 16 bits first, the largest first among them."""
    if not stats.tensors:
        return ()
    groups: dict[tuple[str, str, str], list[StateTensor]] = defaultdict(list)
    for tensor in stats.tensors:
        groups[(tensor.role.value, tensor.dtype, tensor.device)].append(tensor)
    rows: list[tuple[Scalar, ...]] = [
        (*key, len(group), sum(tensor.elements for tensor in group), sum(tensor.bytes for tensor in group))
        for key, group in groups.items()
    ]
    note = f"{sum(tensor.bytes for tensor in stats.tensors):,} bytes in this process"
    note += "" if stats.after_step else "; before the first step"
    note += f"; {stats.policy} is declared" if stats.policy is not None else ""
    columns = ("role", "dtype", "device", "tensors", "elements", "bytes")
    whole = Table(f"Dtypes of the training state: {stats.subject}", columns, rows, "master-weights", note)
    ordered = sorted(stats.tensors, key=lambda tensor: (not tensor.low, -tensor.bytes))[:_ROWS]
    parts: list[tuple[Scalar, ...]] = [
        (
            tensor.name,
            tensor.role.value,
            tensor.dtype,
            str(tensor.shape),
            tensor.elements,
            tensor.bytes,
            tensor.device,
            tensor.master,
        )
        for tensor in ordered
    ]
    note = f"{len(parts)} of {len(stats.tensors)} tensors, those of 16 bits first, then the largest"
    names = ("tensor", "role", "dtype", "shape", "elements", "bytes", "device", "float32 copy")
    return whole, Table(f"Tensors of the training state: {stats.subject}", names, parts, "master-weights", note)
