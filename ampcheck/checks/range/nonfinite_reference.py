"""Requires: Outputs and gradients are numbers in float64. Fails when an output is NaN in every precision, because of a
NaN in an input, weight or buffer or because of an op of the model, and when every output is infinite.

Measured: Float64 is followed beside the low-precision run, with all casts lifted: an op that gives a NaN from inputs
without NaN there is reported with its line. Inputs, weights and buffers are searched for NaN, weights for infinities
too; they count when the outputs are NaN. Infinities in outputs (padded logits, masks) are no finding, but low precision
must have them at the same positions with the same sign. Gradients that are not finite in float64 fail; the check is
incomplete if outputs contain infinities and the default loss is used. A declared loss that is not finite in float64
fails. The check runs once for each audit and always has a verdict, since elements that are NaN in float64 cannot be
compared. In a block under ampcheck.watch it fails if a NaN is in use at the end of the block, and warns otherwise.

Causes: A logarithm or square root of negative numbers, 0/0, inf - inf, a softmax over a fully masked row, a derivative
at its pole (sqrt or norm at zero), missing values in the data, weights saved after a NaN.

Fix: Clamp before the op; select with where before it as well as after it; clean the data; load other weights. A wider
format does not help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampcheck.checks.range import (
    Judges,
    elements_lost,
    op_text,
    returned_text,
)
from ampcheck.core.arm import armed
from ampcheck.core.check import LISTED, Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.core.text import listed
from ampcheck.records.finite import FiniteStats
from ampcheck.records.numerics import NumericsStats, Values, gradient_module
from ampcheck.records.results import Examination, ResultError

CHECK = Check(
    "nonfinite-reference",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "FiniteStats"),
    order=110,
    evidence=("tests/corpus/noise_schedule_half", "tests/corpus/residual_stream_growth"),
)

_HINT = (
    "no precision mends this: keep the argument in the domain of the op (clamp before log, sqrt, acos, pow), guard the "
    "divisor, and give every softmax row an element that is not masked"
)


def reference(stats: NumericsStats) -> list[Finding]:
    """Outputs and gradients are numbers in float64. Judged once, by the first run that reached its end."""
    subject = armed(stats.subject, replace(stats.arm, dtype="float64", mode="", native=False))
    if stats.raised is not None:
        return [CHECK.skip(subject, "the run raised before it was complete: see low-precision-error")]
    outputs, gradients = stats.of("output"), stats.of("gradient")
    if reached := [error for error in outputs if error.seen.exact_nan]:
        return list(_nan_outputs(stats, subject, reached))
    if stats.chosen and (makers := _makers(stats)):
        message = f"{_made(stats, makers)} in every precision; {stats.chosen[0]} chooses a NaN"
        return [_failure(subject, message, makers[0][0], sum(seen.exact_nan for _, seen in makers))]
    infinite = sum(error.seen.exact_inf for error in outputs)
    if stats.uncompared:
        message = (
            f"an output must hold finite values to compare; every element of {_named(outputs)} is infinite in float64"
        )
        where = stats.nonfinite[0][0] if stats.nonfinite else Where(phase="forward")
        return [_failure(subject, message, where, infinite)]
    if bad := [error for error in gradients if error.seen.exact_nan or error.seen.exact_inf]:
        return [_gradients(stats, subject, bad, len(gradients))]
    if bad := [error for error in stats.of("loss") if error.seen.exact_nan or error.seen.exact_inf]:
        what = "NaN" if bad[0].seen.exact_nan else "infinite"
        message = f"a loss must be finite in float64; that of the subject is {what}"
        where = stats.nonfinite[-1][0] if stats.nonfinite else Where(phase="forward")
        return [_failure(subject, message, where, len(bad), unit="losses")]
    numel = sum(error.seen.numel for error in (*outputs, *gradients))
    text = f"no NaN among {numel:,} elements of outputs and gradients in float64"
    if infinite:
        text += f"; {infinite:,} infinities are compared in place and sign"
    return [CHECK.passed(subject, text, numel, observed=0, limit=0, unit="elements")]


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Of a watched block: no op makes a NaN that float64 makes as well.

    It fails where a NaN is chosen, or a result with one is in use when the block ends, else it warns: where() may have
    left it out.
    """
    if stats.judged:
        return []  # judged once for all runs, see `reference`
    makers = [(where, seen) for where, seen in stats.nonfinite if seen.exact_nan]
    if not makers:
        text = "no op made a NaN that float64 makes as well"
        return [CHECK.passed(stats.name, text, stats.ops, observed=0, limit=0, unit="elements")]
    count = sum(seen.exact_nan for _, seen in makers)
    end = "a result with a NaN is in use at the end" if stats.keeps_nan else "nothing holds a NaN at the end"
    end = f"{stats.chosen[0]} chooses a NaN" if stats.chosen else end
    verdict = Verdict.FAIL if stats.keeps_nan or stats.chosen else Verdict.WARN
    message = f"{_made(stats, makers)} in every precision; {end}"
    shown = Evidence(where=makers[0][0], hint=_HINT)
    return [elements_lost(stats, CHECK, verdict, message, count, shown)]


def _nan_outputs(stats: NumericsStats, subject: str, reached: list[ResultError]) -> Iterator[Finding]:
    nan = sum(error.seen.exact_nan for error in reached)
    total = sum(error.seen.numel for error in reached)
    seen = f"{nan:,} of {total:,} elements of {_named(reached)} are NaN in float64"
    if stats.data:
        first = stats.data[0]
        module = "" if first.kind == "input" else gradient_module(first.name)
        hint = "fill or mask missing inputs, and load weights that were saved before they became NaN"
        message = f"inputs and weights must be finite; {listed(map(_held, stats.data), LISTED)}, and {seen}"
        yield _failure(subject, message, Where(phase="forward", module=module), nan, hint)
    if makers := _makers(stats):
        yield _failure(subject, f"{_made(stats, makers)}, and {seen}", makers[0][0], nan)
    elif not stats.data:
        message = f"{seen}: no op makes it of numbers, so the model writes NaN itself, and a NaN cannot be compared"
        hint = "pad with -inf or a finite value, or return the mask with the values"
        where = Where(phase="forward")
        yield CHECK.incomplete(subject, message, where=where, observed=nan, limit=0, unit="elements", hint=hint)


def _gradients(stats: NumericsStats, subject: str, bad: list[ResultError], total: int) -> Finding:
    message = f"gradients must be finite in float64; {len(bad)} of {total} are not, nearest to the loss {bad[-1].name}"
    where = Where(phase="backward", module=gradient_module(bad[-1].name))
    if stats.masked:
        message += "; the outputs hold infinities, which the default loss leaves out, and a loss of your own may not"
        hint = "pass loss= to Subject(...), so that the gradients of the real loss are judged"
        return CHECK.incomplete(subject, message, where=where, hint=hint)
    if makers := [(where, seen) for where, seen in stats.nonfinite if where.phase == "backward"]:
        message, where = f"{message}; {_made(stats, makers)}", makers[0][0]
    hint = (
        "the derivative has a pole where forward has a value: clamp before sqrt, log, norm and division, and select "
        "with where before the op as well as after it"
    )
    return _failure(subject, message, where, len(bad), hint, unit="gradients")


def _makers(stats: NumericsStats) -> list[tuple[Where, Examination]]:
    """The ops of forward that made NaN in exact, else those that made infinities."""
    makers = [(where, seen) for where, seen in stats.nonfinite if where.phase == "forward"]
    return [(where, seen) for where, seen in makers if seen.exact_nan] or makers


def _made(stats: NumericsStats, makers: list[tuple[Where, Examination]]) -> str:
    """The first op that made NaN or infinities in exact, and how many others did."""
    where, seen = makers[0]
    count, what = (seen.exact_nan, "NaN") if seen.exact_nan else (seen.exact_inf, "infinite")
    text = (
        f"finite inputs must give finite results; {op_text(stats, where)} made {count:,} of {seen.numel:,} elements "
        f"{what}"
    )
    return text + (f", and {len(makers) - 1} further ops do so" if len(makers) > 1 else "")


def _failure(
    subject: str, message: str, where: Where, count: int, hint: str = _HINT, *, unit: str = "elements"
) -> Finding:
    return CHECK.fail(subject, message, where=where, observed=count, limit=0, unit=unit, hint=hint)


def _named(errors: Sequence[ResultError]) -> str:
    return listed((f"{error.kind} {error.name or '(the only one)'}" for error in errors), LISTED)


def _held(values: Values) -> str:
    return f"{values} holds {values.nan or values.infinite:,} {'NaN' if values.nan else 'infinities'}"


def _of_losses(stats: FiniteStats, limits: Limits) -> list[Finding]:
    """Losses that are not finite in float64 either."""
    first = stats.overflowed
    if first is None or stats.undefined is None:
        return []
    message = f"{returned_text(stats, first)}, which has no finite result in float64 either"
    where = replace(stats.place or Where("forward"), step=stats.undefined)
    lost = stats.trailing
    return [CHECK.fail(stats.subject, message, where=where, observed=lost, limit=0.0, unit="steps", hint=CHECK.fix)]


_JUDGES: Judges = {NumericsStats: _of_run, FiniteStats: _of_losses}


def check(stats: NumericsStats | FiniteStats, limits: Limits) -> list[Finding]:
    """Of a watched block and of losses; `reference` judges a model once."""
    return _JUDGES[type(stats)](stats, limits)
