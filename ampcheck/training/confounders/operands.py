"""Products in float32 whose operands are float32 in name only: their last mantissa bits were cut off on the way."""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.errors import as_result, brief, require_ran
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.source import op_name, users_line
from ampcheck.training.confounders.settings import UNIT, allowed_error, relative_error

_LOST = 13
"""TF32 keeps 10 of the 23 bits of a float32 mantissa; whatever keeps no more has lost at least these."""

_WIDEST = 16
"""bfloat16 has lost these; a value with fewer bits was quantised on purpose, and is only told of."""

_HELD = 256
"""How many tensors with their origins are held at once; older ones are forgotten."""

_MEASURED = 32
"""How many products are computed again in float64; further ones are only counted."""

_PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::dot": 0, "aten::addmm": 1, "aten::baddbmm": 1,
    "aten::addbmm": 1, "aten::addmv": 1, "aten::convolution": 0,
}  # fmt: skip
"""Ops that multiply and sum, by the position of the first of the two operands."""

_SHAPES = {
    "aten::t", "aten::transpose.int", "aten::permute", "aten::view", "aten::_unsafe_view", "aten::reshape",
    "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims", "aten::select.int",
    "aten::slice.Tensor", "aten::unfold", "aten::as_strided", "aten::constant_pad_nd",
}  # fmt: skip
"""Ops that move values and change none: the origin goes the same way."""

_KEEPING = {"aten::clone", "aten::where.self", "aten::nan_to_num", "aten::copy_", "aten::detach", "aten::alias"}
"""Ops on floats whose result may still be the rounded values; whether it is, is looked at where it is multiplied."""


@dataclass(frozen=True, slots=True)
class ReducedProduct:
    """A product in float32 whose operands have lost mantissa bits of the float32 tensors that they were made from.

    bits: how many trailing mantissa bits are zero in all elements. error: of the product, against float64 of those
    tensors, relative, in the Euclidean norm, in unit roundoffs of float32; None where it was not computed again.
    terms: how many products an element of the result sums. calls: how often this line multiplied such operands.
    """

    op: str
    file: str
    line: int | None
    bits: int
    terms: int
    error: float | None
    calls: int = 1


@dataclass(frozen=True, slots=True)
class OperandStats:
    """What was multiplied in float32. raised: what the function raised, in one line."""

    subject: str
    products: int
    reduced: tuple[ReducedProduct, ...]
    raised: str = ""


@dataclass(slots=True)
class _Origin:
    """The float32 values that a tensor was made from. family: shared by all that comes from one tensor.

    holder: the tensor itself, held so that no other gets its memory. split: whether a rounded part was taken from the
    whole: then what is missing from the one is multiplied on its own, and nothing is lost.
    """

    values: torch.Tensor
    holder: torch.Tensor
    family: list[bool]


class OperandWatch(TorchDispatchMode):
    """Follow float32 tensors through views of their bits into products; `stats` tells what was found.

    Only what passes through an integer view is followed: values that were in a 16-bit dtype say so by themselves. Sees
    no op inside compiled code.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles as ever."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: OrderedDict[tuple[Any, ...], _Origin] = OrderedDict()
        self._products = 0
        self._measured = 0
        self._found: list[tuple[ReducedProduct, list[bool]]] = []

    def stats(self, subject: str = "subject", raised: str = "") -> OperandStats:
        """What was seen so far, each line of the source once."""
        kept = [one for one, split in self._found if not split[0]]
        places: Counter[tuple[str, str, int | None]] = Counter((one.op, one.file, one.line) for one in kept)
        worst: list[ReducedProduct] = []
        for place, calls in places.items():
            same = [one for one in kept if (one.op, one.file, one.line) == place]
            top = max(same, key=lambda one: -1.0 if one.error is None else one.error)
            worst.append(ReducedProduct(*place, top.bits, top.terms, top.error, calls))
        return OperandStats(subject, self._products, tuple(worst), raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = op_name(func)
        if name == "aten::view.dtype" and args[0].dtype is torch.float32:
            self._begin(args[0])
        out = func(*args, **kwargs)
        if name in _PRODUCTS:
            self._multiplied(name, func, args, kwargs, out)
        elif self._origins and isinstance(out, torch.Tensor):
            self._follow(name, func, args, kwargs, out)
        return out

    def _begin(self, tensor: torch.Tensor) -> None:
        if self._origin(tensor) is None and tensor.layout is torch.strided:
            self._keep(tensor, tensor.detach().clone(), [False])  # a copy: the bits may be changed in place

    def _keep(self, tensor: torch.Tensor, values: torch.Tensor, family: list[bool]) -> None:
        self._origins[_key(tensor)] = _Origin(values, tensor, family)
        if len(self._origins) > _HELD:
            self._origins.popitem(last=False)

    def _origin(self, tensor: Any) -> _Origin | None:
        known = isinstance(tensor, torch.Tensor) and self._origins and tensor.layout is torch.strided
        return self._origins.get(_key(tensor)) if known else None

    def _follow(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        given = [(one, origin) for _, one in tensors((args, kwargs)) if (origin := self._origin(one)) is not None]
        if not given or out.layout is not torch.strided:
            return
        source, origin = given[0]
        if name == "aten::sub.Tensor" and len(given) > 1 and _key(given[1][0]) != _key(source):
            if given[1][1].family is origin.family:
                origin.family[0] = True
            return
        if name in _SHAPES:
            moved = func(*map_tensors(lambda one: origin.values if one is source else one, args), **kwargs)
            self._keep(out, moved, origin.family)
        elif out.shape == origin.values.shape and (_on_bits(name, func, source, out) or name in _KEEPING):
            self._keep(out, origin.values, origin.family)
        elif name == "aten::_to_copy" and out.dtype is source.dtype:
            self._keep(out, origin.values.to(out.device), origin.family)

    def _multiplied(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        first = _PRODUCTS[name]
        if not isinstance(out, torch.Tensor) or out.dtype is not torch.float32:
            return
        self._products += 1
        pair = args[first : first + 2]
        origins = [(one, origin, _reduced(one, origin.values)) for one in pair if (origin := self._origin(one))]
        lost = [(one, origin, bits) for one, origin, bits in origins if bits >= _LOST]
        if not lost:
            return
        error = None
        if self._measured < _MEASURED:
            self._measured += 1
            error = _error(func, args, kwargs, out, {id(one): origin.values for one, origin, _ in lost})
        file, line = users_line(sys._getframe())
        bits = min(bits for _, _, bits in lost)
        found = ReducedProduct(name, file, line, bits, _terms(name, pair, args), error)
        self._found.append((found, lost[0][1].family))


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for a tensor and for a view of its bits: where it lies, its shape and its strides."""
    return tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride()


def _on_bits(name: str, func: Any, source: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether an op works on the bits of a number: on whole numbers, or from and to them by a view."""
    whole = not source.dtype.is_floating_point and not out.dtype.is_floating_point
    if name == "aten::view.dtype":
        return True
    return whole and (torch.Tag.pointwise in func.tags or name in ("aten::_to_copy", "aten::clone"))


def _reduced(value: torch.Tensor, origin: torch.Tensor) -> int:
    """How many trailing mantissa bits a rounding took; 0 where it is none, or where the origin has no more itself.

    A rounding to m bits moves a normal number by less than 2^-m of itself: what is farther away is something else.
    """
    if value.shape != origin.shape or value.dtype is not torch.float32 or not value.numel():
        return 0
    bits, before = (one.contiguous().view(torch.int32) & (2**23 - 1) for one in (value.detach(), origin))
    zeros = _zeros(bits)
    if zeros < _LOST:
        return 0
    changed = (before & (2 ** min(zeros, 23) - 1)) != 0
    if float(changed.float().mean()) < 0.5:
        return 0
    room = origin.abs() * 2.0 ** (zeros - 22) + torch.finfo(torch.float32).tiny
    near = (value.detach() - origin).abs() <= room
    return zeros if bool((near | ~origin.isfinite()).all()) and zeros < 23 else 0


def _zeros(bits: torch.Tensor) -> int:
    """How many of the trailing 23 bits are zero in all elements."""
    for count in range(1, 24):
        if bool((bits & (2**count - 1)).any()):
            return count - 1
    return 23


def _error(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor, origins: dict[int, torch.Tensor]
) -> float | None:
    def exact(one: torch.Tensor) -> torch.Tensor:
        given = origins.get(id(one), one)
        return given.detach().double() if given.is_floating_point() else given

    try:
        return relative_error(out, func(*map_tensors(exact, args), **map_tensors(exact, kwargs)))
    except (RuntimeError, TypeError, NotImplementedError):  # a device without float64, or not enough memory
        return None


def _terms(name: str, pair: tuple[Any, ...], args: tuple[Any, ...]) -> int:
    if name != "aten::convolution":
        return int(pair[0].shape[-1])
    weight = pair[1]
    transposed = bool(args[6]) if len(args) > 6 else False
    terms: int = math.prod(weight.shape[2:]) * weight.shape[0 if transposed else 1]
    return terms


def measure_operands(function: Callable[[], Any], subject: str = "subject") -> OperandStats:
    """Run a function, and tell which of its float32 products had operands that are float32 in name only.

    An exception of the function's is told in the stats, not raised. It may run backward, too.
    """
    raised = ""
    watch = OperandWatch()
    with watch:
        try:
            require_ran(function(), subject)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; it is told in the stats
            raised = brief(as_result(error))
    return watch.stats(subject, raised)


def check_operands(stats: OperandStats, limits: Limits) -> list[Finding]:
    """Whether every product in float32 had float32 operands (check `tf32`)."""
    check = "tf32"
    found = [_finding(stats, one, limits) for one in stats.reduced if _beyond(one, limits)]
    if found:
        return sorted(found, key=lambda one: -(one.observed or 0.0))[:5]
    if stats.raised:
        return [Finding(check, Verdict.SKIP, stats.subject, f"the function did not come to its end: {stats.raised}")]
    if not stats.products:
        return [Finding(check, Verdict.SKIP, stats.subject, "nothing was multiplied in float32 outside compiled code")]
    text = f"none of {stats.products:,} float32 products had operands that lost bits on the way"
    return [passed(check, stats.subject, text, stats.products)]


def _beyond(one: ReducedProduct, limits: Limits) -> bool:
    return one.error is None or one.error > allowed_error(one.terms, limits)


def _finding(stats: OperandStats, one: ReducedProduct, limits: Limits) -> Finding:
    limit = allowed_error(one.terms, limits)
    told = "" if one.error is None else (
        f"; it is off by {one.error * UNIT:.2g} of its norm against float64, where float32 explains {limit * UNIT:.2g}"
    )  # fmt: skip
    message = (
        f"a product in float32 must be given float32 operands; {one.op.removeprefix('aten::')} was given, "
        f"{one.calls:,}x, float32 in name only: the last {one.bits} of 23 mantissa bits were cut off{told}"
    )
    hint = "multiply the float32 tensors themselves, or cast to float16 or bfloat16, so that the dtype says it"
    where = Where(op=one.op, file=one.file, line=one.line)
    unit = "unit roundoffs of float32"
    verdict = Verdict.FAIL if one.bits <= _WIDEST else Verdict.WARN
    return Finding("tf32", verdict, stats.subject, message, where, one.error, limit, unit, hint)
