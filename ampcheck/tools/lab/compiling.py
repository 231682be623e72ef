"""Autocast and torch.compile together: outside or inside, in several modes, and the cost of a start."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampcheck import SpeedOptions, demo
from ampcheck.autocast.missing import lacking
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.limits import Limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table
from ampcheck.core.subject import Subject
from ampcheck.numerics.compiled import compilations
from ampcheck.records.speed import TWIN, Rule, SpeedStats
from ampcheck.speed.clock import clock_of
from ampcheck.speed.compiling import many_compilations
from ampcheck.speed.judge import speed_run
from ampcheck.speed.paired import measure_speed
from ampcheck.speed.startup.judge import startup_run
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.verdict import check_speed, paired_ratio
from ampcheck.tools.lab.lab import Expectations, lacks, run_of

DTYPE = torch.bfloat16
BUDGET, FULL_BUDGET = 6.0, 20.0
EAGER = "eager"


class Mode(NamedTuple):
    """A way to run the demo under autocast. options: of torch.compile; None is eager mode. inside: autocast is entered
    inside the compiled function."""

    name: str
    options: Mapping[str, Any] | None = None
    inside: bool = False


MODES = (
    Mode(EAGER),
    Mode("compiled, autocast outside", {}),
    Mode("compiled, autocast inside", {}, inside=True),
    Mode("compiled, fullgraph", {"fullgraph": True}),
)
FULL_MODES = (
    *MODES,
    Mode("compiled, dynamic shapes", {"dynamic": True}),
    Mode("compiled, max-autotune", {"mode": "max-autotune-no-cudagraphs"}),
)
"""With `--full`: compilation takes minutes."""

CUDA_GRAPHS = Mode("compiled, reduce-overhead", {"mode": "reduce-overhead"})
"""With `--full` on CUDA, where it replays CUDA graphs; elsewhere it is the default mode."""


@dataclass(frozen=True, slots=True)
class ModeStats:
    """One mode. first: seconds of the first step. loss, gradient: relative errors against float64 on the same weights
    and data, of all gradients together. raised: why it did not run; lacking: because this machine lacks a tool."""

    name: str
    first: float = math.nan
    graphs: int = 0
    breaks: int = 0
    loss: float = math.nan
    gradient: float = math.nan
    raised: str = ""
    lacking: bool = False


@dataclass(frozen=True, slots=True)
class CompilingStats:
    """modes: the first is eager mode. speeds: paired, against it. startup: the run of starts in fresh processes, or why
    there is none."""

    device: str
    modes: tuple[ModeStats, ...]
    speeds: SpeedStats | None
    startup: Run | str


def modes_on(device: str, *, full: bool = False) -> tuple[Mode, ...]:
    """The modes that are compared on a device."""
    if not full:
        return MODES
    return (*FULL_MODES, CUDA_GRAPHS) if torch.device(device).type == "cuda" else FULL_MODES


def _arm(
    mode: Mode, model: nn.Module, data: tuple[Tensor, Tensor], device: str
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A copy of the demo, and its step in one mode: forward and backward, with new gradients; returns the loss."""
    model = copy.deepcopy(model)
    contexts: list[Callable[[], AbstractContextManager[Any]]]
    contexts = [nullcontext, partial(torch.autocast, torch.device(device).type, DTYPE)]
    outside, inside = contexts if mode.inside else reversed(contexts)

    def forward(*args: Tensor) -> Any:
        with inside():
            return model(*args)

    # Dynamo caches graphs by the code of a function: arms with common code would share a graph.
    run: Callable[..., Any]
    run = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    if mode.options is not None:
        run = torch.compile(run, **mode.options)

    def step() -> Tensor:
        model.zero_grad()
        if mode is CUDA_GRAPHS:  # outputs of the step before may be overwritten
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with outside():
            loss: Tensor = run(*data)[1]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return model, step


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.cpu().double().flatten() for p in model.parameters() if p.grad is not None])


def measure_compiling(
    device: str = "cpu",
    modes: tuple[Mode, ...] = MODES,
    *,
    model: nn.Module | None = None,
    budget: float = BUDGET,
    startup: bool = True,
    progress: Progress = silent,
) -> CompilingStats:
    """Run the demo forward and backward in each mode, time all in turn, and start it in fresh processes.

    model: a `CharTransformer` of another size. startup: whether processes are started at all.
    """
    total = len(modes) + 6
    subject = demo.subject()
    model = subject.model if model is None else model
    characters, targets = subject.calls[0].args
    data = (characters.to(device), targets.to(device))
    exact, model = copy.deepcopy(model).cpu().double(), model.to(device)
    reference: Tensor = exact(characters, targets.cpu())[1]  # the demo itself computes its loss in float32
    reference.backward()  # type: ignore[no-untyped-call]
    gradients = _gradients(exact)
    steps: dict[str, Callable[[], Tensor]] = {}
    stats, clock = [], clock_of(device)
    with many_compilations(device):
        for number, mode in enumerate(modes):
            progress(mode.name, number, total)
            compiled = compilations()
            try:
                arm, step = _arm(mode, model, data, device)
                first, loss = clock.block(step, 1), step()
            except Exception as error:  # noqa: BLE001  # what this machine lacks is skipped, any other error fails
                lacks_tool = bool(lacking(error, kernels=True))
                stats.append(ModeStats(mode.name, raised=brief(error), lacking=lacks_tool))
                continue
            steps[mode.name] = step
            counts = (compiled().count, sum(compiled().unseen.values())) if mode.options is not None else (0, 0)
            loss_error = abs(loss.item() - reference.item()) / abs(reference.item())
            gradient_error = float((_gradients(arm) - gradients).norm() / gradients.norm())
            stats.append(ModeStats(mode.name, first, *counts, loss_error, gradient_error))
        progress("step times in turn", len(modes), total)
        speeds = None
        if EAGER in steps and len(steps) > 1:
            speeds = measure_speed(steps, subject="a step of the demo", device=device, budget=budget, width=0.01)
    starts = _startup(device, len(modes) + 1, total, progress) if startup else "not requested"
    return CompilingStats(device, tuple(stats), speeds, starts)


def one_layer() -> Subject:
    """The demo with one layer, which compiles in half the time: started in fresh processes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = demo.CharTransformer(layers=1)
    return Subject((model, demo.batch(8, 64)), name="the demo with one layer", loss=lambda output: output[1])


def _startup(device: str, done: int, total: int, progress: Progress) -> Run | str:
    """Cold, warm and from artifacts, each in a process of its own; the run, or why there is none."""

    def overall(stage: str, number: int, of: int) -> None:
        progress(stage, done + number * (total - done) // max(of, 1), total)

    precision = str(DTYPE).removeprefix("torch.")
    options = SpeedOptions(precision=precision, regional=False, warm=1, budget=0.5)
    try:
        return startup_run(measure_startup(f"{__name__}:one_layer", options, device=device, progress=overall))
    except UsageError as error:
        return str(error)


def check_compiling(stats: CompilingStats) -> list[Finding]:
    """One graph without a break; errors like those of eager mode; speed; starts that use the caches."""
    lab = Expectations("compiling", stats.device)
    eager = next((mode for mode in stats.modes if mode.name == EAGER and not mode.raised), None)
    factor = Limits().precision ** 2  # of two errors of the same kind, as for `compiled-gradient`
    for mode in stats.modes:
        if mode.lacking:
            lab.skip(f"{mode.name} was not measured: {mode.raised}")
        elif mode.raised:
            lab.expect(f"{mode.name} runs", f"it raised {mode.raised}", False, seen=0)
        elif mode is not eager:
            outcome = f"{mode.graphs} {'graph' if mode.graphs == 1 else 'graphs'}, {mode.breaks} breaks"
            whole = mode.graphs == 1 and not mode.breaks
            lab.expect(f"{mode.name}: one graph without a break", outcome, whole, seen=mode.graphs)
            if eager is not None:
                expected = (
                    f"{mode.name}: gradients at most {factor:g} times as far from float64 as those of eager mode, "
                    f"{eager.gradient:.2g}"
                )
                hint = "torch._functorch.config.backward_pass_autocast = 'off' (pytorch/pytorch#153044)"
                lab.at_most(expected, mode.gradient, factor * eager.gradient, seen=2, warns=True, hint=hint)
    if stats.speeds is not None:
        rule = Rule(1.0, comparisons=len(stats.speeds.compared), false_alarms=0.05)
        lab.adopt(check_speed(stats.speeds, rule), warns=True)
    if isinstance(stats.startup, Run):
        lab.adopt(stats.startup.findings)
    else:
        lab.skip(f"starts were not measured: {stats.startup}")
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """A table of modes side by side, their times, and the tables of starts."""
    if reason := lacks("bfloat16", device):
        raise UsageError(reason)
    budget = FULL_BUDGET if full else BUDGET
    stats = measure_compiling(device, modes_on(device, full=full), budget=budget, progress=progress)
    tables, charts = [modes_table(stats)], []
    if stats.speeds is not None:
        note = f"Dot: median; bar: 5th to 95th percentile. {TWIN}: {EAGER} timed a second time in each turn."
        charts += [replace(chart, note=note) for chart in speed_run(stats.speeds).charts]
    broken = [f"{mode.name}: {mode.raised}" for mode in stats.modes if mode.raised and not mode.lacking]
    tables += stats.startup.tables if isinstance(stats.startup, Run) else ()
    seen = {"modes of compilation": sum(not mode.raised for mode in stats.modes)}
    run = run_of(check_compiling(stats), seen, tables=tables, charts=charts, unseen=broken)
    startup = stats.startup.coverage if isinstance(stats.startup, Run) else Coverage({})
    return replace(run, coverage=run.coverage + startup)


def modes_table(stats: CompilingStats) -> Table:
    """Graphs, errors and times of each mode."""
    rows: list[tuple[Scalar, ...]] = []
    for mode in stats.modes:
        if mode.raised:
            rows.append((f"{mode.name}: {mode.raised}", *[None] * 8))
            continue
        times: tuple[str | None, ...] = (None, None, None)
        if stats.speeds is not None:
            arm = stats.speeds.arm(mode.name)
            ratio = paired_ratio(stats.speeds.reference, arm)
            interval = f"{ratio.low:.3g} to {ratio.high:.3g}" if mode.name != EAGER else ""
            times = (f"{1000 * arm.median:.3g}", f"{ratio.median:.3g}", interval)
        errors = (f"{mode.loss:.2g}", f"{mode.gradient:.2g}")
        rows.append((mode.name, mode.graphs, mode.breaks, *errors, *times, f"{mode.first:.3g}"))
    errors_and_times = ("error of the loss", "error of gradients", "ms a step", "times as fast", "95 % interval")
    note = (
        "Errors are relative, against float64 on the same weights and data. Times as fast as eager mode under the same "
        "autocast: paired, all arms in turn. First step: with compilation, or from PyTorch's caches."
    )
    columns = ("mode", "graphs", "breaks", *errors_and_times, "first step, s")
    return Table("The demo under autocast to bfloat16, forward and backward", columns, rows, note=note)
