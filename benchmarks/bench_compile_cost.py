"""What compilation costs: full against regional, cold against warm against artifacts, fixed against varying shapes.

    python benchmarks/bench_compile_cost.py [SUBJECT ...] [--device cuda] [--size large] [--json PATH]

Each start is a fresh process with cache folders of its own. Steady states of eager, full and regional are paired in
one job. Evidence is written after each subject. What it holds already of the same size, options and machine is not
measured again, unless it is named; rows of others are not changed. The machine should be quiet.
`bench_matrix.py` compares with what is commonly reported.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _evidence import Row, Rows, grouped, is_current, options_of, read_rows, write_rows
from bench_matrix import CHEAPER, EVIDENCE, GAIN, KEPT, NOTHING, rows, slug, table_rows
from speed_subjects import SIZES, sized

from ampcheck.compiled.graph.judge import measure_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.run import Table
from ampcheck.records.speed import EFFECT, SpeedStats
from ampcheck.records.startup import COLD, REGIONAL
from ampcheck.speed.clock import WallClock
from ampcheck.speed.compiling import many_compilations
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.paired import fingerprint, measure_speed
from ampcheck.speed.startup.judge import startup_run
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.steps import StepConfig, step_of
from ampcheck.speed.verdict import paired_ratio


class ProcessorClock(WallClock):
    """Seconds of a processor, which others on the machine lengthen less."""

    def block(self, call: Callable[[], object], calls: int) -> float:
        begin = time.process_time()
        for _ in range(calls):
            call()
        return time.process_time() - begin


STARTS = ("deep", "deep_training")
SHAPES = ("fixed", "varying")


def started(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Full and regional compilation in fresh processes, and their steady states in one."""
    suffix = "" if options.size == "small" else f"_{options.size}"
    target = f"{Path(__file__).with_name('speed_subjects.py')}:{name}{suffix}"
    stats = measure_startup(
        target,
        SpeedOptions(
            regional=True,
            cold=options.cold,
            warm=options.warm,
            budget=options.budget / 5,
            env={"OMP_NUM_THREADS": str(options.threads)},
        ),
        device=options.device,
    )
    run = startup_run(stats)
    subject = sized(name, options.size)
    configs = {"eager": StepConfig(), "full": StepConfig("default"), "regional": StepConfig("default", regional=True)}
    with many_compilations(options.device):
        arms = {arm: step_of(subject, config, device=options.device) for arm, config in configs.items()}
        clock = ProcessorClock() if options.processor else None
        times = measure_speed(arms, subject=subject.name, device=options.device, budget=options.budget, clock=clock)
    costs = {arm.name: median(stats.cost(arm)) for arm in stats.arms}
    return {
        "regional": regional_row(times, costs[COLD], costs[REGIONAL]),
        "starts": [_plain(table) for table in run.tables],
        "findings": [f"{finding.verdict}: {finding.message}" for finding in run.findings],
    }


def regional_row(times: SpeedStats, full_cost: float, regional_cost: float) -> dict[str, Any]:
    """Regional beside full compilation. times: of eager, full and regional; costs in seconds.

    Where full compilation does not surely pay there is nothing that regional compilation could keep; two times that are
    as good as eager mode's would look like all of it.
    """
    full, regional = (paired_ratio(times.reference, times.arm(arm)) for arm in ("full", "regional"))
    beside = paired_ratio(times.arm("full"), times.arm("regional"))
    pays = full.low > 1 + EFFECT
    return {
        "subject": times.subject,
        "full, s": round(full_cost, 2),
        "regional, s": round(regional_cost, 2),
        CHEAPER: round(full_cost / regional_cost, 3) if regional_cost else None,
        "full, times eager": round(full.median, 3),
        "regional, times eager": round(regional.median, 3),
        KEPT: round(beside.median, 3) if pays else NOTHING,
        "from": round(beside.low, 3) if pays else None,
        "to": round(beside.high, 3) if pays else None,
        GAIN: round((regional.median - 1) / (full.median - 1), 3) if pays else NOTHING,
        "cycles": times.cycles,
    }


def shaped(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What Dynamo compiles of calls with one length and with four, and how fast the calls are then."""
    subject = sized(name, options.size)
    counted = {
        way: measure_graph(subject, device=options.device, options=CompileOptions(dynamic=way))
        for way in (None, True, False)
    }
    with many_compilations(options.device):
        arms = {"eager": step_of(subject, StepConfig(), device=options.device)}
        for way in counted:
            arms[f"dynamic={way}"] = step_of(subject, StepConfig("default", dynamic=way), device=options.device)
        times = measure_speed(arms, subject=subject.name, device=options.device, budget=options.budget)
    found = []
    for way, graphs in counted.items():
        arm = times.arm(f"dynamic={way}")
        ratio = paired_ratio(times.reference, arm)
        found.append(
            {
                "subject": subject.name,
                "dynamic": str(way),
                "graphs": len(graphs.graphs),
                "recompilations": len(graphs.recompiles),
                "times eager": round(ratio.median, 3),
                "from": round(ratio.low, 3),
                "to": round(ratio.high, 3),
                "first pass, s": round(arm.first, 2),
                "cycles": times.cycles,
            }
        )
    return {"shapes": found}


def _plain(table: Table) -> dict[str, Any]:
    return {"title": table.title, "rows": list(table_rows(table)), "note": table.note}


def markdown(held: Rows) -> Iterator[str]:
    """A part for each size and machine."""
    for title, found in grouped(held, STARTS + SHAPES):
        yield from (f"## {title}", "")
        yield from (f"{row['name']}: {options_of(row)}." for row in found)
        yield ""
        yield from _part(found)


def _part(found: list[Row]) -> Iterator[str]:
    regional = [one["regional"] for one in found if "regional" in one]
    if regional:
        yield from ("### Full and regional compilation", "")
        yield (
            "Seconds of a cold start beyond an eager one. Of the speedup is kept: the regional one through the full "
            f"one, with its interval; of the gain: what both have beyond 1. {NOTHING.capitalize()}: full compilation "
            f"is not surely more than {100 * EFFECT:g} % faster than eager mode."
        )
        yield ""
        yield from rows(regional)
        yield ""
    shapes = [row for one in found for row in one.get("shapes", ())]
    if shapes:
        yield from ("### Fixed and varying shapes", "")
        yield "Graphs and recompilations are the same in every run. First pass: in this process, caches as they are."
        yield ""
        yield from rows(shapes)
        yield ""
    for one in found:
        for table in one.get("starts", ()):
            yield from (f"### {table['title']}: {one['regional']['subject']}", "", table["note"], "")
            yield from rows(table["rows"])
            yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=[], metavar="SUBJECT", help="of: " + ", ".join(STARTS + SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="small", choices=tuple(SIZES), help="medium has equal blocks alone")
    parser.add_argument("--cold", type=int, default=3, help="launches with empty caches (%(default)s)")
    parser.add_argument(
        "--warm", type=int, default=3, help="launches with warm caches, and with artifacts (%(default)s)"
    )
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timed blocks a subject (%(default)g)")
    parser.add_argument("--processor", action="store_true", help="pair seconds of a processor: on a busy CPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="by default compile_cost_DEVICE.json in reports/evidence"
    )
    options = parser.parse_args()
    names = STARTS if options.size == "medium" else STARTS + SHAPES
    if unknown := [name for name in options.subjects if name not in names]:
        parser.error(f"there is no subject {unknown[0]!r} in this size; there are {', '.join(names)}")
    torch.set_num_threads(options.threads)
    path = options.json or EVIDENCE / f"compile_cost_{slug(options.device)}.json"
    if not path.parent.is_dir():
        parser.error(f"there is no folder {path.parent} for the evidence")
    held = read_rows(path)
    asked = {name: getattr(options, name) for name in ("budget", "cold", "warm", "threads")}
    asked |= {"clock": "of the processor"} if options.processor else {}
    known = fingerprint(options.device)
    mine = {name for (size, name), row in held.items() if size == options.size and is_current(row, asked, known)}
    for name in options.subjects or [name for name in names if name not in mine]:
        print(name, flush=True)
        figures = started(name, options) if name in STARTS else shaped(name, options)
        own = {"size": options.size, "name": name, "options": asked, "fingerprint": known}
        held[options.size, name] = {**own, **figures}
        write_rows(path, held, {}, markdown(held))
    write_rows(path, held, {}, markdown(held))
    print("\n".join(markdown(held)))


if __name__ == "__main__":
    main()
