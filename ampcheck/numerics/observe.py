"""What a shadow saw of a block of the user's code: forward, backward and the steps of optimizers."""

from __future__ import annotations

from collections.abc import Collection

from ampcheck.core.environment import environment
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run
from ampcheck.numerics.checks import OBSERVABLE, check_numerics
from ampcheck.numerics.measure import positive, source_lines, unruled
from ampcheck.numerics.model_map import maps
from ampcheck.numerics.stats import NumericsStats
from ampcheck.shadow import Shadow


def measure_block(shadow: Shadow, subject: str) -> NumericsStats:
    """The record of a shadow without a model so far. The reach of damage is known when its block has ended."""
    judge, faults = shadow.judge, shadow.faults
    assert judge is not None
    formats = {dtype for _, dtype in judge.largest} | {fault.dtype for fault in faults}
    ends = (companions for companions in shadow.store if companions.written and not companions.consumed)
    seen = {"ops": shadow.ops, "16-bit ops": judge.low, "tensors": judge.judged}
    seen["ops on integers alone"] = 0 if shadow.ops else shadow.whole  # evidence too: they round nothing
    return NumericsStats(
        subject=subject,
        arm="",
        format=min(formats, key=lambda name: format_of(name).bits, default="float32"),
        device="",
        judged=False,
        scale=judge.scale,
        keeps_nan=any(bool(companions.known_values().isnan().any()) for companions in ends),
        faults=faults,
        nonfinite=tuple(judge.nonfinite.items()),
        largest=dict(judge.largest),
        sources=source_lines({fault.where for fault in faults} | set(judge.nonfinite)),
        ops=shadow.ops,
        low=judge.low,
        whole=judge.whole,
        casts=dict(judge.casts),
        coverage=Coverage(positive(seen), unruled(shadow)),
    )


def block_run(stats: NumericsStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about a watched block. checks: out of `OBSERVABLE`, all by default."""
    findings = check_numerics(stats, limits, checks or OBSERVABLE)
    kept = tuple(finding for finding in findings if finding.check in OBSERVABLE)
    return Run(environment("cpu"), kept, stats.coverage, maps=maps(stats, limits))
