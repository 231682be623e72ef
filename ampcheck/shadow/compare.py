"""Compare what a run gives with the exact results of a shadowed run, and decide what explains the difference.

Not with the values of the shadowed run but with its exact ones: other roundings than those of eager mode are no fault.
What is beyond its bound in eager mode as well is a fault of eager mode, unless the other run is far worse. Sides of a
kink, decisions near a tie and the order of sums are free, see `ampcheck.shadow.freedom`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.facts.memory import dtype_name, has_companions, roundoff
from ampcheck.facts.norms import norm as norm_of
from ampcheck.facts.norms import real_parts
from ampcheck.records.results import (
    BEYOND,
    CAST,
    EDGE,
    FLOAT32,
    FLOOR,
    INTEGERS,
    JUDGED_UNIT,
    SLACK,
    TIE,
    WHOLE,
    WITHIN,
    Examination,
    Key,
    ResultError,
)
from ampcheck.shadow.bounds import examine
from ampcheck.shadow.freedom import Freedom
from ampcheck.shadow.mode import Shadow
from ampcheck.shadow.result import Reference as Reference
from ampcheck.shadow.result import Result as Result
from ampcheck.torchtools.private import without_modes


def result_of(shadow: Shadow, tensor: torch.Tensor) -> Result:
    """Copies of the present values of a tensor of the shadowed run, and of its companions."""
    with without_modes():
        value = tensor.detach().clone()
    terms = shadow.freedom.terms if shadow.freedom is not None else 1
    if not has_companions(tensor):
        return Result(value, None, terms)
    return Result(value, shadow.reference(tensor), terms, shadow.store.of(tensor).depth)


def examine_value(
    value: torch.Tensor,
    reference: Reference,
    *,
    unit: float | None = None,
    floor: float = FLOOR,
    whole: bool = False,
    digits: bool | None = None,
    other: torch.Tensor | None = None,
) -> Examination:
    """A value of any run beside its exact one. The keywords are those of `ampcheck.shadow.bounds.examine`."""
    form = format_of(torch.float32 if value.is_complex() else value.dtype)
    unit = max(reference.unit, roundoff(value.dtype)) if unit is None else unit
    exact, moved = reference.exact, reference.moved
    with torch.no_grad():
        return examine(
            value.detach(), exact, moved, unit, form=form, whole=whole, floor=floor, digits=digits, other=other
        )


def compare_shadowed(key: Key, value: torch.Tensor, reference: Reference) -> ResultError:
    """Return how far the shadowed run itself lies from one of its exact results."""
    with without_modes(), torch.no_grad():
        seen = examine_value(value, reference, whole=key[0] == "gradient")
        unit = max(reference.unit, roundoff(value.dtype), JUDGED_UNIT)  # float32 alone loses no digit that matters
        exact, own = real_parts(reference.exact), real_parts(value).double()
        norm, size = norm_of(torch.where(own.isfinite() & exact.isfinite(), own - exact, 0.0)), norm_of(exact)
        misplaced = _misplaced(key, own, exact, seen)
    return ResultError(key, dtype_name(value.dtype), seen, unit, norm, size, misplaced=misplaced)


def compare_results(
    results: Mapping[Key, Result],
    values: Mapping[Key, torch.Tensor],
    freedom: Freedom | None = None,
    *,
    casts: bool = False,
) -> tuple[ResultError, ...]:
    """Compare the values of another run with the results of the shadowed run, in their order.

    freedom: of honest runs to differ. casts: casts alone round to 16 bits, in a model that is float32 otherwise: its
    author means them. Gradients have the same loss scale in both runs; what the data hardly determine is no error while
    it is small beside all gradients of a call together.
    """
    errors = with_totals(_compare(key, result, values.get(key)) for key, result in results.items())
    return tuple(with_verdict(error, freedom or Freedom(), casts=casts) for error in errors)


def with_totals(errors: Iterable[ResultError]) -> list[ResultError]:
    """The errors with the norm of all exact results of their kind in their call."""
    errors, totals = list(errors), dict[tuple[str, int], float]()
    for error in errors:
        group = error.kind, error.step
        totals[group] = math.hypot(totals.get(group, 0.0), error.size)
    return [replace(error, total=totals[error.kind, error.step]) for error in errors]


def with_verdict(error: ResultError, freedom: Freedom, *, casts: bool = False) -> ResultError:
    """The error with its verdict. Decisions near a tie, taken otherwise, move about as many elements."""
    left_out = casts and error.unit >= JUDGED_UNIT and error.eager_error > SLACK * FLOOR * FLOAT32
    cast = left_out and error.apart > error.eager_error / 2
    if not (cast or _is_worse(error)):
        return error
    verdict = CAST if cast else BEYOND
    if error.lost and not error.absent:
        edge = error.eager is not None and error.lost <= 4 * error.eager.lost and not error.seen.flagged
        verdict = EDGE if edge else BEYOND
    elif error.dtype in INTEGERS and not error.absent:
        turned = max(freedom.near_ties, freedom.ties)
        verdict = TIE if error.apart * error.seen.numel <= 2 * turned else BEYOND
    elif not error.absent and error.kind in WHOLE and _is_kinked(error, freedom.kinks_at(error.step)):
        verdict = WITHIN
    elif not error.absent and freedom.near_ties and _is_turned(error, freedom):
        verdict = TIE
    return replace(error, verdict=verdict)


def _is_kinked(error: ResultError, kinks: float) -> bool:
    """Return whether elements on the other side of a kink explain the error of a gradient.

    They move a gradient by their share of it, and one whose terms cancel by more, as a rounding of the data does.
    """
    own = SLACK * math.sqrt(kinks) * max(1.0, error.seen.spread / (error.unit or 1.0))
    return error.share <= math.sqrt(kinks) and (error.whole <= own or not error.determined)


def _is_turned(error: ResultError, freedom: Freedom) -> bool:
    """Return whether decisions that turn explain an error: they put other values in place of some, and scale none of
    the rest.

    Along exact they take away about their share of it, and the rest of the error is at random.
    """
    along = 4 * freedom.share + SLACK * error.seen.spread + FLOOR * error.unit
    return error.whole <= 2 * math.sqrt(freedom.share) and abs(error.along) <= along


def at_the_edge(value: torch.Tensor, exact: torch.Tensor, form: FloatFormat, error: torch.Tensor) -> torch.Tensor:
    """Infinities of what an honest error takes beyond the largest number."""
    return ~value.isfinite() & exact.isfinite() & (exact.abs() + error >= form.overflows_at)


def _is_worse(error: ResultError) -> bool:
    """Return whether a run lies beyond its bound, and eager mode does not, or by far less."""
    eager, seen = error.eager, error.seen
    if error.absent or error.lost:
        return True
    if error.dtype in INTEGERS:
        return error.apart > 0
    if eager is None or error.excused:
        return False
    worse = seen.flagged > 0 and not (eager.flagged > 0 and seen.impact <= SLACK * eager.impact)
    if error.kind != "gradient":
        return worse
    beside = error.total > 2 * error.size  # there are others, beside which what is noise must stay small
    least = max(error.eager_norm / (error.total or 1.0), FLOOR * error.unit)
    return (beside and error.noise and error.share > SLACK * least) or (
        worse and (error.determined or error.share > FLOOR * error.unit)
    )


def _compare(key: Key, result: Result, value: torch.Tensor | None) -> ResultError:
    eager, reference = result.value, result.reference
    nothing = Examination(eager.numel())
    plain = ResultError(key, dtype_name(eager.dtype), nothing, judged=eager.numel())
    if reference is not None:
        plain = replace(plain, unit=reference.unit, size=norm_of(reference.exact), eager=nothing)
    if value is None or value.shape != eager.shape or (reference is None) == has_companions(value):
        return replace(plain, norm=math.inf, apart=math.inf, absent=True)
    if reference is None:
        return replace(plain, apart=float((value != eager).double().mean()) if eager.numel() else 0.0)
    unit = max(reference.unit, roundoff(eager.dtype))  # a coarser dtype of the other run widens no bound
    floor = FLOOR
    if unit < JUDGED_UNIT:
        unit *= 1 + math.sqrt(result.terms) / 12
    elif key[0] not in WHOLE:
        floor = min(FLOOR, 0.25 + result.roundings / 2)
    whole = key[0] in WHOLE
    exact, mine, eagers = real_parts(reference.exact), real_parts(value).double(), real_parts(eager).double()
    form = format_of(eager.dtype if not eager.is_complex() else torch.float32)
    edge = (mine.sign() == exact.sign()) & at_the_edge(mine, exact, form, SLACK * FLOOR * unit * exact.abs())
    wrong = ~_alike(mine, exact) & _alike(eagers, exact) & ~edge
    spoiled = ~_alike(eagers, exact)
    hidden = spoiled & _alike(mine, exact)
    both = mine.isfinite() & eagers.isfinite() & exact.isfinite()
    errors = [torch.where(both, a - b, 0.0) for a, b in ((mine, exact), (eagers, exact), (mine, eagers))]
    norm, eager_norm, apart = map(norm_of, errors)
    along = float((errors[0] * torch.where(both, exact, 0.0)).sum()) / (plain.size or 1.0) / (plain.size or 1.0)
    judge = partial(examine_value, reference=reference, unit=unit, floor=floor, whole=whole, digits=True)
    seen, before = judge(value, other=eager), judge(eager)
    # Eager mode has no error that could be compared where it is inf or NaN.
    excused = bool(spoiled.any()) and seen.flagged > 0
    if excused:
        finite = ~(spoiled.any(-1) if value.is_complex() else spoiled)
        excused = not judge(torch.where(finite, value, reference.exact.to(value.dtype)), other=eager).flagged
    return replace(
        plain,
        seen=seen,
        unit=unit,
        norm=norm,
        misplaced=_misplaced(key, mine, exact, seen),
        eager=before,
        eager_norm=eager_norm,
        along=along,
        floor=floor,
        apart=apart / (plain.size or 1.0),
        lost=int(wrong.sum()),
        hidden=int(hidden.sum()),
        nan=int((exact.isnan() & mine.isnan()).sum()),
        excused=excused,
        judged=int((_alike(mine, exact) & ~exact.isnan() & ~(spoiled & excused)).sum()),
    )


def _misplaced(key: Key, value: torch.Tensor, exact: torch.Tensor, seen: Examination) -> int:
    """Infinities of exact in whose place an output or a loss has another value."""
    counts = seen.exact_inf and key[0] in ("output", "loss")
    return int((value != exact)[exact.isinf()].sum()) if counts else 0


def _alike(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Elements that are finite, NaN, or infinite with one sign on both sides."""
    both = value.isfinite() & exact.isfinite()
    return both | (value.isnan() & exact.isnan()) | (value.isinf() & (value == exact))
