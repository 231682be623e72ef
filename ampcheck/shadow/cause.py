"""Why a result is beyond its bound: what the op did to it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.facts.memory import dtype_name, finite, roundoff
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.records import faults
from ampcheck.records.faults import Fault
from ampcheck.records.results import Examination
from ampcheck.shadow.call import Call, Side, SideOf, leaves
from ampcheck.shadow.exchange import NAMESPACES
from ampcheck.shadow.norms import difference

_KEPT_VALUE_ERROR = 0.125
"""The relative error of a result of which two bits are left."""


def fault_at(kind: str, call: Call, tensor: torch.Tensor, seen: Examination) -> Fault:
    """A fault of a result."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    return Fault(kind, call.where, dtype, seen, shape, numel=seen.numel, index=call.index)


def with_sizes(fault: Fault, call: Call, tensor: torch.Tensor, store: CompanionStore) -> Fault:
    """A fault with the largest magnitudes that went into the op and came out, and the number of lost elements."""
    largest = largest_of(tensor), largest_of(store.exact(tensor))
    seen = fault.examination
    elements = seen.lost or seen.zeroed
    return replace(fault, amax_in=largest_input(call), amax_out=largest[0], exact_amax=largest[1], elements=elements)


def fault_of(call: Call, tensor: torch.Tensor, seen: Examination, store: CompanionStore, *, accumulates: bool) -> Fault:
    """The fault of an op whose result is beyond its bound. accumulates: the result adds up what was written to it."""
    accumulates = accumulates or bool(call.traits.writes and call.written)
    sums = call.traits.contracts or call.traits.sums or call.traits.namespace in NAMESPACES
    masks = call.where.phase != "backward" and not sums
    kind = _kind_of(call, tensor, seen, store, accumulates=accumulates, masks=masks)
    coarse = kind == faults.ROUNDING and call.where.phase == "backward" and _sums_in_16_bits(call, tensor, seen)
    fault = with_sizes(fault_at(kind, call, tensor, seen), call, tensor, store)
    if kind == faults.CONSTANT:
        number, wide = next(iter(call.constants.items()))
        return replace(fault, note=f"the code takes {number:.3g} from its format, where float32 takes {wide:.3g}")
    return replace(fault, note="a kernel of this CPU that sums in 16 bits") if coarse else fault


def _kind_of(
    call: Call, tensor: torch.Tensor, seen: Examination, store: CompanionStore, *, accumulates: bool, masks: bool
) -> str:
    """The kind of a fault, one of the constants of `ampcheck.records.faults`. masks: the op may make a mask."""
    if seen.lost:
        return faults.MASK if seen.masked and masks else faults.OVERFLOW
    if call.constants:
        return faults.CONSTANT
    if seen.flushed > 0.5:
        return faults.ZERO if seen.emptied else faults.FLUSH
    if accumulates:
        return faults.DRIFT
    return faults.ROUNDING if _rounds(call, tensor, seen, store) else faults.CANCELLATION


def _sums_in_16_bits(call: Call, tensor: torch.Tensor, seen: Examination) -> bool:
    """Return whether a sum of that many terms in the format of the result has this error. GPU kernels add in
    float32."""
    terms = max((t.numel() for t in call.inputs), default=1) / max(1, tensor.numel())
    return terms > 1 and seen.error <= 2 * math.sqrt(terms) * roundoff(tensor.dtype)


def largest_of(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    if not tensor.is_complex() and tensor.dtype.itemsize > 1:
        low, high = (v.item() for v in torch.aminmax(tensor.detach()))
        if math.isfinite(low) and math.isfinite(high):
            return abs(max(-low, high))
    magnitude = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return float(torch.where(magnitude.isfinite(), magnitude, 0.0).amax())


def largest_input(call: Call) -> float:
    """The largest finite magnitude among the arguments, numbers included, without those that were overwritten."""
    written = {t.untyped_storage()._cdata for t in call.written}
    tensors = [largest_of(t) for t in call.inputs if t.untyped_storage()._cdata not in written]
    arguments = call.op._schema.arguments
    passed = {**dict(zip((a.name for a in arguments), call.args, strict=False)), **call.kwargs}
    values = [passed.get(a.name) for a in arguments if str(a.type) != "int"]  # a dimension and a count are no values
    numbers = [abs(v) for v in values if isinstance(v, (int, float)) and v is not True and math.isfinite(v)]
    return float(max(tensors + numbers, default=0.0))


def follows_from_inputs(call: Call, tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Return whether float64 makes no finite result of the same inputs either: they are at fault, and not the range."""
    return any(not bool(result.isfinite().all()) for result in alone(call, tensor, store))


def survives(call: Call, tensor: torch.Tensor, store: CompanionStore, mended: Collection[Companions]) -> bool:
    """Return whether the format of the result holds what the op would give with these inputs mended: whether they are
    at fault for what is not finite."""
    lost = ~finite(tensor) & store.exact(tensor).isfinite()
    results = alone(call, tensor, store, mended_side(store, mended))
    return any(bool(finite(result.to(tensor.dtype)[lost]).all()) for result in results)


def float32_keeps(call: Call, tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Return whether float32 gives the exact result to more than two bits: what even float32 loses is no fault of 16
    bits.

    A zero has no bits to keep, such as a row of equal values less its mean.
    """
    exact = store.exact(tensor)
    if not bool(exact.any()):
        return False
    rounded = SideOf(store, lambda t: store.exact(t).to(torch.complex64 if t.is_complex() else torch.float32), "moved")
    for result in alone(call, tensor, store, rounded):
        error, size = difference(result, exact)
        if error <= _KEPT_VALUE_ERROR * size:
            return True
    return False


def makes_nonfinite(call: Call, seen: Examination, store: CompanionStore) -> bool:
    """Return whether exact itself becomes NaN, or infinite, by this op; one that writes constants means it."""
    if not (seen.exact_nan or seen.exact_inf) or call.traits.fills in ("number", "part"):
        return False
    sources = [store.exact(t) for t in call.inputs]
    made_nan = seen.exact_nan and not any(bool(t.isnan().any()) for t in sources)
    return made_nan or bool(seen.exact_inf and all(bool(t.isfinite().all()) for t in sources))


def mended_side(store: CompanionStore, mended: Collection[Companions]) -> SideOf:
    """The real inputs of one op in float64, and the exact ones in place of those that are `mended`."""
    exact, side = {id(companions) for companions in mended}, Side(store, "exact")
    return SideOf(store, lambda t: store.exact(t) if id(store.of(t)) in exact else side.convert(t))


def alone(call: Call, tensor: torch.Tensor, store: CompanionStore, side: Side | None = None) -> list[torch.Tensor]:
    """The results of the op that may be this one, in float64 on the same inputs; none where it does not run."""
    if call.written:  # an input is overwritten
        return []
    try:
        result = (side or SideOf(store, Side(store, "exact").convert)).run(call)
    except OP_ERRORS:
        return []
    kind = tensor.is_complex(), tensor.is_floating_point()  # `topk` returns indices as well
    return [r for r in leaves(result) if r.shape == tensor.shape and (r.is_complex(), r.is_floating_point()) == kind]


def part_of_sum(call: Call, term: torch.Tensor, result: torch.Tensor, store: CompanionStore) -> float:
    """The norm of what a term adds to a sum in float64, relative to that of the sum."""
    whole = SideOf(store, lambda t: store.exact(t).clone())  # the op may write to what it gets
    rest = SideOf(store, lambda t: torch.zeros_like(store.exact(t)) if t is term else store.exact(t).clone())
    part = torch.linalg.vector_norm(whole.run(call) - rest.run(call))
    return float(part / torch.linalg.vector_norm(store.exact(result)))


def _rounds(call: Call, tensor: torch.Tensor, seen: Examination, store: CompanionStore) -> bool:
    """Return whether the op itself loses the digits: float64 on the same inputs gives something else."""
    same = alone(call, tensor, store)
    if not same:
        return True
    wide = tensor.to(same[0].dtype)
    own = min(float(torch.linalg.vector_norm(wide - r)) for r in same)
    size = min(float(torch.linalg.vector_norm(r)) for r in same)
    return not own <= 0.3 * seen.impact * size
