"""A subject in every mode and precision: the arms are timed in turn in one job, then each is judged.

Arms much slower than eager float32, such as float16 on a CPU, would take nearly all of the time; they have a
measurement of their own.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.compiled.options import MODES
from ampcheck.core.arguments import parse_names, parse_number
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Scalar, Verdict
from ampcheck.core.text import cannot_run
from ampcheck.numerics.compiled import compilations
from ampcheck.records.matrix import DOES_NOT, PAYS, SLOW, UNDECIDED, WRONG, Cell, MatrixStats
from ampcheck.records.speed import EFFECT, ArmTimes, Rule, SpeedStats
from ampcheck.records.threads import Threads
from ampcheck.speed.clock import Clock, clock_of
from ampcheck.speed.compiling import many_compilations
from ampcheck.speed.matrix.accuracy import Judge
from ampcheck.speed.matrix.stats import Workload, workload_of
from ampcheck.speed.memory import allocated_memory, available_memory, peak_memory
from ampcheck.speed.paired import Step, fingerprint, measure_speed
from ampcheck.speed.startup.stats import break_even
from ampcheck.speed.steps import EAGER, PRECISIONS, StepConfig, learns
from ampcheck.speed.threads import fit_threads
from ampcheck.speed.verdict import aa_noise, log_ratios, median_bounds, paired_ratio
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.copying import modules_of, prepare
from ampcheck.torchtools.restore import restoring

MATRIX_MODES = (EAGER, "default", "reduce-overhead", "max-autotune")

BUDGET = 30.0
"""Seconds of timed blocks, in addition to compilation and the judgement of numbers."""


@restoring
def measure_matrix(
    subject: object,
    *,
    modes: Iterable[str] = MATRIX_MODES,
    precisions: Iterable[str] = tuple(PRECISIONS),
    device: str = "cpu",
    budget: float = BUDGET,
    accuracy: bool = True,
    memory: bool = True,
    clock: Clock | None = None,
    caches: Path | None = None,
    progress: Progress = silent,
) -> MatrixStats:
    """Time a subject in each mode and precision, compared with eager float32, and judge its numbers.

    subject: or a `Workload`. budget: seconds of timed blocks. accuracy, memory: whether these are measured at all.
    caches: an empty folder that keeps the compiled code, of each arm in `cache_of`. Dynamo is reset.

    Each arm, which is a mode in a precision, has a copy of the model, up to 16 in all, which are on the device at once.
    A mode or precision that this machine lacks is a cell with a reason, one that raises a cell with the error. Raises
    `UsageError` for an unknown mode or precision, a device that is not there, and copies that do not fit.
    """
    workload = workload_of(subject)
    known = parse_names(modes, "modes", (EAGER, *MODES)), parse_names(precisions, "precisions", PRECISIONS)
    parse_number(budget, "budget")
    configs = [StepConfig(mode, precision) for precision in known[1] for mode in known[0]]
    configs = list(dict.fromkeys((StepConfig(), *configs)))
    if len(configs) < 2:
        raise UsageError("a matrix compares with eager float32: name another mode or precision")
    clock = clock or clock_of(device)
    _require_memory(workload, device, sum(not lacks(config, device) for config in configs))
    stages, total = count(), len(configs) * (1 + accuracy) + 1

    def report(stage: str) -> None:
        progress(stage, next(stages), total)

    measurement = _Measurement(workload, device, budget, len(configs) - 1, clock, memory, report)
    if caches is not None:
        return measurement.measure(configs, accuracy, caches)
    with tempfile.TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as folder:
        return measurement.measure(configs, accuracy, Path(folder))


def cache_of(config: StepConfig) -> str:
    """The name of the folder with the compiled code of an arm."""
    return f"{config.mode} {config.precision}".replace(" ", "-")


def lacks(config: StepConfig, device: str) -> str:
    """Why this configuration is not measured on a device; "" where it is."""
    kind = torch.device(device).type
    if config.precision == "tf32" and kind != "cuda":
        return f"TF32 is a mode of NVIDIA's tensor cores, and the device is {kind}"
    if config.precision == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"TF32 needs an Ampere GPU or later; found {torch.cuda.get_device_name(device)}"
    if config.precision == "bfloat16" and kind == "cuda" and not torch.cuda.is_bf16_supported():
        return f"{torch.cuda.get_device_name(device)} has no bfloat16"
    if config.mode == "reduce-overhead" and kind != "cuda":
        return f"CUDA graphs are what this mode adds, and the device is {kind}: it is the code of the mode default"
    return ""


def copy_bytes(workload: Workload) -> int:
    """Bytes of the parameters and buffers of one copy, shared ones counted once; 0 where there is no model."""
    try:
        modules = modules_of(workload.make().model)
    except UsageError:
        raise
    except BaseException as error:  # noqa: BLE001  # the workload's own: its cells report it
        as_result(error)
        return 0
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def _require_memory(workload: Workload, device: str, arms: int) -> None:
    """Raise `UsageError` where the parameters and buffers of all copies do not fit on the device."""
    size, free = copy_bytes(workload), available_memory(device)
    if free is not None and arms * size > free:
        raise UsageError(
            f"each arm of a matrix has a copy of the model, and all must fit on {device} at once; {arms} copies of "
            f"{workload.name} need {arms * size / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are available: measure "
            "fewer at a time with --mode and --precision (modes and precisions of measure_matrix)"
        )


@dataclass(slots=True)
class _Arm:
    config: StepConfig
    cell: Cell
    step: Step | None = None
    first: float = 0.0
    typical: float = 0.0

    def note(self, **fields: Any) -> None:
        """Change fields of its cell."""
        self.cell = replace(self.cell, **fields)


@dataclass(slots=True)
class _Measurement:
    workload: Workload
    device: str
    budget: float
    comparisons: int
    clock: Clock
    memory: bool
    report: Callable[[str], None]
    threads: Threads | None = None

    def measure(self, configs: Sequence[StepConfig], accuracy: bool, caches: Path) -> MatrixStats:
        """All cells; the first configuration is eager float32. caches: a folder for the compiled code."""
        with many_compilations(self.device):
            arms = []
            for config in configs:
                self.report(f"{config} begins")
                arms.append(self._build(config, caches))
                if len(arms) == 1 and arms[0].step is not None:  # compiled code is for a number of threads
                    self.threads = fit_threads(arms[0].step, self.clock)
                    arms[0].typical = self._typical(arms[0].step)
            self.report("the arms in turn")
            stats = self._time(arms)
            judge = self._judge() if accuracy else None
            for arm in arms if judge is not None else ():
                self.report(f"{arm.config} judged")
                arm.step = None  # frees its copy: the judge makes copies of its own
                if judge is None or arm.cell.reason:
                    continue
                with _own_caches(arm.config, caches):
                    judged = judge.of(arm.config.mode, arm.config.precision)
                arm.note(accuracy=str(judged.verdict), why=judged.why, error=judged.error)
                if judged.verdict is Verdict.FAIL and arm.cell.verdict in (PAYS, UNDECIDED):
                    arm.note(verdict=WRONG)
        return replace(stats, cells=tuple(arm.cell for arm in arms))

    def _build(self, config: StepConfig, caches: Path) -> _Arm:
        """Build an arm and call it for the first time, with empty caches of its own."""
        arm = _Arm(config, Cell(config.mode, config.precision, reason=lacks(config, self.device)))
        if arm.cell.reason:
            return arm
        compiled_since = compilations()
        try:
            with _own_caches(config, caches):
                step = self.workload.step(config, self.device)
                gc.collect()  # of an arm that failed: not to be freed while this one's memory is counted
                before = allocated_memory(self.device)  # all other arms, and this one's weights
                arm.first = self.clock.block(step, 1)
            self.clock.block(step, 2)  # the second call may compile once more, for gradients that exist now
            arm.typical = self._typical(step)
            if self.memory:
                arm.note(peak=peak_memory(step, device=self.device, before=before).bytes)
        except BaseException as error:  # noqa: BLE001  # the workload's or the compiler's: the cell reports it
            lack = lacking(as_result(error))
            arm.note(reason=cannot_run(lack) if lack else f"it raised {brief(error)}", failed=not lack)
            return arm
        compiled = compiled_since()
        arm.note(graphs=compiled.count, breaks=sum(compiled.unseen.values()))
        if config.mode != EAGER and not compiled.count:
            arm.note(reason=f"it ran eager: {compiled.why_none}", failed=True)
        else:
            arm.step = step
        return arm

    def _typical(self, step: Step) -> float:
        return min(self.clock.block(step, 1) for _ in range(3))

    def _time(self, arms: Sequence[_Arm]) -> MatrixStats:
        """Time the arms that run, in turn; those that are much slower after the others."""
        running = [arm for arm in arms if arm.step is not None]
        measured: list[SpeedStats] = []
        reason = "nothing else ran that it could be compared with" if len(running) < 2 else ""
        if arms[0].step is None:
            reason = f"eager float32, with which all are compared, does not run: {arms[0].cell.reason}"
        compiled_since = compilations()
        for apart, group in enumerate(() if reason else _rounds(running)):
            share = (len(group) - 1) / (len(running) - 1)
            steps = {arm.cell.name: arm.step for arm in group if arm.step is not None}
            try:
                times = measure_speed(
                    steps,
                    subject=self.workload.name,
                    device=self.device,
                    budget=share * self.budget,
                    clock=self.clock,
                    threads=self.threads,
                )
            except UsageError as error:
                if not apart:
                    reason = str(error)
                    break
                for arm in group[1:]:
                    arm.note(reason=str(error), failed=True)
                continue
            measured.append(times)
            for arm in group[apart:]:
                _note_times(arm, times, self.comparisons, apart=bool(apart))
        for arm in arms if reason else ():
            arm.note(reason=arm.cell.reason or reason)
        return MatrixStats(
            self.workload.name,
            (),
            self.device,
            self.workload.size,
            noise=max((arm.cell.noise for arm in arms), default=0.0),
            cycles=measured[0].cycles if measured else 0,
            apart=measured[1].cycles if len(measured) > 1 else 0,
            spent=sum(times.spent for times in measured),
            recompiled=compiled_since().count if measured else 0,
            fingerprint=fingerprint(self.device),
            conditions=_joined([times.conditions for times in measured]),
            threads=measured[0].threads if measured else self.threads,
        )

    def _judge(self) -> Judge:
        workload, subject = self.workload, self.workload.make()
        trains = workload.trains if workload.trains is not None else learns(prepare(subject, device=self.device))
        return Judge(subject, self.device, trains, workload.optimizer, workload.scaler)


def _rounds(arms: Sequence[_Arm]) -> list[list[_Arm]]:
    """Arms to be timed in turn, in one measurement or two that each begin with eager float32, the first of `arms`.

    The second has the arms that are much slower, and with one of another precision all of that precision, since they
    are compared with one another as well.
    """
    first, *others = arms
    slow = [arm for arm in others if arm.typical > SLOW * first.typical]
    precisions = {arm.config.precision for arm in slow} - {first.config.precision}
    apart = [arm for arm in others if arm in slow or arm.config.precision in precisions]
    quick = [arm for arm in others if arm not in apart]
    return [[first, *group] for group in (quick, apart) if group]


def verdict_of(reference: ArmTimes, twin: ArmTimes, arm: ArmTimes, comparisons: int) -> str:
    """Return whether an arm is surely faster by more than the minimum effect, surely not, or neither.

    Sure is the exact interval, of which at most one in a hundred matrices has one that is wrong. A/A noise beyond the
    minimum effect is subtracted at both ends.
    """
    noise = max(1.0, (1 + aa_noise(log_ratios(reference, twin))) / (1 + EFFECT))
    bounds = median_bounds(log_ratios(reference, arm), Rule(comparisons=comparisons).confidence)
    low, high = (math.exp(bound) for bound in bounds)
    if low > (1 + EFFECT) * noise:
        return PAYS
    return DOES_NOT if high < (1 + EFFECT) / noise else UNDECIDED


def _note_times(arm: _Arm, times: SpeedStats, comparisons: int, *, apart: bool) -> None:
    own, reference = times.arm(arm.cell.name), times.reference
    noise = aa_noise(log_ratios(reference, times.twin))
    arm.note(seconds=own.median, ratio=paired_ratio(reference, own), noise=noise, apart=apart)
    if arm.config != StepConfig():
        arm.note(verdict=verdict_of(reference, times.twin, own, comparisons))
    if arm.config.mode == EAGER:
        return
    cost = max(arm.first - own.median, 0.0)
    arm.note(compiling=cost)
    eager = next((other for other in times.arms if other.name == f"{EAGER}, {arm.config.precision}"), None)
    if eager is not None:
        paid = break_even(cost, eager, own, lowest=cost, highest=cost)
        arm.note(gain=paired_ratio(eager, own), break_even=paid)


def _joined(conditions: Sequence[Mapping[str, Any]]) -> dict[str, Scalar]:
    """The lowest of the lowest and the highest of the highest."""
    names = dict.fromkeys(name for several in conditions for name in several)
    return {
        name: (max if name.endswith("highest") else min)(each[name] for each in conditions if name in each)
        for name in names
    }


def _own_caches(config: StepConfig, folder: Path) -> AbstractContextManager[object]:
    return nullcontext() if config.mode == EAGER else dynamo.own_caches(str(folder / cache_of(config)))
