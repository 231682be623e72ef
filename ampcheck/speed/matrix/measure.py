"""Workloads in every mode and precision: a workload's arms paired in one job, then each of them judged.

Arms much slower than eager float32, such as float16 on a CPU, would take nearly all of the time; they have a
measurement of their own.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.compiled.options import MODES
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Scalar, Verdict
from ampcheck.speed.clock import Clock, clock_of
from ampcheck.speed.compiling import compilations, many_compilations
from ampcheck.speed.fingerprint import fingerprint
from ampcheck.speed.interval import log_ratios, median_bounds, paired_ratio
from ampcheck.speed.matrix.accuracy import Judge
from ampcheck.speed.matrix.copies import require_room
from ampcheck.speed.matrix.stats import (
    DOES_NOT,
    EAGER,
    PAYS,
    SLOW,
    UNDECIDED,
    WRONG,
    Cell,
    MatrixStats,
    WorkloadStats,
)
from ampcheck.speed.matrix.workloads import SIZES, WORKLOADS, Workload, workload_of
from ampcheck.speed.memory import held_memory, peak_memory
from ampcheck.speed.paired import Step, measure_speed
from ampcheck.speed.startup.breakeven import BreakEven, calls_until, savings
from ampcheck.speed.stats import ArmTimes, SpeedStats
from ampcheck.speed.steps import PRECISIONS, Way, learns
from ampcheck.speed.verdict import EFFECT, Rule, aa_noise
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.copying import prepare
from ampcheck.torchtools.unsupported import cannot_run

MATRIX_MODES = (EAGER, "default", "reduce-overhead", "max-autotune")

BUDGET = 30.0
"""Seconds of timed blocks for one workload. Compilation and the judges come to that."""


def measure_matrix(
    workloads: Any = None,
    *,
    modes: Sequence[str] = MATRIX_MODES,
    precisions: Sequence[str] = tuple(PRECISIONS),
    device: str = "cpu",
    size: str = "small",
    budget: float = BUDGET,
    accuracy: bool = True,
    memory: bool = True,
    clock: Clock | None = None,
    progress: Progress = silent,
) -> MatrixStats:
    """Time each workload in each mode and precision beside eager float32, and judge its numbers.

    workloads: names of `WORKLOADS`, `Workload`s, subjects, or several of these; all built-in ones by default. budget:
    seconds of timed blocks for each workload. accuracy, memory: whether these are measured at all. progress: told
    before each stage: what begins, how many are done, how many there are. Dynamo is reset.

    Each arm, which is a mode in a precision, has a copy of the model, up to 16 in all, and all of a workload's lie on
    the device at once. The arms share the budget; those that take more than `SLOW` times as long as eager float32 have
    their share in a measurement of their own.

    A mode or precision that this machine lacks is a cell with a reason, one that raises a cell with the error. Raises
    `UsageError` for an unknown workload, mode, precision or size, for a device that is not there, and for copies that
    cannot lie on it.
    """
    made = [workload_of(one) for one in _several(workloads)]
    for what, asked, known in (("mode", modes, (EAGER, *MODES)), ("precision", precisions, tuple(PRECISIONS))):
        if isinstance(asked, str) or not asked:
            raise UsageError(f"{what}s is a sequence of names, of {', '.join(known)}; found {asked!r}")
        if unknown := [one for one in asked if one not in known]:
            raise UsageError(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
    if size not in SIZES:
        raise UsageError(f"there is no size {size!r}; there are {', '.join(SIZES)}")
    if not budget > 0:
        raise UsageError(f"budget is seconds of measurement for each workload, above 0; found {budget!r}")
    ways = [Way(mode, precision) for precision in dict.fromkeys(precisions) for mode in dict.fromkeys(modes)]
    ways = list(dict.fromkeys((Way(), *ways)))
    if len(ways) < 2:
        raise UsageError("a matrix compares with eager float32: ask for another mode or precision beside it")
    clock = clock or clock_of(device)
    for workload in made:
        require_room(workload, device=device, size=size, arms=sum(not lacks(way, device) for way in ways))
    comparisons = (len(ways) - 1) * len(made)
    total = len(made) * (len(ways) + 1 + (len(ways) if accuracy else 0))
    done = 0

    def told(stage: str) -> None:
        nonlocal done
        progress(stage, done, total)
        done += 1

    found = []
    for workload in made:
        room = _Room(workload, device, size, budget, comparisons, clock, memory, told)
        found.append(room.measure(ways, accuracy=accuracy))
    return MatrixStats(tuple(found))


def lacks(way: Way, device: str) -> str:
    """Why this way makes no sense on a device; "" where it does."""
    kind = torch.device(device).type
    if way.precision == "tf32" and kind != "cuda":
        return f"TF32 is a mode of NVIDIA's tensor cores, and the device is {kind}"
    if way.precision == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"TF32 needs an Ampere GPU or later; found {torch.cuda.get_device_name(device)}"
    if way.precision == "bfloat16" and kind == "cuda" and not torch.cuda.is_bf16_supported():
        return f"{torch.cuda.get_device_name(device)} has no bfloat16"
    if way.mode == "reduce-overhead" and kind != "cuda":
        return f"CUDA graphs are what this mode adds, and the device is {kind}: it is the code of the mode default"
    return ""


@dataclass(slots=True)
class _Arm:
    """One cell on its way."""

    way: Way
    cell: Cell
    step: Step | None = None
    first: float = 0.0
    typical: float = 0.0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.cell.name


@dataclass(slots=True)
class _Room:
    """Measures one workload."""

    workload: Workload
    device: str
    size: str
    budget: float
    comparisons: int
    clock: Clock
    memory: bool
    told: Callable[[str], None]

    def measure(self, ways: Sequence[Way], *, accuracy: bool) -> WorkloadStats:
        """All cells; the first way is eager float32."""
        name = self.workload.name
        with many_compilations(self.device), _caches_folder() as folder:
            arms = []
            for way in ways:
                self.told(f"{name}: {way} begins")
                arms.append(self._begun(way, folder))
            self.told(f"{name}: the arms in turn")
            stats = self._timed(arms)
            if not accuracy:
                return stats
            judge = self._judge()
            cells = []
            for arm, cell in zip(arms, stats.cells, strict=True):
                self.told(f"{name}: {arm.way} judged")
                arm.step = None  # the judges make copies of their own
                cells.append(cell)
                if not cell.reason:
                    with self._caches(arm.way, folder):
                        found = judge.of(arm.way.mode, arm.way.precision)
                    cells[-1] = _with_accuracy(cell, str(found.verdict), found.why, found.error)
        return replace(stats, cells=tuple(cells))

    def _begun(self, way: Way, folder: str) -> _Arm:
        """Build an arm and call it for the first time, with empty caches of its own."""
        arm = _Arm(way, Cell(way.mode, way.precision, reason=lacks(way, self.device)))
        if arm.cell.reason:
            return arm
        made_since = compilations()
        try:
            with self._caches(way, folder):
                step = self.workload.step(way, device=self.device, size=self.size)
                gc.collect()  # what an arm that failed has left is not freed while this one's memory is counted
                held = held_memory(self.device)  # all other arms, and this one's weights; nothing that it makes
                arm.first = self.clock.block(step, 1)
            self.clock.block(step, 2)  # the second call may compile once more, for gradients that are there now
            arm.typical = min(self.clock.block(step, 1) for _ in range(3))
            if self.memory:
                peak = peak_memory(step, device=self.device, held=held)
                arm.cell = replace(arm.cell, peak=peak.bytes)
        except BaseException as error:  # noqa: BLE001  # the workload's or the compiler's: the cell tells it
            lack = lacking(as_result(error))
            reason = cannot_run(lack) if lack else f"it raised {brief(error)}"
            arm.cell = replace(arm.cell, reason=reason, failed=not lack)
            return arm
        made = made_since()
        arm.cell = replace(arm.cell, graphs=made.graphs, breaks=made.breaks)
        if way.mode != EAGER and not made.graphs:
            arm.cell = replace(arm.cell, reason=f"it ran eager: {made.why}", failed=True)
            return arm
        arm.step = step
        return arm

    def _timed(self, arms: Sequence[_Arm]) -> WorkloadStats:
        """The arms that run, in turn; those that are much slower after the others."""
        running = [arm for arm in arms if arm.step is not None]
        stats = WorkloadStats(
            self.workload.name, tuple(arm.cell for arm in arms), device=self.device, size=self.size,
            fingerprint=fingerprint(self.device),
        )  # fmt: skip
        if arms[0].step is None:
            return _without(stats, f"eager float32, with which all are compared, does not run: {arms[0].cell.reason}")
        if len(running) < 2:
            return _without(stats, "nothing else ran that it could be compared with")
        made_since = compilations()
        for number, group in enumerate(rounds(running)):
            share = (len(group) - 1) / (len(running) - 1)
            try:
                stats = self._with_round(stats, group, share * self.budget, apart=number > 0)
            except UsageError as error:
                if not number:
                    return _without(stats, str(error))
                cells = {arm.name: replace(arm.cell, reason=str(error), failed=True) for arm in group[1:]}
                stats = replace(stats, cells=tuple(cells.get(cell.name, cell) for cell in stats.cells))
        return replace(stats, recompiled=made_since().graphs)

    def _with_round(self, stats: WorkloadStats, group: Sequence[_Arm], budget: float, *, apart: bool) -> WorkloadStats:
        """The figures with those of one paired measurement, whose first arm is eager float32."""
        times = measure_speed(
            {arm.name: arm.step for arm in group if arm.step is not None},
            subject=stats.workload, device=self.device, budget=budget, width=0.005, clock=self.clock,
        )  # fmt: skip
        timed = {arm.name: _cell(arm, times, self.comparisons, apart) for arm in group[apart:]}
        return replace(
            stats,
            cells=tuple(timed.get(cell.name, cell) for cell in stats.cells),
            noise=max([stats.noise, *(cell.noise for cell in timed.values())]),
            cycles=stats.cycles if apart else times.cycles,
            apart=times.cycles if apart else 0,
            spent=stats.spent + times.spent,
            conditions=_joined(stats.conditions, times.conditions),
        )

    def _caches(self, way: Way, folder: str) -> Any:
        if way.mode == EAGER:
            return nullcontext()
        return dynamo.own_caches(str(Path(folder, f"{way.mode} {way.precision}".replace(" ", "-"))))

    def _judge(self) -> Judge:
        subject, workload = self.workload.subject(self.size), self.workload
        trains = workload.trains if workload.trains is not None else learns(prepare(subject, device=self.device))
        scaled = bool(getattr(workload, "scaler", False))
        return Judge(subject, self.device, bool(trains), workload.optimizer, scaled)


def rounds(arms: Sequence[_Arm]) -> list[list[_Arm]]:
    """Which arms are timed in turn, in one measurement or two that each begin with eager float32, the first of `arms`.

    The second has the arms that are much slower, and with one of another precision all of that precision, since they
    are compared with one another as well.
    """
    first, *others = arms
    slow = {arm.name for arm in others if arm.typical > SLOW * first.typical}
    precisions = {arm.way.precision for arm in others if arm.name in slow} - {first.way.precision}
    apart = [arm for arm in others if arm.name in slow or arm.way.precision in precisions]
    quick = [arm for arm in others if arm not in apart]
    return [[first, *group] for group in (quick, apart) if group]


def verdict_of(reference: ArmTimes, twin: ArmTimes, arm: ArmTimes, comparisons: int) -> str:
    """Whether an arm is surely faster by more than the minimum effect, surely not, or neither.

    Sure is the exact interval, of which at most one in a hundred matrices has one that is wrong. A/A noise beyond the
    minimum effect comes off at both ends.
    """
    noise = max(1.0, (1 + aa_noise(log_ratios(reference, twin))) / (1 + EFFECT))
    bounds = median_bounds(log_ratios(reference, arm), Rule(comparisons=comparisons).confidence)
    low, high = (math.exp(bound) for bound in bounds)
    if low > (1 + EFFECT) * noise:
        return PAYS
    return DOES_NOT if high < (1 + EFFECT) / noise else UNDECIDED


def break_even_of(cost: float, eager: ArmTimes, arm: ArmTimes) -> BreakEven:
    """After how many calls `cost` seconds of compilation have paid; the interval is that of what a call saves."""
    saving, low, high = savings(eager, arm)
    return BreakEven(calls_until(cost, saving), calls_until(cost, high), calls_until(cost, low), cost, saving)


def _cell(arm: _Arm, times: SpeedStats, comparisons: int, apart: bool) -> Cell:
    own = times.arm(arm.name)
    noise = aa_noise(log_ratios(times.reference, times.twin))
    ratio = paired_ratio(times.reference, own)
    cell = replace(arm.cell, seconds=own.median, ratio=ratio, noise=noise, apart=apart)
    if arm.way != Way():
        cell = replace(cell, verdict=verdict_of(times.reference, times.twin, own, comparisons))
    if arm.way.mode == EAGER:
        return cell
    cell = replace(cell, compiling=max(arm.first - own.median, 0.0))
    eager = f"{EAGER}, {arm.way.precision}"
    if any(other.name == eager for other in times.arms):
        plain = times.arm(eager)
        even = break_even_of(cell.compiling or 0.0, plain, own)
        cell = replace(cell, gain=paired_ratio(plain, own), break_even=even)
    return cell


def _joined(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The lowest of the lowest and the highest of the highest."""
    found = {**one, **other}
    for name in one.keys() & other.keys():
        pair = [value for value in (one[name], other[name]) if isinstance(value, (int, float))]
        if len(pair) == 2:
            found[name] = max(pair) if name.endswith("highest") else min(pair)
    return found


def _with_accuracy(cell: Cell, accuracy: str, why: str, error: float | None) -> Cell:
    wrong = accuracy == str(Verdict.FAIL)
    verdict = WRONG if wrong and cell.verdict in (PAYS, UNDECIDED) else cell.verdict
    return replace(cell, accuracy=accuracy, why=why, error=error, verdict=verdict)


def _without(stats: WorkloadStats, reason: str) -> WorkloadStats:
    """No times at all, for one reason, in the cells that have none of their own."""
    return replace(stats, cells=tuple(replace(cell, reason=cell.reason or reason) for cell in stats.cells))


def _several(given: Any) -> list[Any]:
    if given is None:
        return list(WORKLOADS)
    if isinstance(given, (list, set, frozenset)) or (isinstance(given, tuple) and _all_known(given)):
        several = list(given)
        if not several:
            raise UsageError(f"no workload was asked for; there are {', '.join(WORKLOADS)}")
        return several
    return [given]


def _all_known(given: tuple[Any, ...]) -> bool:
    """Whether a tuple holds workloads; one that is `(module, args)` is a subject itself."""
    return all(isinstance(one, str) or hasattr(one, "name") for one in given)


def _caches_folder() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True)
