"""Judges whether one execution rounds honestly: by the checks of a run in low precision, and by its float32 and
compiled results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ampcheck.checks.compile.compiled_error import CHECK as COMPILED_ERROR
from ampcheck.checks.range.precision_loss import CHECK as PRECISION_LOSS
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.numerics.checks import check_numerics
from ampcheck.parity.execution import Execution, execute, str_of
from ampcheck.parity.lifted import compiled_apart
from ampcheck.records.results import FLOOR, JUDGED_UNIT, LOST, SLACK, ResultError
from ampcheck.shadow.bounds import SIXTEEN, examine
from ampcheck.shadow.call import Call
from ampcheck.shadow.independent import ObservedShadow

_JUDGED_BY = ("overflow", "nonfinite-gradient", "integer-cast", "precision-loss", "silent-zero", "flush")
"""The checks of one run whose failures make a side wrong."""

_FLOAT32_SUMS = 8.0
"""Roundings of float32 by which sums in any order may differ; an audit judges no digit of float32."""


def failures_of(run: Execution, limits: Limits) -> list[Finding]:
    """Return what is wrong with an execution; empty for an honest one."""
    failures = _failures_of_checks(run, limits)
    if not failures and any(error.unit > SIXTEEN for error in run.errors):
        failures = _failures_of_checks(execute(run.side, revise=_CastsToData()), limits)
    return failures or [*_float32_errors(run), *compiled_failures(run)]


def compiled_failures(run: Execution) -> list[Finding]:
    """Return what is wrong with the results of code that the user compiled."""
    return list(_compiled_errors(run))


def _failures_of_checks(run: Execution, limits: Limits) -> list[Finding]:
    assert run.stats is not None
    found = check_numerics(run.stats, limits, _JUDGED_BY)
    return [f for f in found if f.verdict is Verdict.FAIL and f.check in _JUDGED_BY]


class _CastsToData:
    """Makes data of what casts to 8 bits give, so that what follows is judged without their roundings.

    A cast rounds as its format does, and is judged where the companions go on through it.
    """

    def begin(self) -> None:
        """Nothing is kept from one run to the next."""

    def __call__(self, call: Call, shadow: ObservedShadow) -> None:
        """Set both companions of what a cast to 8 bits returns to its value."""
        if call.traits.copies is None or not call.before:
            return
        unit = min(SIXTEEN, max(companions.unit for companions in call.before))
        for tensor in (*call.fresh, *call.written):
            if tensor.dtype.itemsize == 1:
                shadow.store.lift(tensor, moves=True)
                shadow.store.of(tensor).unit = unit


def _float32_errors(run: Execution) -> Iterator[Finding]:
    """Results in float32 that are further from their exact values than sums in another order take them."""
    for key, result in run.results.items():
        reference, value = result.reference, result.value
        if reference is None or key[0] in ("gradient", "module") or reference.unit >= JUDGED_UNIT:
            continue
        if value.dtype not in (torch.float32, torch.complex64) or not value.numel():
            continue
        unit, form = _FLOAT32_SUMS * reference.unit, format_of(torch.float32)
        seen = examine(value, reference.exact, reference.moved, unit, form=form, whole=False, digits=True)
        if seen.flagged:
            yield PRECISION_LOSS.fail(
                run.side.name,
                f"{str_of(key)} must keep the digits of float32: error {seen.error:.2g} against float64, limit "
                f"{seen.limit:.2g}",
                observed=seen.error,
                limit=seen.limit,
                unit="relative error",
                hint="reorder what leads to it: subtract before squaring, sum in pairs, or compute it in float64",
            )


def _compiled_errors(run: Execution) -> Iterator[Finding]:
    """The worst result of compiled code that is beyond the bound of eager mode, or is another function in float64."""
    wrong = [error for error in run.compiled if error.at_fault]
    if wrong:
        worst = max(wrong, key=lambda error: error.times)
        yield _compiled_error(
            run,
            f"compiled, {str_of(worst.key)} must keep the bound that eager mode keeps: error {worst.error:.2g} against "
            f"float64, limit {worst.limit:.2g}",
            observed=worst.error,
            limit=worst.limit,
        )
    elif run.compiled:
        apart, reason = compiled_apart(run.side, run.results)
        if reason:
            run.notes.append(f"compiled code of {run.side.name} was not compared in float64: {reason}")
        for key, how in list(apart.items())[:1]:
            more = f"; {len(apart) - 1} further results differ" if len(apart) > 1 else ""
            yield _compiled_error(
                run, f"compiled, {str_of(key)} must be the function of eager mode: compiled in float64, {how}{more}"
            )


def _compiled_error(run: Execution, message: str, observed: float | None = None, limit: float | None = None) -> Finding:
    hint = "ampcheck blame names the stage of the compiler"
    return COMPILED_ERROR.fail(run.side.name, message, observed=observed, limit=limit, unit="relative error", hint=hint)


def outdone_by_other(runs: Sequence[Execution]) -> Iterator[tuple[str, list[Finding]]]:
    """A side that has lost an output which the other side, of the same data, computes to its roundings.

    How far moving the data moves a result excuses the error of one run; the other shows that the data determine it.
    """
    for run, other in (runs, runs[::-1]):
        errors = {error.key: error for error in other.errors if error.kind == "output"}
        for error in run.errors:
            beside = errors.get(error.key)
            if beside is None or not error.whole > LOST or not is_close(beside):
                continue
            message = (
                f"{str_of(error.key)} must keep a digit that its data determine: error {error.whole:.2g} against "
                f"float64, where {other.side.name}, of the same data, has {beside.whole:.2g}"
            )
            hint = "keep what is rounded there (decays, tables, positions) in float32, as the other side does"
            name, observed = run.side.name, error.whole
            finding = PRECISION_LOSS.fail(
                name, message, observed=observed, limit=beside.whole, unit="relative error", hint=hint
            )
            yield name, [finding]
            break


def is_close(error: ResultError) -> bool:
    """Return whether a result is as near to exact as its roundings take it, whatever its data do."""
    return error.size > 0 and error.whole <= SLACK * FLOOR * error.unit < LOST
