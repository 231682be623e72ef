"""What the ranks do together is judged here. Pure: no PyTorch runs."""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table, Verdict, Where, passed
from ampcheck.training.distributed.ranks import name_ranks
from ampcheck.training.distributed.stats import CollectiveStats, DistributedStats, Prediction
from ampcheck.training.reductions.checks import ReductionStats, check_reductions

SLUG = "reduce-precision"
STATE = "autocast-state"

_HINT = (
    "reduce gradients in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32) under FSDP2, no compressing "
    "communication hook and float32 gradients under DDP"
)


def check_distributed(stats: DistributedStats, limits: Limits) -> list[Finding]:
    """`reduce-precision` of sums over ranks and of norms, and `autocast-state` of ranks beside each other."""
    if stats.skipped:
        return [Finding(slug, Verdict.SKIP, stats.subject, stats.skipped) for slug in (SLUG, STATE)]
    return [*_collectives(stats, limits), *_on_ranks(stats, limits), *_states(stats)]


def _on_ranks(stats: DistributedStats, limits: Limits) -> Iterator[Finding]:
    """Running sums and norms, as they are judged in one process."""
    if stats.sums or stats.norms:
        yield from check_reductions(ReductionStats(stats.subject, stats.sums, stats.norms), limits)


def _collectives(stats: DistributedStats, limits: Limits) -> Iterator[Finding]:
    low = [one for one in stats.collectives if format_of(one.format).bits <= 16]
    found = [finding for one in low if (finding := _judge(stats, one, limits)) is not None]
    yield from found
    if found:
        return
    if not stats.collectives:
        text = f"{stats.steps} steps on {stats.world} ranks added nothing up over ranks"
        told = f": {stats.raised[0][2]}" if stats.raised else ""
        yield Finding(SLUG, Verdict.SKIP, stats.subject, text + told)
        return
    calls = sum(one.calls for one in stats.collectives)
    formats = ", ".join(sorted({one.format for one in stats.collectives}))
    worst = max((one.ratio for one in low), default=0.0)
    text = f"{calls} sums over {stats.world} ranks in {formats}"
    text += f": the worst in 16 bits has the error of {worst:.2g} roundings" if low else ", none of them in 16 bits"
    if stats.target and low:
        text += f", also over {stats.target} processes"
    yield passed(SLUG, stats.subject, text, calls, observed=worst, limit=limits.reduction, unit="roundings")


def _judge(stats: DistributedStats, one: CollectiveStats, limits: Limits) -> Finding | None:
    """The worst that can be said of a sum in 16 bits; None where there is nothing."""
    how = f"{one.op} over {one.world} ranks adds up in {one.format}"
    ring = "in a ring whose addends are like those measured here"
    if one.overflowed:
        verdict = Verdict.WARN if stats.scaled else Verdict.FAIL
        text = f"{one.overflowed} of {one.followed} followed elements are infinite where the exact sum is not"
        text += "; the scaler backs off until they are not" if stats.scaled else ""
        return _finding(stats, one, verdict, f"{how}: {text}", one.overflowed, 0.0, "elements")
    if one.vanished > limits.underflow:
        cast = " once they were cast for the collective" if one.cast else ""
        text = f"{one.vanished:.1%} of the sums that are not zero become zero{cast} ({one.followed} elements followed)"
        return _finding(stats, one, Verdict.FAIL, f"{how}: {text}", one.vanished, limits.underflow, "share")
    if one.ratio > limits.reduction:
        text = f"its relative error is {one.error:.2g}, that of {one.ratio:.2g} roundings of the exact sum"
        return _finding(stats, one, Verdict.FAIL, f"{how}: {text}", one.ratio, limits.reduction, "roundings")
    if told := _at_target(stats, one):
        if told.ratio > limits.reduction:
            text = f"over {told.world} processes, {ring}, it has the error of {told.ratio:.2g} roundings"
            text += f" (relative {told.error:.2g}; here {one.ratio:.2g} roundings)"
            return _finding(stats, one, Verdict.FAIL, f"{how}: {text}", told.ratio, limits.reduction, "roundings")
        if told.overflows:
            text = f"over {told.world} processes, {ring}, the sum is beyond {format_of(one.format).max:.5g}"
            verdict = Verdict.WARN if stats.scaled else Verdict.FAIL
            return _finding(stats, one, verdict, f"{how}: {text}", 1.0, 0.0, "sums")
        return None
    beyond = next((p for p in one.predicted if p.ratio > limits.reduction or p.overflows), None)
    if beyond is None:
        return None
    text = (
        f"here it has the error of {one.ratio:.2g} roundings of the exact sum, over {beyond.world} processes, {ring}, "
        + ("it overflows" if beyond.overflows else f"{beyond.ratio:.2g}")
    )
    return _finding(stats, one, Verdict.WARN, f"{how}: {text}", beyond.ratio, limits.reduction, "roundings")


def _at_target(stats: DistributedStats, one: CollectiveStats) -> Prediction | None:
    return next((p for p in one.predicted if p.world == stats.target), None)


def _finding(
    stats: DistributedStats,
    one: CollectiveStats,
    verdict: Verdict,
    text: str,
    observed: float,
    limit: float,
    unit: str,
) -> Finding:
    message = f"a sum over ranks must keep the digits of its format, and its range; {text}"
    where = Where(phase=one.phase, op=one.op, file=one.file, line=one.line)
    return Finding(SLUG, verdict, stats.subject, message, where, float(observed), limit, unit, _HINT)


def _states(stats: DistributedStats) -> Iterator[Finding]:
    """`autocast-state`: what runs on one rank must run under the same switches on all of them."""
    if stats.autocast:
        name, values = next(iter(stats.autocast.items()))
        told = "; ".join(f"{state} on {name_ranks(ranks)}" for state, ranks in values.items())
        others = f" ({len(stats.autocast)} modules differ)" if len(stats.autocast) > 1 else ""
        message = (
            f"all ranks must run a module under the same autocast state; {name or 'the model'} ran with autocast "
            f"{told}{others}: the ranks average gradients of different precision"
        )
        hint = (
            "enter torch.autocast with the same enabled and dtype on every rank; decide from the config, not the rank"
        )
        where = Where(phase="forward", module=name)
        count = float(len(stats.autocast))
        yield Finding(STATE, Verdict.FAIL, stats.subject, message, where, count, 0.0, "modules", hint)
    for name, values in stats.switches.items():
        told = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values.items())
        message = f"all ranks must run with the same precision switches; {name} is {told}"
        hint = "set the switch before the ranks part, or on all of them"
        yield Finding(STATE, Verdict.WARN, stats.subject, message, Where(), 1.0, 0.0, "switches", hint)
    if stats.autocast or stats.switches:
        return
    if stats.modules:
        text = f"{stats.modules} modules ran under the same autocast state on {stats.world} ranks"
        yield passed(STATE, stats.subject, text, stats.modules)
    else:
        yield Finding(STATE, Verdict.SKIP, stats.subject, "no module ran on all ranks")


def distributed_tables(stats: DistributedStats) -> list[Table]:
    """The sums over ranks, what each rank keeps, and the gradients of all ranks together."""
    if stats.skipped:
        return []
    sums: list[tuple[Scalar, ...]] = [
        (
            f"{one.op} ({one.phase})",
            f"{one.file}:{one.line}" if one.file else "",
            one.format,
            one.world,
            one.calls,
            one.elements,
            one.error,
            one.once,
            one.vanished,
            ", ".join(f"{p.ratio:.2g} at {p.world}" for p in one.predicted[:: max(len(one.predicted) // 4, 1)]),
        )
        for one in sorted(stats.collectives, key=lambda one: -one.ratio)
    ]
    columns = ("collective", "where", "format", "ranks", "calls", "elements", "relative error", "of one rounding")
    kept: list[tuple[Scalar, ...]] = [
        (one.rank, one.role, one.dtype, one.tensors, one.bytes) for one in stats.residency
    ]
    grads: list[tuple[Scalar, ...]] = [
        (name, one.dtype, one.numel, one.nonzero, one.zeros, one.subnormals, one.nonfinite, one.amax, one.norm)
        for name, one in stats.gradients.items()
    ]
    note = f"replicas differ: {', '.join(stats.differing[:5])}" if stats.differing else ""
    found = [
        Table("sums over ranks", (*columns, "became zero", "roundings over more processes"), sums, SLUG),
        Table("what each rank keeps", ("rank", "role", "dtype", "tensors", "bytes"), kept, "master-weights"),
        Table(
            "gradients of all ranks together",
            ("parameter", "dtype", "elements", "nonzero", "zero", "subnormal", "not finite", "largest", "norm"),
            grads,
            "gradient-underflow",
            note,
        ),
    ]
    return [table for table in found if table.rows]
