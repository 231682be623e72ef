"""The same judgement from records that exist already: an audit has run eager mode and compiled code beside float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from ampcheck.compiled.accuracy.checks import check_compiled_error, check_compiled_gradient
from ampcheck.compiled.accuracy.stats import AccuracyStats, Deviation, Exceptions
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.numerics.findings import who
from ampcheck.numerics.rounding import REROUNDINGS
from ampcheck.numerics.stats import NumericsStats, TensorError

RoundingErrors: TypeAlias = "Mapping[tuple[str, str], float]"
"""Of each output and gradient, by kind and name, how far eager mode usually lies from the reference."""


def check_compiled_against_eager(
    eager: NumericsStats,
    compiled: NumericsStats,
    limits: Limits,
    usual: Callable[..., RoundingErrors] | None = None,
) -> list[Finding]:
    """Outputs and gradients of the compiled arm lie no further from the reference than those of the eager arm.

    eager, compiled: what `measure_numerics` and `measure_compiled` gave for one subject in one dtype. usual: measures
    eager mode so many `times` with other roundings (`ampcheck.numerics.rounding.usual_errors`); asked only where its
    one error does not explain that of compiled code.
    """
    stats = paired(eager, compiled)
    for times in REROUNDINGS:
        if usual is None or stats.incomparable or not stats.excess(limits.precision):
            break
        stats = paired(eager, compiled, usual(times=times))
    found = [*check_compiled_error(stats, limits), *check_compiled_gradient(stats, limits)]
    return [replace(one, subject=who(compiled)) for one in found]


def paired(
    eager: NumericsStats, compiled: NumericsStats, usual: RoundingErrors = MappingProxyType({})
) -> AccuracyStats:
    """Two arms of one subject as one record."""
    twins = {(e.kind, e.name): e for e in eager.errors}
    pairs = [(twins[e.kind, e.name], e) for e in compiled.errors if (e.kind, e.name) in twins and e.kind != "module"]
    reason = "" if compiled.comparable else "the model draws random numbers, and compiled code draws others"
    return AccuracyStats(
        subject=compiled.subject,
        arm=compiled.arm.replace(", compiled", ""),
        format=compiled.format,
        device=compiled.device,
        reference=compiled.reference,
        incomparable=reason,
        autocast=not compiled.native,
        deviations=tuple(_deviation(one, other, usual) for one, other in pairs),
        exceptions=Exceptions(
            eager="" if eager.raised is None else eager.raised.message,
            compiled="" if compiled.raised is None else compiled.raised.message,
        ),
        near_ties=len(eager.flips),
        chain=eager.chain,
        reduction=eager.reduction,
        draws=compiled.draws,
        graphs=compiled.graphs,
        unsupported=compiled.unsupported,
        no_gradients=compiled.no_backward,
        coverage=replace(compiled.coverage),
    )


def _deviation(eager: TensorError, compiled: TensorError, usual: RoundingErrors) -> Deviation:
    errors, float32 = (eager.error, compiled.error), compiled.float32
    if eager.kind == "gradient" and not all(map(math.isfinite, (*errors, float32))):
        errors, float32 = (eager.share, compiled.share), 0.0  # beside an exact zero only the whole is a measure
    return Deviation(
        kind=compiled.kind,
        name=compiled.name,
        step=0,
        dtype=eager.dtype,
        eager=errors[:1],
        compiled=errors[1:],
        grain=format_of(eager.dtype).unit_roundoff if eager.dtype != "missing" else 0.0,
        float32=float32,
        sensitivity=compiled.sensitivity,
        turned=compiled.excused,
        rounded=usual.get((eager.kind, eager.name), 0.0),
        share=compiled.share,
        eager_share=eager.share,
        between=abs(compiled.error - eager.error),
        lost=max(0, compiled.nonfinite - eager.nonfinite),
        nonfinite=compiled.nonfinite,
        eager_nonfinite=eager.nonfinite,
        numel=compiled.compared + compiled.nonfinite,
        judged=compiled.compared,
    )
