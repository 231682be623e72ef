"""Autocast and torch.compile together: outside or inside, in several modes, and what a start costs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ampcheck import demo
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.limits import Limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table, Verdict
from ampcheck.core.subject import Subject
from ampcheck.lab.expectations import Expectations, lacks, missing, synchronize
from ampcheck.lab.registry import check_of
from ampcheck.speed.compiling import Compiled as Made
from ampcheck.speed.compiling import compilations, many_compilations
from ampcheck.speed.interval import paired_ratio
from ampcheck.speed.judge import speed_run
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.paired import measure_speed
from ampcheck.speed.startup.judge import startup_run
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.stats import TWIN, SpeedStats
from ampcheck.speed.verdict import Rule, check_speed

CHECK = check_of("compiling")

DTYPE = torch.bfloat16
BUDGET, FULL_BUDGET = 6.0, 20.0
EAGER = "eager"

_Around: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class How:
    """A way to run the demo under autocast. options: of torch.compile; None is eager mode. inside: autocast is entered
    inside the compiled function."""

    name: str
    options: Mapping[str, Any] | None = None
    inside: bool = False


WAYS = (
    How(EAGER),
    How("compiled, autocast outside", {}),
    How("compiled, autocast inside", {}, inside=True),
    How("compiled, fullgraph", {"fullgraph": True}),
)
MORE = (
    How("compiled, dynamic shapes", {"dynamic": True}),
    How("compiled, max-autotune", {"mode": "max-autotune-no-cudagraphs"}),
)
"""With `--full` alone: compilation takes minutes."""

GRAPHED = (How("compiled, reduce-overhead", {"mode": "reduce-overhead"}),)
"""With `--full` on CUDA, where it replays CUDA graphs; elsewhere it is the default mode."""


@dataclass(frozen=True, slots=True)
class WayStats:
    """One way. first: seconds of the first step. loss, gradient: relative errors against float64 on the same weights
    and data, of all gradients together. raised: why it did not run; lacking: since this machine has no tool for it."""

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
    """ways: the first is eager mode. speeds: paired, against it. startup: the run of a start in fresh processes."""

    device: str
    ways: tuple[WayStats, ...]
    speeds: SpeedStats | None
    startup: Run | None
    untold: str = ""


def ways_on(device: str, *, full: bool = False) -> tuple[How, ...]:
    """What is compared on a device."""
    if not full:
        return WAYS
    return (*WAYS, *MORE, *(GRAPHED if torch.device(device).type == "cuda" else ()))


class Arm:
    """A copy of the demo run in one way; `step` is forward and backward."""

    def __init__(self, how: How, model: nn.Module, data: tuple[Tensor, Tensor], device: str) -> None:
        self.model = copy.deepcopy(model)
        self._data = data
        autocast = _autocast(device)
        self._around: _Around = nullcontext if how.inside else autocast
        inside: _Around = autocast if how.inside else nullcontext
        self._replays = how in GRAPHED

        def run(*args: Tensor) -> Any:
            with inside():
                return self.model(*args)

        # Dynamo keeps what it compiled with the code of a function: arms that share theirs would share a graph.
        own: Callable[..., Any] = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        self._run = own if how.options is None else torch.compile(own, **how.options)

    def step(self) -> Tensor:
        """The loss; gradients are new."""
        self.model.zero_grad()
        if self._replays:  # what the step before gave may be overwritten
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self._around():
            loss: Tensor = self._run(*self._data)[1]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def gradients(self) -> Tensor:
        """All of them, float64, on the CPU."""
        held = [p.grad.cpu().double().flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat(held)


def _autocast(device: str) -> _Around:
    return lambda: torch.autocast(torch.device(device).type, DTYPE)


def measure_compiling(
    device: str = "cpu",
    ways: tuple[How, ...] = WAYS,
    *,
    model: nn.Module | None = None,
    budget: float = BUDGET,
    startup: bool = True,
    progress: Progress = silent,
) -> CompilingStats:
    """Run the demo forward and backward in each way, time all in turn, and start it in fresh processes.

    model: a `CharTransformer` of another size. startup: whether processes are started at all.
    """
    total = len(ways) + 6
    subject = demo.subject()
    given = subject.model if model is None else model
    characters, targets = subject.calls[0].args
    data = (characters.to(device), targets.to(device))
    model, exact = given.to(device), copy.deepcopy(given).cpu().double()
    wide: Tensor = exact(characters, targets.cpu())[1]  # the demo itself computes its loss in float32
    wide.backward()  # type: ignore[no-untyped-call]
    gradients = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    arms: dict[str, Arm] = {}
    found = []
    with many_compilations(device):
        for number, how in enumerate(ways):
            progress(how.name, number, total)
            made = compilations()
            synchronize(device)
            begin = time.perf_counter()
            try:
                arm = Arm(how, model, data, device)
                loss = arm.step()
                synchronize(device)
            except Exception as error:  # noqa: BLE001  # told below: what lacks is skipped, what raises fails
                found.append(WayStats(how.name, raised=brief(error), lacking=missing(error)))
                continue
            first = time.perf_counter() - begin
            counted = made() if how.options is not None else Made(0, 0, "")
            arms[how.name] = arm
            found.append(
                WayStats(
                    how.name,
                    first,
                    counted.graphs,
                    counted.breaks,
                    abs(loss.item() - wide.item()) / abs(wide.item()),
                    float((arm.gradients() - gradients).norm() / gradients.norm()),
                )
            )
        progress("step times in turn", len(ways), total)
        speeds = None
        if EAGER in arms and len(arms) > 1:
            steps = {name: arm.step for name, arm in arms.items()}
            speeds = measure_speed(steps, subject="a step of the demo", device=device, budget=budget, width=0.01)
    run, untold = (None, "it was not asked for") if not startup else _startup(device, len(ways) + 1, total, progress)
    return CompilingStats(device, tuple(found), speeds, run, untold)


def one_layer() -> Subject:
    """What is started in fresh processes: the demo with one layer, which compiles in half the time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = demo.CharTransformer(layers=1)
    return Subject((model, demo.batch(8, 64)), name="the demo with one layer", loss=lambda output: output[1])


def _startup(device: str, done: int, total: int, progress: Progress) -> tuple[Run | None, str]:
    """Cold, warm and from artifacts, each in a process of its own; the run, or why there is none."""

    def told_further(stage: str, number: int, of: int) -> None:
        progress(stage, done + number * (total - done) // max(of, 1), total)

    try:
        stats = measure_startup(
            f"{__name__}:one_layer",
            SpeedOptions(precision=str(DTYPE).removeprefix("torch."), regional=False, warm=1, budget=0.5),
            device=device,
            progress=told_further,
        )
    except UsageError as error:
        return None, str(error)
    return startup_run(stats), ""


def check_compiling(stats: CompilingStats) -> list[Finding]:
    """One graph without a break; no worse than eager mode; what is faster; caches that are used."""
    lab = Expectations(CHECK, stats.device)
    eager = next((way for way in stats.ways if way.name == EAGER and not way.raised), None)
    for way in stats.ways:
        if way.lacking:
            lab.skip(f"{way.name} was not measured: {way.raised}")
        elif way.raised:
            lab.expect(f"{way.name} runs", f"it raised {way.raised}", False, seen=0)
        elif way is not eager:
            found = f"{way.graphs} {'graph' if way.graphs == 1 else 'graphs'}, {way.breaks} breaks"
            whole = way.graphs == 1 and not way.breaks
            lab.expect(f"{way.name}: one graph without a break", found, whole, seen=way.graphs)
            if eager is not None:
                lab.findings.append(_as_right(stats, way, eager))
    if stats.speeds is not None:
        for one in check_speed(stats.speeds, Rule(1.0, comparisons=len(stats.speeds.compared), false_alarms=0.05)):
            verdict = Verdict.WARN if one.verdict is Verdict.FAIL else one.verdict
            lab.findings.append(replace(one, check=CHECK.slug, subject=stats.device, verdict=verdict, hint=""))
    if stats.startup is not None:
        lab.findings += [replace(one, check=CHECK.slug, subject=stats.device) for one in stats.startup.findings]
    else:
        lab.skip(f"starts were not measured: {stats.untold}")
    return lab.findings


def _as_right(stats: CompilingStats, way: WayStats, eager: WayStats) -> Finding:
    """Two errors of the same kind lie within `precision` times of their usual size each, as for `compiled-gradient`."""
    factor = Limits().precision ** 2
    expected = (
        f"{way.name}: gradients at most {factor:g} times as far from float64 as those of eager mode, "
        f"{eager.gradient:.2g}"
    )
    limit = factor * eager.gradient
    return Expectations(CHECK, stats.device).expect(
        expected,
        f"{way.gradient:.2g}",
        way.gradient <= limit,
        seen=2,
        warns=True,
        observed=way.gradient,
        limit=limit,
        hint="torch._functorch.config.backward_pass_autocast = 'off' (pytorch/pytorch#153044)",
    )


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """A table of ways side by side, their times, and the tables of starts."""
    if why := lacks("bfloat16", device):
        raise UsageError(why)
    stats = measure_compiling(
        device, ways_on(device, full=full), budget=FULL_BUDGET if full else BUDGET, progress=progress
    )
    tables, charts = [_ways(stats)], []
    if stats.startup is not None:
        tables += [replace(table, check=CHECK.slug) for table in stats.startup.tables]
    if stats.speeds is not None:
        note = f"Dot: median; bar: 5th to 95th percentile. {TWIN}: {EAGER} timed a second time in each turn."
        charts += [replace(chart, check=CHECK.slug, note=note) for chart in speed_run(stats.speeds).charts]
    coverage = Coverage(
        {"ways to compile": sum(not way.raised for way in stats.ways)},
        {f"{way.name}: {way.raised}": 1 for way in stats.ways if way.raised},
    )
    return Run(
        findings=tuple(check_compiling(stats)),
        coverage=coverage + stats.startup.coverage if stats.startup is not None else coverage,
        tables=tuple(tables),
        charts=tuple(charts),
    )


def _ways(stats: CompilingStats) -> Table:
    return Table(
        "The demo under autocast to bfloat16, forward and backward",
        (
            "way", "graphs", "breaks", "error of the loss", "error of gradients", "ms a step", "times as fast",
            "95 % interval", "first step, s",
        ),
        list(_rows(stats)),
        check=CHECK.slug,
        note="Errors are relative, against float64 on the same weights and data. Times as fast as eager mode under the "
        "same autocast: paired, all arms in turn. First step: compiled anew, or from PyTorch's caches.",
    )  # fmt: skip


def _rows(stats: CompilingStats) -> Iterator[tuple[Scalar, ...]]:
    for way in stats.ways:
        if way.raised:
            yield (f"{way.name}: {way.raised}", *[None] * 8)
            continue
        row: list[Scalar] = [way.name, way.graphs, way.breaks, f"{way.loss:.2g}", f"{way.gradient:.2g}"]
        if stats.speeds is not None:
            arm = stats.speeds.arm(way.name)
            ratio = paired_ratio(stats.speeds.reference, arm)
            interval = f"{ratio.low:.3g} to {ratio.high:.3g}" if way.name != EAGER else ""
            row += [f"{1000 * arm.median:.3g}", f"{ratio.median:.3g}", interval]
        else:
            row += [None, None, None]
        yield (*row, f"{way.first:.3g}")
