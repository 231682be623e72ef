"""One subject in one dtype: eager and compiled runs of it and of changed copies, judged as the audit judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.catalog.compiled import COMPILED_EXCEPTION
from ampcheck.catalog.numerics import (
    FLUSH,
    INTEGER_CAST,
    LOW_PRECISION_ERROR,
    NONFINITE_GRADIENT,
    OVERFLOW,
    PRECISION_LOSS,
    SILENT_ZERO,
)
from ampcheck.compiled.accuracy.arms import run_plan
from ampcheck.compiled.accuracy.judge import plans
from ampcheck.compiled.accuracy.ladder import Bench, Climb, compared, measure_bench, measure_rounding, run_rung
from ampcheck.compiled.accuracy.stats import AOT_EAGER, EMULATE, EMULATED, AccuracyStats, Deviation
from ampcheck.compiled.blame.bisect import Backend, Bisected, first_failing_node
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.numerics import NumericsStats, Reference, arm_name, check_numerics, measure_numerics
from ampcheck.numerics.compiled import measure_graphs
from ampcheck.numerics.measure import Eager
from ampcheck.torchtools.copying import Prepared, prepare
from ampcheck.torchtools.dynamo import backend, configured

CHECKS = frozenset(
    check.slug
    for check in (
        LOW_PRECISION_ERROR,
        COMPILED_EXCEPTION,
        OVERFLOW,
        NONFINITE_GRADIENT,
        PRECISION_LOSS,
        SILENT_ZERO,
        FLUSH,
        INTEGER_CAST,
    )
)
"""The checks of low precision whose failures have a cause to search for."""

PASSES, FAILS, RAISES = "passes", "fails", "raises"


@dataclass(frozen=True, slots=True)
class Arm:
    """One subject in one dtype: under autocast, or as it is when it is `native` (`float32`: as it is, too)."""

    subject: Subject
    reference: Reference
    low: torch.dtype
    native: bool
    device: str
    limits: Limits
    steps: int = 1

    @property
    def name(self) -> str:
        """As findings name it: `model [float16]`."""
        arm = arm_name(self.low, self.native and self.low.itemsize <= 2, compiled=False)
        return f"{self.subject.name} [{arm.replace(', eager', '')}]"

    @property
    def judged_eager(self) -> bool:
        """Whether there is an eager run in low precision to judge; one in float32 is what a model is."""
        return self.low.itemsize <= 2

    def eager(self, subject: Subject) -> tuple[Eager, list[Finding]]:
        """The eager run of the subject, or of a changed copy, and the failures of the audit that can be blamed."""
        measured = measure_numerics(subject, self.reference, self.low, device=self.device, native=self.native)
        return measured, self.failures(measured.stats)

    def failures(self, stats: NumericsStats) -> list[Finding]:
        """What fails in a run, of what can be blamed."""
        return [f for f in check_numerics(stats, self.limits) if f.verdict is Verdict.FAIL and f.check in CHECKS]

    def benches(self, subject: Subject) -> Iterator[Bench]:
        """What compiled runs of the subject are judged by: as the user runs it, then with gradients of the inputs."""
        autocast = None if self.native else self.low
        for plan in plans(subject, self.device, autocast, self.low, self.steps, None):
            yield measure_bench(subject, plan, self.low)

    def again(self, bench: Bench, changed: Subject) -> Bench:
        """The same for a changed copy."""
        return measure_bench(changed, bench.plan, self.low)

    def beyond(self, bench: Bench, found: Sequence[Deviation]) -> list[Deviation]:
        """What compiled code got worse than eager mode and reordering explain."""
        stats = AccuracyStats(
            self.name,
            arm="",
            format=format_of(self.low).name,
            device=self.device,
            deviations=tuple(found),
            near_ties=bench.near_ties,
            chain=bench.chain,
            reduction=bench.reduction,
        )
        factor = self.limits.precision
        return [d for d in stats.excess(factor) if not stats.excused(d, factor)]

    def rung(
        self, bench: Bench, rung: str, settings: Mapping[str, Any] | None = None
    ) -> tuple[Climb, list[Deviation] | None]:
        """One rung, and what fails on every one of the data; None where nothing does, empty where it raises."""
        climb = run_rung(bench, rung, settings=settings)
        if climb.raised:
            return climb, None if climb.arm.error is not None and lacking(climb.arm.error) else []
        if not self.beyond(bench, climb.deviations):
            return climb, None
        again = run_rung(bench, rung, settings=settings, draws=range(len(bench.draws)))
        if again.raised:
            return climb, []
        found = self.beyond(bench, again.deviations)
        while found and measure_rounding(bench):
            found = self.beyond(bench, compared(bench, again.arms))
        return climb, found or None

    def mended_by(self, bench: Bench, rung: str, settings: Mapping[str, Any]) -> bool:
        """Whether the rung passes under these settings of the compiler."""
        try:
            return self.rung(bench, rung, settings)[1] is None
        except UsageError:  # this release has no such setting
            return False

    def bisect(self, bench: Bench, rung: str, failing: Sequence[Deviation]) -> Bisected:
        """Which node of the graphs brings the failure of this rung, on the data as they are.

        failing: what was beyond its limit there; empty for a rung that raises.
        """
        paths: dict[int, str] = {}

        def name(prepared: Prepared) -> None:
            paths.clear()
            if prepared.root is not None:
                paths.update((id(module), name) for name, module in prepared.root.named_modules())

        def fails(cut: Backend) -> bool:
            return self._outcome(bench, rung, failing, cut, name) == (FAILS if failing else RAISES)

        return first_failing_node(fails, backend("aot_eager" if rung == AOT_EAGER else "inductor"), paths)

    def passes_without(self, bench: Bench, rung: str, failing: Sequence[Deviation], module: str) -> bool:
        """Whether the rung runs to its end and passes where one module is left out of compilation."""

        def leave_out(prepared: Prepared) -> None:
            assert prepared.root is not None
            left = prepared.root.get_submodule(module)
            left.forward = torch.compiler.disable(left.forward)  # type: ignore[no-untyped-call]

        how = "aot_eager" if rung == AOT_EAGER else "inductor"
        return self._outcome(bench, rung, failing, how, leave_out) == PASSES

    def _outcome(
        self,
        bench: Bench,
        rung: str,
        failing: Sequence[Deviation],
        how: Backend | str,
        change: Callable[[Prepared], None],
    ) -> str:
        """What becomes of a failure under another backend, with a prepared copy changed first.

        failing: the tensors that are looked at; every one where it is empty.
        """
        names = {(d.kind, d.name, d.step) for d in failing}
        settings = {**bench.settings, **({EMULATE: True} if rung == EMULATED else {})}
        prepared = prepare(bench.subject, device=self.device)
        change(prepared)
        with configured(settings), measure_graphs():
            arm = run_plan(bench.plan, prepared, compiled=partial(_compiled, how))
        if arm.error is not None:
            return RAISES
        found = self.beyond(bench, compared(bench, [arm]))
        again = [d for d in found if not names or (d.kind, d.name, d.step) in names]
        return FAILS if again else PASSES


def _compiled(how: Backend | str, prepared: Prepared) -> list[Any]:
    return [torch.compile(block, backend=how) for block in prepared.blocks]
