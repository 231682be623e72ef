"""Observation of a block of the user's code: forward, backward and the steps of optimizers."""

from __future__ import annotations

from collections.abc import Collection

from ampcheck.core.arm import Arm
from ampcheck.core.environment import environment
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run
from ampcheck.numerics.checks import check_numerics, observable
from ampcheck.numerics.measure import judged_by, positive, unruled
from ampcheck.numerics.model_map import maps
from ampcheck.records.faults import WRAP
from ampcheck.records.numerics import NumericsStats
from ampcheck.shadow import Shadow


def measure_block(shadow: Shadow, subject: str) -> NumericsStats:
    """The record of a shadow without a model so far. The reach of damage is known when its block has ended."""
    judged, seen = judged_by(shadow)
    formats = {dtype for _, dtype in judged["largest"]} | {fault.dtype for fault in shadow.faults if fault.kind != WRAP}
    ends = (companions for companions in shadow.store.values() if companions.written and not companions.consumed)
    seen["ops on integers alone"] = 0 if shadow.ops else shadow.whole  # evidence too: they round nothing
    return NumericsStats(
        subject=subject,
        arm=Arm(),
        format=min(formats, key=lambda name: format_of(name).bits, default="float32"),
        device="",
        judged=False,
        keeps_nan=any(bool(companions.known_values().isnan().any()) for companions in ends),
        coverage=Coverage(positive(seen), unruled(shadow)),
        **judged,
    )


def block_run(stats: NumericsStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about a watched block. checks: out of `observable()`, all by default."""
    findings = check_numerics(stats, limits, checks or observable())
    kept = tuple(finding for finding in findings if finding.check in observable())
    return Run(environment("cpu"), kept, stats.coverage, maps=maps(stats, limits))
