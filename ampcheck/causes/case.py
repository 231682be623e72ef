"""One subject in one dtype: its eager run, and compiled runs at every stage of the compiler, judged as elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.autocast.emulate import arm_of
from ampcheck.autocast.missing import lacking
from ampcheck.causes.bisect import Backend, first_failing_node
from ampcheck.compiled.accuracy.comparison import EagerRun
from ampcheck.compiled.accuracy.judge import CompiledRun, run_compiled, run_eager, stats_of
from ampcheck.compiled.accuracy.plans import plans
from ampcheck.core.arm import armed
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.numerics import Measured, NumericsStats, check_numerics, measure_numerics
from ampcheck.numerics.run import RunPlan
from ampcheck.records.accuracy import AOT_EAGER
from ampcheck.records.blame import Bisected
from ampcheck.records.results import ResultError
from ampcheck.shadow import Fault
from ampcheck.torchtools.copying import Prepared
from ampcheck.torchtools.dynamo import backend

CHECKS = frozenset(
    "low-precision-error compiled-exception overflow nonfinite-gradient precision-loss silent-zero flush "
    "integer-cast".split()
)
"""The checks of low precision whose failures have a cause to search for."""


@dataclass(frozen=True, slots=True)
class Case:
    """One subject in one dtype: under autocast, or unchanged when it is `native` (`float32`: unchanged, too)."""

    plan: Plan
    low: torch.dtype
    native: bool

    @property
    def subject(self) -> Subject:
        """The subject as the user runs it."""
        return self.plan.subject

    @property
    def device(self) -> str:
        """The device that runs it."""
        return self.plan.device

    @property
    def name(self) -> str:
        """As findings name it: `model [float16]`."""
        return armed(self.subject.name, arm_of(self.low, native=self.native and self.low.itemsize <= 2))

    @property
    def judges_eager(self) -> bool:
        """True if there is an eager run in low precision to judge; one in float32 is what a model is."""
        return self.low.itemsize <= 2

    def eager(self, subject: Subject) -> tuple[Measured, list[Finding]]:
        """The eager run of the subject, or of a changed copy, and the failures of the audit that can be blamed."""
        measured = measure_numerics(subject, self.low, device=self.device, native=self.native, compared=True)
        return measured, self.blamed(check_numerics(measured.stats, self.plan.limits))

    def blamed(self, findings: Sequence[Finding]) -> list[Finding]:
        """The failures that can be blamed."""
        return [f for f in findings if f.verdict is Verdict.FAIL and f.check in CHECKS]

    def shadowed(self, subject: Subject) -> Iterator[EagerRun]:
        """Yield what compiled runs of the subject are compared with: as the user runs it, then with gradients of
        inputs."""
        asked = RunPlan(self.device, None if self.native else self.low, steps=self.plan.steps or 1)
        for plan in plans(subject, asked, self.low):
            yield run_eager(subject, plan, self.low)


def run_stage(eager: EagerRun, stage: str, **options: Any) -> tuple[CompiledRun, tuple[ResultError, ...] | None]:
    """One stage of the compiler, and what fails there; None where nothing does, empty where it raises."""
    run = run_compiled(eager, stage, **options)
    if run.raised:
        return run, None if run.outcome.error is not None and lacking(run.outcome.error) else ()
    return run, stats_of(eager, run).failures() or None


def bisect(eager: EagerRun, stage: str, failing: Sequence[ResultError]) -> Bisected:
    """Which node of the graphs brings the failure of this stage.

    failing: what was beyond its limit there; empty for a stage that raises.
    """
    paths: dict[int, str] = {}
    keys = {error.key for error in failing}

    def name(prepared: Prepared) -> None:
        paths.clear()
        if prepared.root is not None:
            paths.update((id(module), path) for path, module in prepared.root.named_modules())

    def fails(cut: Backend) -> bool:
        run, again = run_stage(eager, stage, blocks=_compiler(cut), change=name)
        return bool(again and keys & {e.key for e in again}) if keys else bool(run.raised)

    return first_failing_node(fails, backend("aot_eager" if stage == AOT_EAGER else "inductor"), paths)


def passes_without(eager: EagerRun, stage: str, module: str) -> bool:
    """Return whether the stage runs to its end and passes where one module is left out of compilation."""

    def leave_out(prepared: Prepared) -> None:
        assert prepared.root is not None
        left = prepared.root.get_submodule(module)
        left.forward = torch.compiler.disable(left.forward)  # type: ignore[no-untyped-call]

    how = "aot_eager" if stage == AOT_EAGER else "inductor"
    run, failing = run_stage(eager, stage, blocks=_compiler(how), change=leave_out)
    return not run.raised and failing is None


def _compiler(how: Backend | str) -> Callable[[Prepared], Sequence[Any]]:
    return lambda prepared: [torch.compile(block, backend=how) for block in prepared.blocks]


def faults_to_blame(stats: NumericsStats, failures: Sequence[Finding]) -> list[Fault]:
    """The faults of an eager run that are left in results or that a failure names, in the order in which they ran.

    Where only gradients fail, what happened in forward did not reach an output: faults of backward alone, if any.
    """
    named = {finding.where for finding in failures}
    faults = sorted((f for f in stats.faults if f.reaches or f.where in named), key=lambda fault: fault.index)
    if all(f.where.phase == "backward" for f in failures):
        return [fault for fault in faults if fault.where.phase == "backward"] or faults
    return faults


def first_cause(stats: NumericsStats, failures: Sequence[Finding]) -> Where:
    """The first op that is at fault."""
    if stats.raised is not None:
        return stats.raised.where
    faults = faults_to_blame(stats, failures)
    return faults[0].where if faults else next((finding.where for finding in failures), Where())
