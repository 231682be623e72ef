"""Compares the compiled run of an audit with its eager run, and measures values inside the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import torch

from ampcheck.autocast.emulate import arm_of
from ampcheck.compiled.accuracy.checks import check_accuracy
from ampcheck.compiled.accuracy.judge import (
    EagerRun,
    not_repeatable,
    run_compiled,
    run_whole_or_parts,
    stats_of,
    with_places,
)
from ampcheck.compiled.accuracy.tables import tables
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run
from ampcheck.core.subject import Subject
from ampcheck.numerics.measure import Measured
from ampcheck.records.accuracy import AccuracyStats, Exceptions, counted_errors
from ampcheck.telemetry.checks import telemetry_tables
from ampcheck.torchtools.copying import NO_SCRIPT, is_scripted


def measure_compiled_run(subject: Subject, eager: Measured, dtype: torch.dtype) -> AccuracyStats:
    """Run the same under `torch.compile`, or as the subject is compiled already.

    Outputs, loss, gradients, and what the calls change are compared with the exact values of the eager run, at its loss
    scale, and what each cast inside the graphs loses is measured. Random numbers are drawn as eager mode draws them.
    """
    arm = arm_of(dtype, "compiled", native=eager.stats.native)
    if is_scripted(subject):
        return AccuracyStats(subject.name, arm, format_of(dtype).name, unsupported=NO_SCRIPT, beside=True)
    assert eager.recorded is not None, "the eager run keeps its results only with compared=True"
    run = EagerRun(subject, eager.plan, dtype, {}, eager.recorded, freedom=eager.freedom, masked=eager.masked)
    compiled = run_whole_or_parts(run, inside={"aside": True})
    if compiled.raised and eager.plan.no_backward:
        # AOTAutograd differentiates before forward runs, and raises then what eager mode raises in backward.
        compiled = run_compiled(replace(run, plan=replace(eager.plan, grad=False)), inside={"aside": True})
    compiled = with_places(run, compiled)
    run.incomparable = not_repeatable(run, compiled) if compiled.errors else "the calls give no tensor"
    stats, inside = stats_of(run, compiled), compiled.inside
    assert inside is not None
    if eager.stats.prevented and compiled.outcome.ran.phase == "backward":
        stats = replace(stats, exceptions=Exceptions())
    counted, noise = counted_errors(compiled.errors)
    seen = Counter({"graphs": compiled.graphs.count, "values inside graphs": len(inside.sites)}) + counted
    unseen = Counter(compiled.graphs.unseen) + Counter(inside.unseen) + compiled.outcome.ran.unseen
    coverage = Coverage(dict(seen), dict(unseen + compiled.left_out + noise))
    return replace(stats, arm=arm, beside=True, no_gradients=eager.stats.no_backward, coverage=coverage)


def judge_compiled_run(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about the compiled run of an audit, with its tables."""
    inside = telemetry_tables(replace(stats.inside, subject=stats.name)) if stats.inside is not None else ()
    findings = tuple(check_accuracy(stats, limits, checks))
    return Run(findings=findings, coverage=stats.coverage, tables=(*tables(stats), *inside))
