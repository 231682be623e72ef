"""What each op did to its values, judged against the same op on the same inputs in float64.

The comparison is local: it blames the op that lost the values, not those that carry the loss on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.health import PendingHealth, TensorHealth, Unmeasured, measure_health, read_all
from ampcheck.numerics.equal_random import DRAWS, draws_numbers
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.integers import Integers
from ampcheck.torchtools.pytree import is_plain, map_tensors, tensors
from ampcheck.torchtools.trace import OpEvent

UNWRITTEN = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_", "aten::_efficientzerotensor")
"""Ops whose results are memory that nothing was written to, by the beginning of their names."""

EXACT = frozenset(
    f"aten::{name}"
    for name in (
        "clone copy_ detach cat stack index index_select gather where masked_fill masked_fill_ fill_ zero_ max "
        "min amax amin maximum minimum clamp clamp_min clamp_max relu neg abs embedding sort topk zeros ones full "
        "new_zeros new_ones new_full zeros_like ones_like full_like constant_pad_nd repeat flip roll scatter "
        "scatter_ max_pool2d_with_indices threshold_backward slice_backward select_backward _local_scalar_dense"
    ).split()
)
"""Ops that move values without rounding them; a chain of roundings does not grow there."""
_WEIGHED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "embedding", "_rnn")
_ALONG = ("cumsum", "cumprod", "_logcumsumexp", "_softmax", "_log_softmax")


_FILLS = frozenset(
    f"aten::{name}"
    for name in (
        "full full_like new_full fill fill_ masked_fill masked_fill_ index_fill index_fill_ scalar_tensor "
        "constant_pad_nd"
    ).split()
)
"""Ops that write a constant; one that computes with a NaN makes it."""


class OpWatch:
    """An observer of `ampcheck.torchtools.trace.Trace` that gathers `OpFacts` and the health of every module's values.

    shadow: run each low-precision op a second time in float64. Without it only non-finite values are judged.
    histogram: keep the exponent histograms per module and phase. integer_inputs: storages of integers handed in.
    """

    def __init__(self, *, shadow: bool = True, histogram: bool = False, integer_inputs: Collection[int] = ()) -> None:
        self.unseen: dict[str, int] = {}
        self.measured = 0
        self.low = 0
        self.casts = 0
        self.longest_chain = 0
        self.longest_reduction = 1
        self._shadow = shadow
        self._histogram = histogram
        self._facts: dict[tuple[Where, str], OpFacts] = {}
        self._health: dict[tuple[str, str], list[PendingHealth | Unmeasured]] = {}
        self._chains: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._integers = Integers(in_float64, integer_inputs)
        self._nan: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def facts(self) -> tuple[OpFacts, ...]:
        """What was seen, in the order in which the places first ran."""
        used = self._integers.used
        facts = (replace(fact, used=key in used) if fact.collided else fact for key, fact in self._facts.items())
        return tuple(sorted(facts, key=lambda fact: fact.index))

    def reach(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is an output of the model, or a buffer that it keeps."""
        self._integers.reach(tensor)

    def keeps_nan(self) -> bool:
        """Whether a result is left that holds a NaN and that no later op took in: an end of the computation."""
        return any(bool(tensor.isnan().any()) for tensor in self._nan)

    def health(self) -> dict[tuple[str, str], TensorHealth]:
        """The merged health of every floating op output by (phase, module)."""
        merged = {}
        for key, pending in self._health.items():
            seen = [health for health in read_all(pending) if isinstance(health, TensorHealth)]
            if seen:
                merged[key] = sum(seen[1:], seen[0])
        return merged

    def before(self, op: torch._ops.OpOverload, args: object, kwargs: object) -> Any:
        """Keep the inputs of an op that overwrites them."""
        if self._shadow and op._schema.is_mutable:
            return map_tensors(self._copy, (args, kwargs))
        return None

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._integers.copied(tensor, tensor.clone()) if tensor.is_floating_point() else tensor

    def after(
        self, event: OpEvent, op: torch._ops.OpOverload, args: object, kwargs: object, out: object, held: object
    ) -> None:
        """Judge one op that has just run. What we cannot judge is noted; it must not pose as the model's failure."""
        try:
            self._look(event, op, args, kwargs, out, held)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self._note(f"{event.op}: {brief(error)}")

    def _look(
        self, event: OpEvent, op: torch._ops.OpOverload, args: object, kwargs: object, out: object, held: object
    ) -> None:
        self._integers.follow(op, args, kwargs, out)
        if op.is_view or op._schema.name.startswith(UNWRITTEN):
            for _, view in tensors(out):
                self._chains[view] = self._chain_of(args, kwargs)
            return
        given = held if held is not None else (args, kwargs)
        results = floating(out)
        self._count_integers(event, op, given, out)
        if not results:
            return
        if any(not is_plain(t) for _, t in tensors(out) if t.is_floating_point() or t.is_complex()):
            self._note(f"{event.op}: a tensor subclass or layout without plain values")
            return
        self.measured += len(results)
        self.low += any(r.dtype.itemsize <= 2 for r in results)
        self._grow_chain(event, op, (args, kwargs), results)
        for result in results:
            health = measure_health(result, histogram=self._histogram)
            self._health.setdefault((event.phase, event.module), []).append(health)
        self._judge(event, op, given, results)

    def _judge(self, event: OpEvent, op: torch._ops.OpOverload, given: object, results: list[torch.Tensor]) -> None:
        sources = floating(given)
        amax_in, bad_in, nan_in = _summary(sources)
        scalars = [value for value in _scalars(given) if isinstance(value, float)]
        amax_in = max([amax_in, *(abs(s) for s in scalars if math.isfinite(s))])
        writes_nan = op._schema.name in _FILLS and any(map(_is_nan, _scalars(given)))
        deliberate = any(not math.isfinite(scalar) for scalar in scalars)
        amax, bad, nan = _summary(results)
        low = [r for r in results if r.dtype.itemsize <= 2]
        if len(self._nan) and not op._schema.name.endswith(("_like", "_local_scalar_dense")):
            for source in sources:
                if source in self._nan:
                    del self._nan[source]
        for result in results if nan else ():
            self._nan[result] = True
        born = 0 if deliberate or bad_in else bad
        spoiled = nan if bad_in and not nan_in else 0
        dtype = min(results, key=lambda t: t.dtype.itemsize).dtype
        fact = OpFacts(
            event.where,
            str(dtype).removeprefix("torch."),
            numel=sum(r.numel() for r in results),
            amax_in=amax_in,
            amax=amax,
            produced=born,
            spoiled=spoiled,
            carried=bad - born - spoiled,
            nan=0 if nan_in or writes_nan else nan,
            written=nan if writes_nan else 0,
            index=event.index,
        )
        if low and op._schema.name not in DRAWS and not draws_numbers_itself(op, given):
            vanishing = [s for s in scalars if 0.0 < abs(s) <= format_of(dtype).flushes_at]
            fact = replace(fact, constant=vanishing[0] if vanishing else None)
        if self._shadow and (low or born or spoiled or (bad and bad_in)) and not draws_numbers_itself(op, given):
            fact = self._beside_float64(fact, op, given, results)
        key = (event.where, fact.dtype)
        self._facts[key] = self._facts[key] + fact if key in self._facts else fact

    def _beside_float64(
        self, fact: OpFacts, op: torch._ops.OpOverload, given: object, results: list[torch.Tensor]
    ) -> OpFacts:
        wide = in_float64(op, given)
        if wide is None:
            self._note(f"{fact.where.op} does not run in float64")
            return fact
        twins = floating(wide)
        if [t.shape for t in twins] != [r.shape for r in results]:
            self._note(f"{fact.where.op} gives other shapes in float64")
            return fact
        dtypes = [r.dtype for r in results]
        results = [r.float() if r.dtype.itemsize == 1 else r for r in results]  # float8 has no comparisons
        lost = sum(int((~r.isfinite() & w.isfinite()).sum()) for r, w in zip(results, twins, strict=True))
        limited = lost > 0 if fact.produced or fact.spoiled or lost else None
        if lost and not fact.produced:  # beside the infinities that came in, some that float64 does not make of them
            fact = replace(fact, produced=lost, carried=max(0, fact.carried - lost))
        nonzero = flushed = emptied = 0
        share = error = 0.0
        terms, widest = 1, max((t.numel() for _, t in tensors(given)), default=1)
        for result, twin, dtype in zip(results, twins, dtypes, strict=True):
            if dtype.itemsize > 2:
                continue
            alive = twin.isfinite() & (twin != 0)
            both = twin.isfinite() & result.isfinite()
            if size := _norm(twin[both]):
                distance = _norm(result[both].double() - twin[both]) / size
                if distance > error:
                    error, terms = distance, max(1, widest // result.numel())
            gone = alive & (result == 0) & (twin.abs() <= format_of(dtype).flushes_at)
            vanished = int(gone.sum())
            nonzero += int(alive.sum())
            flushed += vanished
            if vanished:
                whole = _norm(twin[alive])
                share = max(share, _norm(twin[gone]) / whole if whole else 1.0)
                emptied += not bool(result.any())
        return replace(
            fact,
            limited=limited,
            nonzero=nonzero,
            flushed=flushed,
            flushed_share=share,
            error=error,
            terms=terms,
            emptied=emptied,
        )

    def _count_integers(self, event: OpEvent, op: torch._ops.OpOverload, given: object, out: object) -> None:
        """Integers that a floating format changed, or made equal to others."""
        results = [t for _, t in tensors(out)]
        if len(results) != 1 or not results[0].numel() or not is_plain(results[0]):
            return
        loss = self._integers.look(op, given, results[0])
        self.casts += loss.casts
        if loss.dtype is None or not (loss.inexact or loss.collided):
            return
        name = str(loss.dtype).removeprefix("torch.")
        fact = OpFacts(
            event.where,
            name,
            numel=results[0].numel(),
            amax=_summary([results[0]])[0],
            inexact=loss.inexact,
            collided=loss.collided,
            index=event.index,
        )
        key = (event.where, name)
        self._facts[key] = self._facts[key] + fact if key in self._facts else fact
        if loss.collided:
            self._integers.collide(results[0], key)

    def _grow_chain(self, event: OpEvent, op: Any, given: Any, results: list[torch.Tensor]) -> None:
        """Count the roundings since a weight last entered, on the longest path, and the longest sum."""
        self.longest_reduction = max(self.longest_reduction, *(summed_terms(op, given, r) for r in results))
        if event.phase != "forward":
            return
        name = op._schema.name.rpartition("::")[2]
        before = self._chain_of(*given)
        rounds = any(r.dtype.itemsize <= 2 for r in results) and op._schema.name not in EXACT
        chain = (1 if name in _WEIGHED else before + 1) if rounds else before
        self.longest_chain = max(self.longest_chain, chain)
        for result in results:
            self._chains[result] = chain

    def _chain_of(self, *given: object) -> int:
        known = (self._chains[t] for _, t in tensors(given) if t in self._chains)
        return max(known, default=0)

    def _note(self, reason: str) -> None:
        self.unseen[reason] = self.unseen.get(reason, 0) + 1


def summed_terms(op: torch._ops.OpOverload, given: Any, result: torch.Tensor) -> int:
    """How many terms each element of one result sums, 1 where the op sums nothing for it.

    given: the arguments. What keeps the shape of its input (a softmax, a running sum) sums along its dimension; of a
    norm, the statistics are sums and the normalised values are not.
    """
    name = op._schema.name.rpartition("::")[2]
    sources = [t for _, t in tensors(given)]
    if not result.numel() or op._schema.name in EXACT:
        return 1
    if name == "convolution":
        return max(1, int(given[0][1][0].numel()))  # the size of one filter
    if name == "convolution_backward" and result.shape == given[0][1].shape:
        return max(1, int(given[0][2][:, 0].numel()))  # the same weights, of all outputs
    if name in _WEIGHED and result.dim():
        return max((int(t.shape[-1]) for t in sources if t.dim() >= 2), default=1)
    if name.startswith(_ALONG) and sources[0].dim():
        named = {a.name: v for a, v in zip(op._schema.arguments, given[0], strict=False)} | given[1]
        dim = named.get("dim")
        return sources[0].shape[dim] if isinstance(dim, int) else 1
    return max(1, max((t.numel() for t in sources), default=1) // result.numel())


def draws_numbers_itself(op: torch._ops.OpOverload, given: Any) -> bool:
    """Whether running the op twice would give two results."""
    return torch.Tag.nondeterministic_seeded in op.tags and draws_numbers(op, *given)


def in_float64(op: torch._ops.OpOverload, given: object) -> Any:
    """The op on the same inputs in float64; None where that does not run."""
    args, kwargs = map_tensors(_widened, given)
    kwargs = {k: torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v for k, v in kwargs.items()}
    # The overload's own dtype arguments, such as that of softmax.int, are positional.
    args = tuple(torch.float64 if isinstance(a, torch.dtype) and a.is_floating_point else a for a in args)
    try:
        with torch.no_grad():
            return op(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def floating(value: object) -> list[torch.Tensor]:
    """The plain floating tensors inside, complex ones as their real view."""
    found = []
    for _, tensor in tensors(value):
        if tensor.is_complex() and is_plain(tensor):
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_floating_point() and tensor.numel() and is_plain(tensor):
            found.append(tensor)
    return found


def _summary(values: Iterable[torch.Tensor]) -> tuple[float, int, int]:
    """Largest finite magnitude, number of non-finite elements, number of NaNs."""
    amax, bad, nan = 0.0, 0, 0
    for value in values:
        magnitude = (value.float() if value.dtype.itemsize == 1 else value).abs()
        top = float(magnitude.amax())
        if math.isfinite(top):
            amax = max(amax, top)
            continue
        finite = magnitude.isfinite()
        bad += int((~finite).sum())
        nan += int(magnitude.isnan().sum())
        amax = max(amax, float(torch.where(finite, magnitude.double(), 0.0).amax()))
    return amax, bad, nan


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _scalars(value: object) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _scalars(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _scalars(item)
    elif isinstance(value, (int, float)):
        yield value
