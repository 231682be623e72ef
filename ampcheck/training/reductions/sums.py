"""Sums and norms as they are built up, op by op: what each should be in float64, and what it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.health import Unmeasured
from ampcheck.health.values import values_of
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import op_name, users_line
from ampcheck.torchtools.storage import storage_number
from ampcheck.training.reductions.lost_addends import VanishedWatch
from ampcheck.training.reductions.norms import NormStats, NormWatch

FEWEST = 8
"""A running sum of fewer addends is not judged: it loses little more than one rounding."""

_OVERFLOWING = 3
"""A sum of so many addends is one that may overflow; two are an addition like any other."""

_SAMPLE = 256
"""Elements of a sum that are followed in float64."""

_PURGE = 1024
"""Ops between two looks for tensors that are gone."""

Key = tuple[int, int, int, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SumStats:
    """One running sum, at its longest.

    kind: `sum` (what the user adds up), `gradient` (a parameter's gradient over several backward passes), `graph`
    (addends of a forward, or that backward adds up on its way). format: the narrowest format that the partial sums were
    rounded to. addends: how many; roundings: how often a partial sum was rounded to at most 16 bits. elements: of one
    addend. error: Euclidean distance from the exact sum, relative to it; once: the same of the exact sum rounded once;
    wide: of the same sum in float32. overflowed: elements that are infinite or NaN where the exact sum is finite.
    vanished: the share of the addends' nonzero values that had become zero, in float16, before they were added.
    """

    kind: str
    format: str
    addends: int
    roundings: int
    elements: int
    error: float
    once: float
    wide: float
    overflowed: int = 0
    file: str = ""
    line: int | None = None
    vanished: float = 0.0

    @property
    def ratio(self) -> float:
        """The error in roundings of the exact sum."""
        return self.error / self.once if self.once else 0.0 if not self.error else float("inf")


@dataclass(slots=True)
class _Sum:
    """A partial sum. `bit` names the sum it is part of; all but the sizes are samples in float64, `wide` in float32."""

    bit: int
    exact: torch.Tensor
    actual: torch.Tensor
    wide: torch.Tensor
    largest: torch.Tensor
    addends: int
    roundings: int
    format: str
    kind: str
    elements: int
    file: str = ""
    line: int | None = None
    gone: int = 0
    given: int = 0

    @property
    def overflows(self) -> bool:
        return self.addends >= _OVERFLOWING and bool((self.exact.isfinite() & ~self.actual.isfinite()).any())


class ReductionWatch(TorchDispatchMode):
    """Follow every running sum and every norm of norms that is computed inside.

    A running sum is `acc = acc + g`, `acc += g` and their foreach forms, also with casts between, where the addend was
    not computed from the partial sum: `h = h + f(h)` is a residual stream, no reduction. Followed are at most 256
    elements of each. A tensor that anything else has written to begins anew. After the block, `sums()` and `norms()`
    tell what was found. Of a DTensor the local shard is followed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0
        self._sums: dict[Key, _Sum] = {}
        self._longest: dict[int, _Sum] = {}
        self._from: dict[int, int] = {}  # storage -> bits of the sums that its values were computed from
        self._held: dict[int, StorageWeakRef] = {}  # while it is held no other storage gets the same number
        self._bits = 0
        self._norms = NormWatch()
        self._vanished = VanishedWatch()
        self._single: list[SumStats] = []

    def sums(self) -> list[SumStats]:
        """Every running sum of `FEWEST` addends or more, and shorter ones that overflow."""
        return [*(_stats(one) for one in self._longest.values()), *self._single]

    def norms(self) -> list[NormStats]:
        """Every norm that was computed from norms."""
        return list(self._norms.totals)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        self.ops += 1
        name = op_name(func)
        with torch.no_grad():
            pending = [self._before(*one) for one in _additions(name, args, kwargs)]
            shrinks = self._vanished.before(name, args, _sample)
            key_before = self.key(args[0]) if shrinks is not None else None
        out = func(*args, **kwargs)
        with torch.no_grad():
            place = users_line(sys._getframe())
            self._norms.see(name, args, kwargs, out, self.key, place)
            self._pass_on(name, args, kwargs, out)
            results = [t for _, t in tensors(out)] or [args[0]] if pending else []
            if pending and results and isinstance(results[0], list):
                results = results[0]  # what a foreach op wrote to
            for one, result in zip(pending, results, strict=False):
                if one is not None:
                    self._after(one, result, place)
            if name in _COPIES:
                self._copied(name, args, out)
            if shrinks is not None:
                self._vanished.after(shrinks, self.key(out), key_before, _sample(out))
            if name.partition(".")[0] == "aten::sum":
                self._summed(args[0], out, place)
        if self.ops % _PURGE == 0:
            self._purge()
        return out

    def _summed(self, values: torch.Tensor, out: object, place: tuple[str, int | None]) -> None:
        """One op that adds up: inside it adds in float32, but its result may not fit into 16 bits."""
        total, addends = _plain(out), _plain(values)
        if total is None or addends is None or not total.is_floating_point() or total.dtype.itemsize > 2:
            return
        if _kind(values) != "sum":  # what overflows under a loss scale is the scaler's to see
            return
        bad = int((~total.isfinite()).sum())
        if bad and addends.numel() > total.numel() and bool(addends.isfinite().all()):
            many = addends.numel() // max(total.numel(), 1)
            name = format_of(total.dtype).name
            self._single.append(SumStats("sum", name, many, 1, total.numel(), 0.0, 0.0, 0.0, bad, *place))

    def key(self, tensor: object) -> Key | None:
        """What names a tensor's values: the same for every view of the same elements in the same order."""
        plain = _plain(tensor)
        if plain is None:
            return None
        number = storage_number(plain)
        if number is None:
            return None
        if number not in self._held:
            self._held[number] = StorageWeakRef(plain.untyped_storage())  # type: ignore[no-untyped-call]
        layout = () if plain.is_contiguous() else (*plain.shape, *plain.stride())
        return number, int(plain.storage_offset()), plain.numel(), plain.dtype, layout

    def _pass_on(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """What an output was computed from, pair by pair for a foreach op."""
        if name.startswith("aten::_foreach_") and isinstance(args[0], (list, tuple)):
            lists = [one for one in args if isinstance(one, (list, tuple)) and len(one) == len(args[0])]
            given = out if isinstance(out, (list, tuple)) else args[0]
            for place, result in enumerate(given):
                self._mark(result, [one[place] for one in lists] + [t for t in args if isinstance(t, torch.Tensor)])
            return
        base = name.rpartition("::")[2].partition(".")[0]
        if base.endswith("_like") or base.startswith("new_"):
            return  # made after the shape of a tensor, not from its values
        inputs = [t for _, t in tensors((args, kwargs))]
        written = [t for _, t in tensors(out)]
        if base in _OVERWRITES and (plain := _plain(args[0])) is not None and (key := self.key(plain)) is not None:
            if plain.numel() * plain.element_size() == plain.untyped_storage().nbytes():
                self._from[key[0]] = 0
            inputs = inputs[1:]
        if not written and inputs:
            written = inputs[:1]
        for result in written:
            self._mark(result, inputs)

    def _mark(self, result: object, inputs: Sequence[Any]) -> None:
        bits = 0
        for one in inputs:
            if (key := self.key(one)) is not None:
                bits |= self._from.get(key[0], 0)
        if bits and (key := self.key(result)) is not None:
            self._from[key[0]] = self._from.get(key[0], 0) | bits

    def _before(self, acc: Any, addend: Any, sign: float) -> tuple[_Sum, Any] | None:
        """The partial sum that an addition makes, computed in float64 before the op may write into its operands."""
        one = _sample(acc)
        if one is None:
            return None
        if not isinstance(addend, torch.Tensor):  # `sum(...)` starts at 0: no addend, but part of the value
            held = self._valid(acc, one)
            if held is None:
                return None
            start = float(addend) * sign
            return replace(held, exact=held.exact + start, wide=held.wide + start), acc
        other = _sample(addend)
        if other is None or acc.shape != addend.shape:
            return None
        held, also = self._valid(acc, one), self._valid(addend, other)
        if held is None and also is not None and sign == 1:
            held, also, acc, addend, one, other = also, None, addend, acc, other, one
        more = other * sign
        if held is not None:
            key = self.key(addend)
            if key is not None and self._from.get(key[0], 0) & held.bit:
                return None
            count, exact = 1, more
            wide, largest, roundings = more.float(), more.abs(), 0
            if also is not None:  # two partial sums: pairwise summation
                count, exact, wide = also.addends, also.exact * sign, also.wide * sign
                largest, roundings = also.largest, also.roundings
            return _Sum(
                held.bit | (also.bit if also is not None else 0),
                held.exact + exact,
                held.actual,
                held.wide + wide,
                torch.maximum(held.largest, largest),
                held.addends + count,
                held.roundings + roundings,
                held.format,
                "",
                held.elements,
                gone=held.gone + self._vanished.of(self.key(addend))[0],
                given=held.given + int((other != 0).sum()) + self._vanished.of(self.key(addend))[0],
            ), acc
        self._bits += 1
        addends = max(int(one.any()) + int(other.any()), 1)  # a sum often starts at zero
        largest = torch.maximum(one.abs(), more.abs())
        started = _Sum(
            1 << self._bits, one + more, one, one.float() + more.float(), largest, addends, 0, "", "", acc.numel()
        )
        return started, acc

    def _after(self, pending: tuple[_Sum, Any], result: object, place: tuple[str, int | None]) -> None:
        made, acc = pending
        key, actual = self.key(result), _sample(result)
        if key is None or actual is None or actual.shape != made.exact.shape:
            return
        made.actual = actual
        made.kind, made.file, made.line = _kind(acc), *place
        self._keep(key, made)

    def _keep(self, key: Key, made: _Sum) -> None:
        fmt = format_of(key[3])
        made.roundings += fmt.bits <= 16
        if not made.format or fmt.bits < format_of(made.format).bits:
            made.format = fmt.name
        self._sums[key] = made
        self._from[key[0]] = self._from.get(key[0], 0) | made.bit
        if made.addends >= FEWEST or made.overflows:
            self._longest[made.bit] = made

    def _copied(self, name: str, args: Any, out: Any) -> None:
        """A copy of a partial sum is one as well; to fewer bits it is one more rounding."""
        source = args[1] if name == "aten::copy_" else args[0]
        into = args[0] if name == "aten::copy_" else out
        before, actual = _sample(source), _sample(into)
        held = self._valid(source, before) if before is not None else None
        key = self.key(into)
        if held is None or key is None or actual is None or actual.shape != held.exact.shape:
            return
        if key[3] == getattr(source, "dtype", None):
            self._sums[key] = replace(held, actual=actual)
        else:
            self._keep(key, replace(held, actual=actual, roundings=held.roundings))

    def _valid(self, tensor: object, now: torch.Tensor) -> _Sum | None:
        """The partial sum that a tensor holds, unless something else has been written there since."""
        key = self.key(tensor)
        held = self._sums.get(key) if key is not None else None
        if held is None or held.actual.shape != now.shape:
            return None
        same = torch.equal(held.actual.nan_to_num(7.0), now.nan_to_num(7.0))
        return held if same else None

    def _purge(self) -> None:
        gone = {number for number, storage in self._held.items() if storage.expired()}  # type: ignore[no-untyped-call]
        self._sums = {key: one for key, one in self._sums.items() if key[0] not in gone}
        self._norms.forget(gone)
        self._vanished.forget(gone)
        for number in gone:
            self._from.pop(number, None)
            del self._held[number]


_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})
_COPIES = frozenset({"aten::_to_copy", "aten::clone", "aten::copy_"})


def _additions(name: str, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any, float]]:
    """Accumulator, addend and sign of what an op adds up."""
    base = name.removeprefix("aten::").partition(".")[0].removesuffix("_")
    sign = {"add": 1.0, "sub": -1.0, "_foreach_add": 1.0, "_foreach_sub": -1.0}.get(base)
    if sign is None or not name.startswith("aten::") or len(args) < 2:
        return
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    sign *= float(alpha) if isinstance(alpha, (int, float)) else 1.0
    first, second = args[0], args[1]
    if base.startswith("_foreach"):
        if isinstance(second, (list, tuple)) and len(first) == len(second):
            yield from ((one, other, sign) for one, other in zip(first, second, strict=True))
        return
    if isinstance(first, torch.Tensor) and isinstance(second, (torch.Tensor, int, float)):
        yield first, second, sign


def _kind(acc: Any) -> str:
    """Private names of torch 2.4 to 2.13 tell the engine's own additions from the user's."""
    if torch._C._current_graph_task_id() != -1:
        node = torch._C._current_autograd_node()
        return "gradient" if node is not None and "AccumulateGrad" in node.name() else "graph"
    return "graph" if acc.requires_grad else "sum"


def _plain(tensor: object) -> torch.Tensor | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    values = values_of(tensor)
    return None if isinstance(values, Unmeasured) else values


def _sample(tensor: object) -> torch.Tensor | None:
    """Up to 256 elements in float64, evenly spread; None for what is no tensor of at most 32-bit floats."""
    plain = _plain(tensor)
    if plain is None or not plain.is_floating_point() or plain.dtype == torch.float64 or not plain.numel():
        return None
    flat = plain.detach().reshape(-1)
    step = -(-flat.numel() // _SAMPLE)
    return flat[::step].to("cpu" if flat.device.type == "mps" else flat.device, torch.float64, copy=True)


def one_rounding(values: torch.Tensor, fmt: FloatFormat) -> float:
    """Euclidean norm of the error that one rounding of these float64 values to a format makes.

    That of uniformly distributed errors, an ULP over the square root of 12 each; of fewer than 16 values, which chance
    may favour, the bound of half an ULP.
    """
    _, exponent = torch.frexp(values)
    power = (exponent - 1).clamp(min=fmt.min_exponent) - fmt.mantissa_bits
    ulps = torch.ldexp(torch.ones_like(values), power)
    return float(ulps.norm()) * (12**-0.5 if values.numel() >= 16 else 0.5)


def _stats(one: _Sum) -> SumStats:
    finite = one.exact.isfinite()
    bad = finite & ~one.actual.isfinite()
    good = finite & ~bad
    exact, actual, wide = one.exact[good], one.actual[good], one.wide[good].double()
    size = float(exact.norm()) or 1.0
    # A sum that nearly cancels is known no better than the addends that were rounded before.
    reference = torch.maximum(exact.abs(), one.largest[good])
    return SumStats(
        one.kind,
        one.format,
        one.addends,
        one.roundings,
        one.elements,
        error=float((actual - exact).norm()) / size,
        once=one_rounding(reference, format_of(one.format)) / size,
        wide=float((wide - exact).norm()) / size,
        overflowed=int(bad.sum()),
        file=one.file,
        line=one.line,
        vanished=one.gone / one.given if one.given else 0.0,
    )
