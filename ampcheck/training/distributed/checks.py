"""Checks on sums over ranks and on differences between ranks. Pure: no PyTorch runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ampcheck.catalog.training import REDUCE_PRECISION, SCALER_PROTOCOL
from ampcheck.checks.autocast.autocast_state import CHECK as AUTOCAST_STATE
from ampcheck.core.check import Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table, Verdict, Where
from ampcheck.core.text import counted, listed
from ampcheck.training.distributed.ranks import name_ranks
from ampcheck.training.distributed.replicas import Drift, place_of
from ampcheck.training.distributed.sums import CollectiveStats, DistributedStats
from ampcheck.training.protocol.events import Event
from ampcheck.training.reductions.checks import ReductionStats, check_reductions

_HINT = (
    "reduce gradients in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32) under FSDP2, no compressing "
    "communication hook and float32 gradients under DDP"
)


def check_distributed(stats: DistributedStats, limits: Limits, drift: Drift | None = None) -> list[Finding]:
    """`reduce-precision` of sums over ranks and of norms, and `autocast-state`, compared between ranks. drift: where
    parameters that began equal parted."""
    if stats.skipped:
        return [check.skip(stats.subject, stats.skipped) for check in (REDUCE_PRECISION, AUTOCAST_STATE)]
    findings = [*_collectives(stats, limits), *_alone(stats, drift)]
    if stats.sums or stats.norms:
        findings += check_reductions(ReductionStats(stats.subject, stats.sums, stats.norms), limits)
    return [*findings, *_states(stats)]


def check_replicas(subject: str, drift: Drift | None, events: Sequence[Event]) -> Iterator[Finding]:
    """`reduce-precision`, of a loss scale `scaler-protocol`: ranks that hold one model step it alike."""
    if drift is None or not drift.proven:
        return
    if not drift.names:
        text = f"ranks that hold the shards of a model must step them alike; from step {drift.step} on {drift.text}"
    else:
        some = f"{counted(len(drift.names), 'parameters')} ({listed(drift.names, 3)}) of {name_ranks(drift.ranks)}"
        text = (
            f"replicas of a parameter must stay equal to the bit on all ranks; {some} part in step {drift.step} and do "
            f"not meet again: {drift.text}"
        )
    check = SCALER_PROTOCOL if drift.scaler else REDUCE_PRECISION
    unit = "parameters" if drift.names else "calls"
    where, count = place_of(drift, events), len(drift.names) or 1
    yield check.fail(subject, text, where=where, observed=count, limit=0, unit=unit, hint=drift.hint)


def _alone(stats: DistributedStats, drift: Drift | None) -> Iterator[Finding]:
    """A warning of ranks that begin alike and then train without a word to each other."""
    if (
        drift is None
        or drift.proven
        or stats.skipped
        or stats.collectives
        or stats.coverage.seen.get("other collectives")
    ):
        return
    text = (
        f"replicas of a parameter must stay equal on all ranks; {counted(len(drift.names), 'parameters')} begin equal "
        f"and part in step {drift.step}, and no collective ran: each rank trains on its own. An average that comes "
        "after the observed steps was not seen"
    )
    hint = "wrap the model in DistributedDataParallel; with averages of weights, observe steps up to one (--steps)"
    yield REDUCE_PRECISION.warn(stats.subject, text, observed=len(drift.names), limit=0, unit="parameters", hint=hint)


def _collectives(stats: DistributedStats, limits: Limits) -> list[Finding]:
    low = [total for total in stats.collectives if format_of(total.format).bits <= 16]
    if findings := [finding for total in low if (finding := _judge(stats, total, limits)) is not None]:
        return findings
    if not stats.collectives:
        text = f"no reducing collective ran in {stats.steps} steps on {stats.world} ranks"
        return [REDUCE_PRECISION.skip(stats.subject, ": ".join((text, *stats.raised[:1])))]
    calls = sum(total.calls for total in stats.collectives)
    formats = ", ".join(sorted({total.format for total in stats.collectives}))
    worst = max((total.ratio for total in low), default=0.0)
    text = f"{calls} sums over {stats.world} ranks in {formats}"
    text += f": the worst in 16 bits has the error of {worst:.2g} roundings" if low else ", none of them in 16 bits"
    if stats.target and low:
        text += f", also over {stats.target} processes"
    evidence: Evidence = {"observed": worst, "limit": limits.reduction, "unit": "roundings"}
    return [REDUCE_PRECISION.passed(stats.subject, text, calls, **evidence)]


def _judge(stats: DistributedStats, total: CollectiveStats, limits: Limits) -> Finding | None:
    """The gravest defect of a sum in 16 bits; None where there is none."""
    beyond = next((p for p in total.predicted if p.ratio > limits.reduction or p.overflows), None)
    target = next((p for p in total.predicted if p.world == stats.target), None)
    overflow = Verdict.WARN if stats.scaled else Verdict.FAIL
    verdict, limit, unit = Verdict.FAIL, limits.reduction, "roundings"
    ring = "in a ring whose addends are like those measured here"
    observed: float
    if total.overflowed:
        verdict, observed, limit, unit = overflow, total.overflowed, 0.0, "elements"
        text = f"{total.overflowed} of {total.followed} followed elements are infinite where the exact sum is not"
        text += "; the scaler backs off until they are not" if stats.scaled else ""
    elif total.vanished > limits.underflow:
        observed, limit, unit = total.vanished, limits.underflow, "share"
        cast = " once they were cast for the collective" if total.cast else ""
        text = (
            f"{total.vanished:.1%} of the sums that are not zero become zero{cast} ({total.followed} elements followed)"
        )
    elif total.ratio > limits.reduction:
        observed = total.ratio
        text = f"its relative error is {total.error:.2g}, that of {total.ratio:.2g} roundings of the exact sum"
    elif target is not None and target.ratio > limits.reduction:
        observed = target.ratio
        text = f"over {target.world} processes, {ring}, it has the error of {target.ratio:.2g} roundings"
        text += f" (relative {target.error:.2g}; here {total.ratio:.2g} roundings)"
    elif target is not None and target.overflows:
        verdict, observed, limit, unit = overflow, 1.0, 0.0, "sums"
        text = f"over {target.world} processes, {ring}, the sum is beyond {format_of(total.format).max:.5g}"
    elif target is None and beyond is not None:
        verdict, observed = Verdict.WARN, beyond.ratio
        text = (
            f"here it has the error of {total.ratio:.2g} roundings of the exact sum, over {beyond.world} processes, "
            f"{ring}, {'it overflows' if beyond.overflows else f'{beyond.ratio:.2g}'}"
        )
    else:
        return None
    message = (
        f"a sum over ranks must keep the digits of its format, and its range; {total.where.op} over {total.world} "
        f"ranks adds up in {total.format}: {text}"
    )
    return REDUCE_PRECISION.finding(
        verdict, stats.subject, message, where=total.where, observed=observed, limit=limit, unit=unit, hint=_HINT
    )


def _states(stats: DistributedStats) -> Iterator[Finding]:
    """A module must run under the same autocast state and precision settings on all ranks."""
    if stats.autocast:
        name, values = next(iter(stats.autocast.items()))
        others = f" ({len(stats.autocast)} modules differ)" if len(stats.autocast) > 1 else ""
        message = (
            f"all ranks must run a module under the same autocast state; {name or 'the model'} ran with autocast "
            f"{_by_rank(values)}{others}: the ranks average gradients of different precision"
        )
        hint = (
            "enter torch.autocast with the same enabled and dtype on every rank; decide from the config, not the rank"
        )
        where, count = Where(phase="forward", module=name), len(stats.autocast)
        yield AUTOCAST_STATE.fail(
            stats.subject, message, where=where, observed=count, limit=0, unit="modules", hint=hint
        )
    for name, values in stats.settings.items():
        message = f"all ranks must run with the same precision settings; {name} is {_by_rank(values)}"
        hint = "change the setting before the ranks part, or on all of them"
        yield AUTOCAST_STATE.warn(stats.subject, message, observed=1, limit=0, unit="settings", hint=hint)
    if stats.autocast or stats.settings:
        return
    if stats.modules:
        text = f"{stats.modules} modules ran under the same autocast state on {stats.world} ranks"
        yield AUTOCAST_STATE.passed(stats.subject, text, stats.modules)
    else:
        yield AUTOCAST_STATE.skip(stats.subject, "no module ran on all ranks")


def _by_rank(values: Mapping[str, tuple[int, ...]]) -> str:
    return "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values.items())


def sums_table(stats: DistributedStats) -> Table | None:
    """The sums over ranks, the worst first; None where there is none."""
    rows: list[tuple[Scalar, ...]] = [
        (
            f"{total.where.op} ({total.where.phase})",
            total.where.place,
            *(total.format, total.world, total.calls, total.elements, total.error, total.once, total.vanished),
            ", ".join(f"{p.ratio:.2g} at {p.world}" for p in total.predicted[:: max(len(total.predicted) // 4, 1)]),
        )
        for total in sorted(stats.collectives, key=lambda total: -total.ratio)
    ]
    columns = (
        *("collective", "where", "format", "ranks", "calls", "elements", "relative error", "of one rounding"),
        *("became zero", "roundings over more processes"),
    )
    return Table("sums over ranks", columns, rows, str(REDUCE_PRECISION)) if rows else None
