"""Requires: A sum of many gradients, over micro-batches or over ranks, is as exact as one rounding of the exact sum
within a factor (4 by default), and keeps its range; a total gradient norm is computed in float32. Fails when a 16-bit
running sum or reduction is further off, flushes more than a tenth of its nonzero elements to zero, or overflows though
the exact sum does not (a warning where a GradScaler backs off), and when total norms that were rounded to 16 bits are
combined. Fails where replicas of a parameter that begin equal on several ranks part and do not meet again, and where
ranks step the shards of a model at different rates. Warns for a single 16-bit total norm, for long 16-bit sums inside a
graph, and for a reduction over ranks that would fail at up to 1024 processes.

Measured: A running sum is a chain of additions, casts between them included, whose addends were not computed from the
partial sum; from 8 addends on it is compared with the float64 sum carried along. Norms are followed through stack,
powers and sums, and over shards. Under DDP and FSDP2 every reduction that adds up is seen, those of DDP's reducer and
of communication hooks too: a sample of each rank's addends is added in float64 and compared with the result. The bits
of trained parameters are compared over ranks when the backward pass of each step begins; they are replicas where DDP
averages their gradients, where gradients were equal, or values after an update. Averages of weights every few steps
(local SGD) make them equal again. For more processes a ring is emulated with addends like those measured; set
world_size to predict a specific number of processes.

Causes: A policy with reduce_dtype=torch.bfloat16, a compressing communication hook, 16-bit gradients that are reduced
or accumulated as they are, clip_grad_norm_ on 16-bit gradients, norms of groups combined in bfloat16; a last
micro-batch under no_sync(), a learning rate or an optimizer state of one rank alone.

Fix: Reduce and accumulate in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32), no compressing hook, float32
gradients; round once at the end. Cast gradients or their norms to float32 before they are put together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ampcheck.checks.training import parted
from ampcheck.core.check import Check, Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Kind
from ampcheck.core.text import counted
from ampcheck.records.reductions import (
    FEWEST,
    CollectiveStats,
    DistributedStats,
    Drift,
    NormStats,
    ReductionStats,
    ReplicaStats,
    SumStats,
)

CHECK = Check(
    "reduce-precision",
    "training",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("ReductionStats", "DistributedStats", "ReplicaStats"),
    order=607,
    evidence=("tests/corpus/training/sum_overflows_before_division", "tests/corpus/training/token_counts_in_bfloat16"),
)

_KINDS = {
    "sum": "a running sum is kept",
    "gradient": "gradients are accumulated",
    "graph": "values of the graph are added up",
}
_SUM_HINTS = {
    "sum": "keep the running sum in float32 and round it once at the end (reduce_dtype=torch.float32)",
    "gradient": "accumulate in float32: float32 parameters under autocast, or float32 buffers for the gradients",
    "graph": "add up in float32, or stack the addends and take torch.sum, which adds in float32 inside",
}
_HINT = (
    "reduce gradients in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32) under FSDP2, no compressing "
    "communication hook and float32 gradients under DDP"
)


def _of_process(stats: ReductionStats, limits: Limits) -> list[Finding]:
    """Running sums and total norms, one finding for each line of code.

    A sum fails from `limits.reduction` times the error of rounding the exact sum once, and where it overflows though
    the exact sum does not; it only warns where it belongs to a forward, or backward adds it up on its way. A total norm
    in 16 bits warns, and fails where such totals are combined.
    """
    if findings := [*_sums(stats, limits), *_norms(stats)]:
        return findings
    if not stats.sums and not stats.norms:
        text = f"no running sum of {FEWEST} addends or more and no total norm was computed"
        return [CHECK.skip(stats.subject, text)]
    counts = {f"running sums of {FEWEST} addends or more": len(stats.sums), "total norms": len(stats.norms)}
    text = f"{' and '.join(f'{count} {what}' for what, count in counts.items() if count)} were followed"
    low = [total for total in stats.sums if total.judged]
    worst = max((total.ratio for total in low), default=0.0)
    text += (
        f"; the worst 16-bit sum has the error of {worst:.2g} roundings" if low else ", none of them kept in 16 bits"
    )
    seen = len(stats.sums) + len(stats.norms)
    shown = Evidence(observed=worst, limit=limits.reduction, unit="roundings")
    return [CHECK.passed(stats.subject, text, seen, **shown)]


def _sums(stats: ReductionStats, limits: Limits) -> Iterator[Finding]:
    places: dict[tuple[str, str, Where], list[SumStats]] = defaultdict(list)
    for total in stats.sums:
        if total.judged and (total.overflowed or total.ratio > limits.reduction or total.vanished > limits.underflow):
            places[total.kind, total.format, total.where].append(total)
    for (kind, fmt, where), group in places.items():
        worst = max(group, key=lambda total: (total.overflowed, total.vanished > limits.underflow, total.ratio))
        others = f" ({len(group)} sums)" if len(group) > 1 else ""
        observed: float
        if worst.overflowed:
            observed, limit, unit = worst.overflowed, 0.0, "elements"
            text = f"{observed} followed elements overflow where the exact sum does not"
        elif worst.vanished > limits.underflow:
            observed, limit, unit = worst.vanished, limits.underflow, "share of the addends"
            text = f"{observed:.0%} of the addends' nonzero values had become zero before they were added"
        else:
            observed, limit, unit = worst.ratio, limits.reduction, "roundings"
            text = f"its relative error is {worst.error:.2g}, that of {observed:.2g} roundings of the exact sum"
        message = (
            "a sum of many addends must be as exact as one rounding of it, within a factor of "
            f"{limits.reduction:g}; {_KINDS[kind]} in {fmt}{others}: after {worst.addends} addends {text}"
        )
        verdict = Verdict.WARN if kind == "graph" else Verdict.FAIL
        yield CHECK.finding(
            verdict, stats.subject, message, where=where, observed=observed, limit=limit, unit=unit,
            hint=_SUM_HINTS[kind],
        )  # fmt: skip


def _norms(stats: ReductionStats) -> Iterator[Finding]:
    places: dict[tuple[bool, str, Where], list[NormStats]] = defaultdict(list)
    for norm in stats.norms:
        if norm.grouped or (norm.low and norm.terms > 1) or norm.overflowed:
            places[norm.grouped, norm.format, norm.where].append(norm)
    for (grouped, fmt, where), group in places.items():
        worst = max(group, key=lambda norm: (norm.overflowed, norm.error or 0.0))
        measured = "" if worst.error is None else f", {worst.value:.6g} where float64 gives {worst.exact:.6g}"
        across = " over the shards of several processes" if worst.sharded else ""
        how = (
            f"the norm overflowed{across} in {fmt} although every gradient is finite"
            if worst.overflowed
            else f"totals rounded to {fmt} are combined{across}, so that it depends on how the tensors were grouped"
            if grouped
            else f"{worst.terms} norms are combined{across} in {fmt}"
        )
        message = (
            f"a total norm must be computed in float32; {how}"
            f"{measured}{f' (relative error {worst.error:.2g})' if worst.error is not None else ''}; "
            f"{fmt} has {format_of(fmt).mantissa_bits + 1} significant bits"
        )
        hint = "cast the gradients, or their norms before they are combined, to float32"
        verdict = Verdict.FAIL if grouped or worst.overflowed else Verdict.WARN
        limit = None if worst.error is None else format_of(fmt).unit_roundoff
        yield CHECK.finding(
            verdict, stats.subject, message, where=where, observed=worst.error, limit=limit, unit="relative error",
            hint=hint,
        )  # fmt: skip


def _of_ranks(stats: DistributedStats, limits: Limits) -> Iterator[Finding]:
    if stats.skipped:
        yield CHECK.skip(stats.subject, stats.skipped)
        return
    yield from (*_collectives(stats, limits), *_alone(stats, stats.drift))
    if stats.sums or stats.norms:
        yield from _of_process(ReductionStats(stats.subject, stats.sums, stats.norms), limits)


def _of_replicas(stats: ReplicaStats, limits: Limits) -> Iterator[Finding]:
    """Ranks that hold one model step it alike; what a loss scale sets apart is said by `scaler-protocol`."""
    if not stats.drift.scaler:
        yield CHECK.fail(stats.subject, stats.message, **parted(stats))


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
    yield CHECK.warn(stats.subject, text, observed=len(drift.names), limit=0, unit="parameters", hint=hint)


def _collectives(stats: DistributedStats, limits: Limits) -> list[Finding]:
    low = [total for total in stats.collectives if format_of(total.format).bits <= 16]
    if findings := [finding for total in low if (finding := _judge(stats, total, limits)) is not None]:
        return findings
    if not stats.collectives:
        text = f"no reducing collective ran in {stats.steps} steps on {stats.world} ranks"
        return [CHECK.skip(stats.subject, ": ".join((text, *stats.raised[:1])))]
    calls = sum(total.calls for total in stats.collectives)
    formats = ", ".join(sorted({total.format for total in stats.collectives}))
    worst = max((total.ratio for total in low), default=0.0)
    text = f"{calls} sums over {stats.world} ranks in {formats}"
    text += f": the worst in 16 bits has the error of {worst:.2g} roundings" if low else ", none of them in 16 bits"
    if stats.target and low:
        text += f", also over {stats.target} processes"
    evidence: Evidence = {"observed": worst, "limit": limits.reduction, "unit": "roundings"}
    return [CHECK.passed(stats.subject, text, calls, **evidence)]


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
    return CHECK.finding(
        verdict, stats.subject, message, where=total.where, observed=observed, limit=limit, unit=unit, hint=_HINT
    )


_JUDGES: Mapping[type, Callable[[Any, Limits], Iterable[Finding]]] = {
    ReductionStats: _of_process,
    DistributedStats: _of_ranks,
    ReplicaStats: _of_replicas,
}


def check(stats: ReductionStats | DistributedStats | ReplicaStats, limits: Limits) -> Iterable[Finding]:
    """Sums of many gradients and their norms keep their digits, and replicas stay equal."""
    return _JUDGES[type(stats)](stats, limits)
