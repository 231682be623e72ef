"""What narrow tensors would hold without rounding: a float64 twin for each storage, and what it was made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ampcheck.core.formats import FloatFormat
from ampcheck.torchtools.storage import Region
from ampcheck.torchtools.storage import region as region_of
from ampcheck.training.stagnation.calls import CONSTANT, Form, added, itself, mixed

NARROW: frozenset[torch.dtype] = frozenset(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
"""Floating dtypes narrower than float32 in which values are added up (block scales and packed formats are not)."""

_PURGED_AT = 1 << 26


def spacing(values: torch.Tensor, form: FloatFormat) -> torch.Tensor:
    """The distance between neighbours of a format at float64 `values`, element by element."""
    _, exponent = torch.frexp(values)  # of a mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(values), exponent.clamp(min=form.min_exponent + 1) - 1 - form.mantissa_bits)


@dataclass(slots=True)
class _Twin:
    alive: StorageWeakRef
    dtype: torch.dtype
    flat: torch.Tensor
    forms: dict[tuple[int, int], Form] = field(default_factory=dict)


class Shadows:
    """Float64 twins, one for each storage: a view of a tensor has the same view of its twin.

    The number of a storage names one storage only: a weak reference keeps it from being given out again.
    """

    def __init__(self) -> None:
        self._twins: dict[int, _Twin] = {}
        self._opaque: set[int] = set()
        self._drawn: dict[int, StorageWeakRef] = {}
        self._bytes = 0

    def touches(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor has a twin, be it seen as another dtype."""
        region = region_of(tensor)
        return region is not None and region[0] in self._twins

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a twin of its own dtype."""
        region = region_of(tensor)
        return region is not None and region[0] in self._twins and self._twins[region[0]].dtype is tensor.dtype

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The twin of a tensor that has one, as a view: what is written to it stays."""
        twin = self._twins[tensor.untyped_storage()._cdata]
        return twin.flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def form(self, tensor: torch.Tensor) -> Form:
        """What a tensor with a twin was made of."""
        region = region_of(tensor)
        if region is None or region[0] not in self._twins:
            return CONSTANT
        forms = self._twins[region[0]].forms
        return forms.get(region[1:]) or mixed(list(forms.values()))

    def seed(self, tensor: torch.Tensor) -> None:
        """Give a tensor a twin with the values it has now."""
        region = region_of(tensor)
        if region is None:
            return
        if region[0] in self._twins and self._twins[region[0]].dtype is tensor.dtype:
            self._twins[region[0]].forms.setdefault(region[1:], self.fresh(region))
            return
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._keep(region, tensor, tensor.detach().as_strided((length,), (1,), 0).to(torch.float64), self.fresh(region))

    def fresh(self, region: Region) -> Form:
        """The form of a tensor that gets its twin now."""
        return Form(mixed=frozenset((region,))) if region[0] in self._opaque else itself(region)

    def put(self, tensor: torch.Tensor, value: torch.Tensor, form: Form) -> None:
        """Give a new tensor a twin: value [the tensor's shape], float64."""
        region = region_of(tensor)
        if region is None:
            return
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = torch.zeros(length, dtype=torch.float64, device=tensor.device)
        flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        self._keep(region, tensor, flat, form)

    def rewrite(self, tensor: torch.Tensor, form: Form) -> None:
        """Note what a tensor with a twin was made of after it was written to."""
        region = region_of(tensor)
        twin = self._twins.get(region[0]) if region is not None else None
        if region is None or twin is None:
            return
        begin, end = region[1], region[1] + region[2]
        adds = form.gain(region) == 1.0 and not form.pure
        for other in [o for o in twin.forms if o != region[1:] and o[0] < end and begin < o[0] + o[1]]:
            parts = (twin.forms[other], mixed((Form(mixed=form.origins - {region}),)))
            twin.forms[other] = added(*parts) if adds else mixed((*parts, form))
        twin.forms[region[1:]] = form

    def drop(self, tensor: torch.Tensor) -> None:
        """From now on the values that a tensor really holds are the truth."""
        region = region_of(tensor)
        if region is not None:
            self._opaque.add(region[0])
            self._twins.pop(region[0], None)

    def draw(self, tensor: torch.Tensor) -> None:
        """Note that a tensor holds random numbers, or what was made of them element by element."""
        region = region_of(tensor)
        if region is not None:
            self._drawn[region[0]] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether that was noted."""
        region = region_of(tensor) if self._drawn else None
        return region is not None and region[0] in self._drawn

    def _keep(self, region: Region, tensor: torch.Tensor, flat: torch.Tensor, form: Form) -> None:
        if self._bytes > _PURGED_AT:
            gone = [key for key, twin in self._twins.items() if twin.alive.expired()]  # type: ignore[no-untyped-call]
            for key in gone:
                del self._twins[key]
            self._bytes = 0
        self._bytes += flat.numel() * flat.element_size()
        alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        twin = _Twin(alive, tensor.dtype, flat)
        twin.forms[region[1:]] = form
        self._twins[region[0]] = twin
