"""The compiled run of an audit beside its eager run. Pure functions from two `NumericsStats` to findings."""

from __future__ import annotations

from ampcheck.catalog.compiled import COMPILED_ERROR, COMPILED_GRADIENT
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.numerics.findings import no_gradients, not_reached, passed, who
from ampcheck.numerics.stats import PRECISION, NumericsStats, TensorError, gradient_module


def check_compiled_against_eager(eager: NumericsStats, compiled: NumericsStats, limits: Limits) -> list[Finding]:
    """What compiled code gives is within the bounds wherever what eager mode gives is."""
    outputs = _check(COMPILED_ERROR, ("output", "loss"), eager, compiled, limits)
    return [*outputs, *_check(COMPILED_GRADIENT, ("gradient",), eager, compiled, limits)]


def _check(
    check: Check, kinds: tuple[str, ...], eager: NumericsStats, compiled: NumericsStats, limits: Limits
) -> list[Finding]:
    if skipped := not_reached(compiled, check):
        return [skipped]
    if compiled.incomparable:
        return [check.skip(who(compiled), f"not comparable: {compiled.incomparable}")]
    errors = compiled.of(*kinds)
    if not errors:
        reason = no_gradients(compiled, check) if kinds == ("gradient",) else None
        return [reason or check.skip(who(compiled), "nothing to compare: the calls give no floating tensor")]
    twins = {(error.kind, error.name): error for error in eager.errors}
    own = [e for e in errors if e.beyond(limits.precision) and not _excused(twins.get((e.kind, e.name)), limits)]
    if own:
        return [_worse(check, own, twins, errors, compiled, limits)]
    judged = [error for error in errors if error.known and not error.nonfinite]
    if not judged:
        return [check.skip(who(compiled), "not comparable: nothing is known of what eager mode gives")]
    worst = max(judged, key=lambda error: error.error / error.limit)
    text = f"at most {worst.error:.2g} from float64, in {worst}"
    limit = worst.limit * limits.precision / PRECISION
    return [passed(compiled, check, text, len(judged), worst.error, limit, "relative error")]


def _excused(eager: TensorError | None, limits: Limits) -> bool:
    """Whether eager mode is at fault itself."""
    return eager is None or eager.beyond(limits.precision)


def _worse(
    check: Check,
    own: list[TensorError],
    twins: dict[tuple[str, str], TensorError],
    errors: tuple[TensorError, ...],
    compiled: NumericsStats,
    limits: Limits,
) -> Finding:
    worst = max(own, key=lambda error: (error.dtype == "missing", error.nonfinite, error.error / error.limit))
    gradient = worst.kind == "gradient"
    where = Where("backward" if gradient else "forward", gradient_module(worst.name) if gradient else "")
    observed, limit, unit = worst.error, worst.limit * limits.precision / PRECISION, "relative error"
    if worst.nonfinite:
        observed, limit, unit = float(worst.nonfinite), 0.0, "elements"
        message = (
            f"compiled code must be finite where eager mode and float64 are; {worst.nonfinite:,} of {worst} are not"
        )
    elif worst.dtype == "missing":
        message = f"compiled code must give what eager mode gives; {worst} is missing or has another shape"
    else:
        message = (
            f"compiled code must lie within {limit:.2g} of float64, as eager mode does; {worst} lies {worst.error:.2g} "
            f"away, and {twins[worst.kind, worst.name].error:.2g} in eager mode; {len(own)} of {len(errors)} are beyond"
        )
    hint = "assert_compiled tries the compiler's settings and stages; ampcheck blame names the place"
    return check.finding(
        Verdict.FAIL, who(compiled), message, where=where, observed=observed, limit=limit, unit=unit, hint=hint
    )
