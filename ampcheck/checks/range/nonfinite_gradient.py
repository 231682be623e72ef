"""Requires: Every gradient that is finite in float64 is finite in low precision.

Measured: float16 runs at the initial loss scale of torch.amp.GradScaler and those to which it backs off, until no
gradient is infinite; bfloat16 at scale 1. ampcheck.watch fails when weights became infinite or NaN, and warns when an
optimizer stepped with such a gradient; a step that a GradScaler skips is no finding. In a training loop the weights
after the observed steps must be finite.

Causes: A forward overflow; a division or square root at zero whose derivative overflows.

Fix: Mend the overflow first. Clamp before sqrt, log and division; see overflow for the op.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.compile import GRADIENTS, module_of, not_comparable
from ampcheck.checks.compile import passed as passed_compiled
from ampcheck.checks.range import (
    Judges,
    finite_gradients_text,
    left_out,
    lost_gradients_text,
    no_gradients,
    passed,
)
from ampcheck.checks.range._graphs import (
    bad_elements,
    finding,
    in_phase,
    judged,
    value_text,
)
from ampcheck.core.check import LISTED, Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.core.text import listed
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.finite import FiniteStats
from ampcheck.records.numerics import NumericsStats, gradient_module
from ampcheck.records.telemetry import TelemetryStats

CHECK = Check(
    "nonfinite-gradient",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "TelemetryStats", "AccuracyStats", "FiniteStats"),
    order=130,
    evidence=("tests/corpus/additive_mask_times_1e9", "tests/corpus/angular_margin_sine"),
)

_HINT = "a GradScaler that backs off ends this after a few steps; otherwise see what overflows in forward there"


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Every gradient that is finite in float64 is finite here, at a loss scale that GradScaler settles on."""
    if skipped := left_out(stats, CHECK):
        return skipped
    if without := no_gradients(stats, CHECK):
        return [without]
    gradients = stats.of("gradient")
    bad = [error for error in gradients if error.nonfinite]
    if not bad and stats.uncompared:
        text = "no output is finite in float64, and the default loss leaves all out: see nonfinite-reference"
        return [CHECK.incomplete(stats.name, text)]
    if not bad:
        count = sum(error.seen.exact_nan + error.seen.exact_inf < error.seen.numel for error in gradients)
        if not count:
            return [CHECK.incomplete(stats.name, "no gradient is finite in float64: see nonfinite-reference")]
        text = finite_gradients_text(count, stats.scale)
        return [passed(stats, CHECK, text, count, 0, 0, "gradients"), *_cut_off(stats)]
    first = bad[-1]  # backward runs from the last parameter to the first
    message = lost_gradients_text(bad, gradients, stats.scale)
    where = Where(phase="backward", module=gradient_module(first.name))
    hint = "see overflow for the op that made the first infinity"
    if stats.scale != 1:
        hint += "; a smaller loss scale cannot mend a forward overflow"
    return [CHECK.fail(stats.name, message, where=where, observed=len(bad), limit=0, unit="gradients", hint=hint)]


def _cut_off(stats: NumericsStats) -> list[Finding]:
    """Parameters whose gradients were asked for, and to which none leads."""
    if not stats.cut:
        return []
    reason = (
        f"{len(stats.cut)} parameters of modules that ran while gradients were off get none, so none was judged: "
        f"{listed(stats.cut, LISTED)}"
    )
    hint = (
        "a reentrant checkpoint gives none where its inputs need none (use_reentrant=False); before PyTorch 2.11 "
        "autocast keeps the casts of a part under no_grad (torch.clear_autocast_cache() after it); for weights that "
        "run under no_grad on purpose set requires_grad_(False)"
    )
    return [CHECK.incomplete(stats.name, reason, hint=hint)]


def _values(stats: TelemetryStats) -> Iterator[Finding]:
    """Backward values that are not finite. A GradScaler skips steps with infinite gradients: only lasting ones fail."""
    sites = in_phase(stats, "backward")
    if not sites:
        return
    text = f"no value of {len(sites)} became inf or NaN in backward"
    if any(site.bad for site in in_phase(stats, "forward")):
        if any(site.bad for site in sites):
            text = "backward starts from values that are inf or NaN in forward: see overflow"
            yield CHECK.skip(stats.subject, text)
        else:
            yield from judged(CHECK, stats, [], text, sites)
        return
    born = [site for site in sites if site.born]
    lasting = [site for site in born if site.last or site.bad == site.calls]
    if lasting:
        site = min(lasting, key=lambda s: s.bad < s.calls)
        message = (
            f"gradients must be finite; {bad_elements(site)} of {value_text(site)} in {site.bad:,} of {site.calls:,} "
            f"measured calls, first in call {site.first}"
        )
        # One call says nothing about the next: a scaler starts too high on purpose.
        verdict = Verdict.FAIL if site.bad == site.calls > 1 and stats.harmed is not False else Verdict.WARN
        yield finding(CHECK, verdict, stats, site, message, _HINT, site.bad, unit="calls")
        return
    if born:
        worst = max(born, key=lambda site: site.bad)
        text = f"gradients overflowed in {worst.bad:,} of {worst.calls:,} measured calls and are finite again"
    yield from judged(CHECK, stats, [], text, sites)


def _inside_graphs(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    return list(_values(stats))


def _compiled(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Every gradient that is finite in float64 is finite here, at the loss scale of the eager run."""
    if not stats.beside:
        return []
    if skipped := not_comparable(stats, CHECK, GRADIENTS):
        return [skipped]
    gradients = stats.of(GRADIENTS)
    bad = [error for error in gradients if error.nonfinite]
    if not bad:
        return [passed_compiled(stats, CHECK, finite_gradients_text(len(gradients), stats.scale), len(gradients))]
    message, where = lost_gradients_text(bad, gradients, stats.scale), Where("backward", module_of(bad[-1]))
    return [CHECK.fail(stats.name, message, where=where, observed=len(bad), limit=0, unit="gradients")]


def _weights(stats: FiniteStats) -> Iterator[Finding]:
    rests = f" ({stats.counted})" if stats.counted else ""
    if names := stats.after:
        when = f"they became so within {stats.steps} steps" if stats.since is None else f"since step {stats.since}"
        if stats.before:
            when = f"{', '.join(stats.before[:LISTED])} before the first step"
        message = f"weights must stay finite; {listed(names, LISTED)} have infinite or NaN elements: {when}{rests}"
        hint = (
            "start from finite weights: nothing can be learned from these"
            if stats.before
            else "a gradient was infinite or NaN, or the update divided by zero (an eps of 1e-8 is zero in float16): "
            "step through a GradScaler, keep weights and optimizer state in float32; see stagnation and overflow"
        )
        where = Where("update", names[0].rpartition(".")[0], step=stats.since)
        shown = Evidence(where=where, observed=len(names), limit=0.0, unit="tensors", hint=hint, names=names)
        yield CHECK.fail(stats.subject, message, **shown)
    elif stats.applied:
        name, step = min(stats.applied.items(), key=lambda item: item[1])
        message = (
            f"a step must be made with finite gradients; those of {listed(stats.applied, LISTED)} were infinite or "
            f"NaN, first in step {step}, and the optimizer was stepped; the weights stayed finite{rests}"
        )
        hint = "leave such a step out (torch.amp.GradScaler does), or mend what overflows in forward"
        where = Where("backward", name.rpartition(".")[0], step=step)
        shown = Evidence(where=where, observed=len(stats.applied), limit=0.0, unit="tensors", hint=hint)
        yield CHECK.warn(stats.subject, message, **shown)
    elif stats.steps:
        text = f"all weights are finite after {stats.steps:,} steps{rests}"
        yield CHECK.passed(stats.subject, text, stats.weights)


def _of_weights(stats: FiniteStats, limits: Limits) -> list[Finding]:
    return list(_weights(stats))


_JUDGES: Judges = {
    NumericsStats: _of_run,
    TelemetryStats: _inside_graphs,
    AccuracyStats: _compiled,
    FiniteStats: _of_weights,
}


def check(stats: NumericsStats | TelemetryStats | AccuracyStats | FiniteStats, limits: Limits) -> list[Finding]:
    """Gradients, and the weights that steps make of them, are finite where float64 is."""
    return _JUDGES[type(stats)](stats, limits)
