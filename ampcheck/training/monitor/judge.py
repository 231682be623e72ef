"""The findings about a monitored loop: what was counted, as the records that the checks of loops judge."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ampcheck.checks import REGISTRY, needing
from ampcheck.checks import findings as findings_of
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.environment import environment
from ampcheck.core.formats import FORMATS
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.records.finite import FiniteStats
from ampcheck.records.gradients import GradientLoss, GradientStats
from ampcheck.records.protocol import Act, ProtocolStats
from ampcheck.records.scales import GradientHistogram, LossScaleStats, scale_window
from ampcheck.records.stagnation import StagnationStats, TensorUpdates
from ampcheck.training.monitor.sums import GradientSum, MonitorStats, ParameterStats
from ampcheck.training.monitor.updates import sampled
from ampcheck.training.monitor.views import monitor_charts, monitor_tables

MONITORED = (
    *("overflow", "nonfinite-gradient", "gradient-underflow", "loss-scale", "stagnation"),
    *("scaler-protocol", "scheduler-skip", "coverage"),
)
"""Checks of a monitored loop."""

_SEVERAL = 3
"""Steps from which on what is true of each is a property of the loop."""

_MANY = 32
"""Updates from which on a share of them is a property of a parameter."""

_SIGNIFICANT = 64.0
"""Moves that stochastic rounding would have made, from which on it is significant that there were hardly any."""

_FEWER = 16
"""Factor by which they are fewer then: the size of a step is known to a small factor."""

_NOISE = 8.0
"""Unit roundoffs of the loudest gradient of its module that may be left of a sum that is zero."""


def monitor_run(plan: Plan, stats: MonitorStats) -> Run:
    """The findings of a monitored loop with their evidence."""
    evidence = monitor_tables(stats), monitor_charts(stats, loss_scale_stats(stats, plan.limits))
    return Run(environment(plan.device), tuple(check_monitored(stats, plan.limits)), stats.coverage, *evidence)


def check_monitored(stats: MonitorStats, limits: Limits) -> list[Finding]:
    """The findings of `MONITORED`, in this order.

    There is no reference: a defect that only a comparison could prove is a warning.
    """
    calls: list[Finding] = []
    if stats.calls is not None:  # without a scaler or a scheduler there may be nothing to judge
        calls = findings_of(stats.calls, limits, needing(ProtocolStats.__name__))
        calls = [finding for finding in calls if finding.verdict is not Verdict.SKIP]
    if not stats.steps and not stats.attempts:
        message = "an optimizer step must have run in the block; none did, so nothing was looked at"
        hint = (
            "call optimizer.step() or scaler.step(optimizer) inside the block, on the optimizer that is watched; "
            "a step inside torch.compile is not seen"
        )
        return [*calls, COVERAGE.fail(stats.subject, message, hint=hint)]
    findings = findings_of(finite_stats(stats), limits)
    if not stats.gradients:
        findings.append(REGISTRY["nonfinite-gradient"].skip(stats.subject, _unmeasured(stats)))
    if (gradients := gradient_stats(stats)) is not None:
        findings += findings_of(gradients, limits, ("gradient-underflow",))
    if (scale := loss_scale_stats(stats, limits)) is not None:
        findings += findings_of(scale, limits)
    if (updates := stagnation_stats(stats)) is not None:
        findings += findings_of(updates, limits, ("stagnation",))
    return [*findings, *calls, _coverage(stats)]


def finite_stats(stats: MonitorStats) -> FiniteStats:
    """The losses, and the parameters whose weights or gradients were not finite."""
    guarded = {optimizer.name for optimizer in stats.optimizers if optimizer.guarded}
    ruined = {p.name: g for p, g in stats.gradients if p.update is not None and p.update.poisoned}
    applied = {p.name: g.first for p, g in stats.gradients if g.bad and p.optimizer not in guarded}
    return FiniteStats(
        stats.subject,
        stats.losses,
        before=(),
        after=tuple(ruined),
        weights=len(stats.gradients),
        steps=stats.measured if stats.gradients else 0,
        since=min((gradient.first for gradient in ruined.values() if gradient.bad), default=None),
        applied={name: first for name, first in applied.items() if name not in ruined},
        counted=stats.counted,
    )


def gradient_stats(stats: MonitorStats) -> GradientStats | None:
    """The gradients that may have been float16, and of how much of them zeros are the marks of flushing; None without
    any: an element that was flushed looks like one that is zero."""
    nothing = all(gradient.vanished == gradient.calls for _, gradient in stats.gradients)
    losses = [
        _gradient(stats, param, gradient)
        for param, gradient in stats.gradients
        if stats.enabled or nothing or gradient.health.dtype == "float16" or gradient.cut
    ]
    scale = stats.scales[-1] if stats.scales else 1.0
    counted = stats.counted
    return GradientStats(stats.subject, None, scale=scale, gradients=tuple(losses), counted=counted) if losses else None


def _gradient(stats: MonitorStats, param: ParameterStats, gradient: GradientSum) -> GradientLoss:
    health, calls, marks = gradient.health, gradient.calls, ""
    if gradient.vanished == calls and calls >= _SEVERAL:
        marks = f" in each of {calls:,} measured steps (float16 flushes what is too small, or nothing depends on it)"
    elif 2 * gradient.cut > calls:
        marks = (
            f", and the rest ends abruptly at the smallest number of float16 in {gradient.cut:,} of {calls:,} measured "
            "steps: what is smaller was flushed"
        )
    loss = GradientLoss(
        param.name, health.dtype, health.dtype, health.numel, health.numel, health.zeros if marks else 0
    )
    loss.subnormal, loss.nonfinite, loss.marks = gradient.subnormal, health.nonfinite, marks
    loss.where = _called(stats, param, Where("backward"), Act.BACKWARD)
    return loss


def loss_scale_stats(stats: MonitorStats, limits: Limits) -> LossScaleStats | None:
    """The steps of the scaler, and the loss scales that suit the measured gradients; None without a scaler.

    Gradients that were zero already do not count for the lower end of the window, nor do those of activations.
    """
    scaler = stats.scaler
    if scaler is None:
        return None
    histograms = {}
    for param, gradient in stats.gradients:
        health = gradient.health
        if health.nonzero and health.histogram is not None:
            # Health counts 2**e <= |g| < 2**(e + 1), a window 2**(b - 1) < |g| <= 2**b: they part at powers of two.
            counts = {exponent + 1: count for exponent, count in health.histogram}
            histograms[param.name] = GradientHistogram(counts, health.amax, health.nonfinite)
    window = scale_window(histograms, share=limits.underflow) if histograms and scaler.enabled else None
    return LossScaleStats(scaler.enabled, scaler.steps, stats.subject, "float16", window, counted=stats.counted)


def stagnation_stats(stats: MonitorStats) -> StagnationStats | None:
    """The updates of narrow parameters; None where none was due to change."""
    loudest: dict[str, float] = defaultdict(float)
    for param, gradient in stats.gradients:
        loudest[_module(param)] = max(loudest[_module(param)], gradient.health.amax)
    tensors = [
        _updates(stats, param, update)
        for param in stats.parameters
        if (update := param.update) is not None and update.moved and not _is_noise(param, loudest[_module(param)])
    ]
    if not tensors:
        return None
    looked = sum(param.update is not None for param in stats.parameters)
    return StagnationStats(stats.subject, stats.measured, looked, len(tensors), tuple(tensors), counted=stats.counted)


def _updates(stats: MonitorStats, param: ParameterStats, update: TensorUpdates) -> TensorUpdates:
    """The updates of a parameter, with what its optimizer may do about those that rounding to nearest drops."""
    optimizer = next(optimizer for optimizer in stats.optimizers if optimizer.name == param.optimizer)
    expected, jumped, rates = update.expected, update.jumped, optimizer.rates
    update = replace(update, where=_called(stats, param, Where("update"), Act.OPTIMIZER_STEP))
    stays = expected >= _SIGNIFICANT and _FEWER * jumped < expected  # though stochastic rounding would have moved it
    update.random = expected >= _MANY / 2 and expected / 2 <= jumped <= 4 * expected
    # A compensation keeps what the parameter drops. It would have arrived by now if it did so for long.
    if param.compensated and not (stays and expected >= 2 * sampled(param.numel)):
        update.carriers, update.carried, update.lost = {"the state of the optimizer"}, update.lost, 0
    elif param.still is not None:  # an element that moves in the end has lost no more than a part of its updates
        update.lost = min(update.lost, round(param.still * update.moved))
    update.lost *= not update.random
    if update.steps < _SEVERAL or update.moved < _MANY:
        update.doubt = f"only {update.moved:,} updates in {update.steps:,} steps"
    elif rates and rates[-1] > rates[0] * (1 + 1e-6):
        update.doubt = "the learning rate still rises"
    elif not optimizer.nearest and not stays:  # only of one that rounds to nearest a lost update proves anything
        update.doubt = (
            f"stochastic rounding would have moved about {expected:.3g} elements of the sample, {jumped:,} moved: this "
            "does not show how the optimizer rounds"
        )
    return update


def _module(param: ParameterStats) -> str:
    """The module of a parameter; its own name where it has no module, or no model was handed over to name it."""
    unnamed = param.name.startswith(f"{param.optimizer}.params.")
    return ("" if unnamed else param.name.rpartition(".")[0]) or param.name


def _is_noise(param: ParameterStats, loudest: float) -> bool:
    """Return whether the gradient of a vector may be rounding errors alone: that of a bias before a batch norm is zero
    by mathematics, which a loop without a reference cannot show. loudest: of the gradients of its module."""
    limit = _NOISE * FORMATS[param.dtype].unit_roundoff * loudest
    return param.vector and param.gradient is not None and param.gradient.health.amax <= limit


def _called(stats: MonitorStats, param: ParameterStats, where: Where, act: Act) -> Where:
    """The line from which a backward pass reached a parameter, or its optimizer was stepped."""
    where = replace(where, module=param.name.rpartition(".")[0])
    events = (event for event in (stats.calls.events if stats.calls is not None else ()) if event.act is act)
    called = next((event for event in events if param.optimizer in (event.who, *event.optimizers)), None)
    return where if called is None else replace(where, file=called.file, line=called.line)


def _coverage(stats: MonitorStats) -> Finding:
    text = f"{stats.coverage} were looked at in training"
    if unseen := "; ".join(f"{what} ({count}x)" for what, count in stats.coverage.unseen.items()):
        text += f"; not looked at: {unseen}"
    if not stats.measured:
        return COVERAGE.skip(stats.subject, _unmeasured(stats))
    if not stats.gradients:
        message = (
            f"a gradient must have been measured; in {stats.measured:,} measured steps no parameter had one: {text}"
        )
        hint = "call backward() before the step, on a loss of the parameters that this optimizer has"
        return COVERAGE.fail(stats.subject, message, hint=hint)
    return COVERAGE.passed(stats.subject, text, stats.coverage.total)


def _unmeasured(stats: MonitorStats) -> str:
    if not stats.measured:
        steps = stats.steps + stats.skipped
        return f"none of {steps:,} steps was measured; the scaler skipped {stats.skipped:,}"
    return f"no gradient was there in {stats.measured:,} measured steps"
