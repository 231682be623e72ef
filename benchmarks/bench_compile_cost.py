"""What compilation costs: full against regional, cold against warm against artifacts, fixed against varying shapes.

    python benchmarks/bench_compile_cost.py [SUBJECT ...] [--device cuda] [--size large] [--json PATH]

Each start is a fresh process with cache folders of its own. Steady states of eager, full and regional are paired in
one job. Evidence is written after each subject, and what it holds already of the same size is not measured again,
unless it is named. The machine should be quiet. `bench_matrix.py` compares with what is commonly reported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _evidence import write_evidence
from bench_matrix import EVIDENCE, rows, slug, table_rows
from speed_subjects import sized

from ampcheck.compiled.graph.judge import measure_graph
from ampcheck.record import Table
from ampcheck.speed.interval import paired_ratio
from ampcheck.speed.paired import measure_speed
from ampcheck.speed.startup.judge import startup_run
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.startup.stats import COLD, REGIONAL
from ampcheck.speed.steps import Way, step_of

STARTS = ("deep", "deep_training")
SHAPES = ("fixed", "varying")


def started(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Full and regional compilation in fresh processes, and their steady states in one."""
    target = f"{Path(__file__).with_name('speed_subjects.py')}:{name}" + ("" if options.size == "small" else "_large")
    stats = measure_startup(
        target, device=options.device, regional=True, cold=options.cold, warm=options.warm, budget=options.budget / 5
    )
    run = startup_run(stats)
    subject = sized(name, options.size)
    torch.compiler.reset()
    ways = {"eager": Way(), "full": Way("default"), "regional": Way("default", regional=True)}
    arms = {arm: step_of(subject, way, device=options.device) for arm, way in ways.items()}
    times = measure_speed(arms, subject=subject.name, device=options.device, budget=options.budget)
    full, regional = (paired_ratio(times.reference, times.arm(arm)) for arm in ("full", "regional"))
    beside = paired_ratio(times.arm("full"), times.arm("regional"))
    costs = {arm.name: median(stats.cost(arm)) for arm in stats.arms}
    gains = (full.median - 1, regional.median - 1)
    return {
        "subject": name,
        "size": options.size,
        "regional": {
            "subject": subject.name,
            "full, s": round(costs[COLD], 2),
            "regional, s": round(costs[REGIONAL], 2),
            "compiles so many times faster": round(costs[COLD] / costs[REGIONAL], 3) if costs[REGIONAL] else None,
            "full, times eager": round(full.median, 3),
            "regional, times eager": round(regional.median, 3),
            "part of the speedup that is kept": round(beside.median, 3),
            "from": round(beside.low, 3),
            "to": round(beside.high, 3),
            "part of the gain that is kept": round(gains[1] / gains[0], 3) if gains[0] > 0.03 else None,
            "cycles": times.cycles,
        },
        "starts": [_plain(table) for table in run.tables],
        "findings": [f"{finding.verdict}: {finding.message}" for finding in run.findings],
    }


def shaped(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What Dynamo compiles of calls with one length and with four, and how fast the calls are then."""
    subject = sized(name, options.size)
    counted = {way: measure_graph(subject, device=options.device, dynamic=way) for way in (None, True, False)}
    arms = {"eager": step_of(subject, Way(), device=options.device)}
    for way in counted:
        arms[f"dynamic={way}"] = step_of(subject, Way("default", dynamic=way), device=options.device)
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
    return {"subject": name, "size": options.size, "shapes": found}


def _plain(table: Table) -> dict[str, Any]:
    return {"title": table.title, "rows": list(table_rows(table)), "note": table.note}


def markdown(found: list[dict[str, Any]]) -> Iterator[str]:
    regional = [one["regional"] for one in found if "regional" in one]
    if regional:
        yield from ("## Full and regional compilation", "")
        yield "Seconds of a cold start beyond an eager one; the part that is kept is full time through regional time."
        yield ""
        yield from rows(regional)
        yield ""
    shapes = [row for one in found for row in one.get("shapes", ())]
    if shapes:
        yield from ("## Fixed and varying shapes", "")
        yield "Graphs and recompilations are the same in every run. First pass: in this process, caches as they are."
        yield ""
        yield from rows(shapes)
        yield ""
    for one in found:
        for table in one.get("starts", ()):
            yield from (f"## {table['title']}: {one['regional']['subject']}", "", table["note"], "")
            yield from rows(table["rows"])
            yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=[], metavar="SUBJECT", help="of: " + ", ".join(STARTS + SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="small", choices=("small", "large"))
    parser.add_argument("--cold", type=int, default=3, help="launches with empty caches (%(default)s)")
    parser.add_argument(
        "--warm", type=int, default=3, help="launches with warm caches, and with artifacts (%(default)s)"
    )
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timed blocks a subject (%(default)g)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="by default compile_cost_DEVICE.json in reports/evidence"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.json or EVIDENCE / f"compile_cost_{slug(options.device)}.json"
    if not path.parent.is_dir():
        parser.error(f"there is no folder {path.parent} for the evidence")
    held = json.loads(path.read_text(encoding="utf-8"))["subjects"] if path.is_file() else []
    found = {one["subject"]: one for one in held if one["size"] == options.size}
    for name in options.subjects or [name for name in STARTS + SHAPES if name not in found]:
        print(name, flush=True)
        found[name] = started(name, options) if name in STARTS else shaped(name, options)
        ordered = [found[known] for known in STARTS + SHAPES if known in found]
        regional = [one["regional"] for one in ordered if "regional" in one]
        write_evidence(path, {"regional": regional, "subjects": ordered}, markdown(ordered))
    print("\n".join(markdown([found[known] for known in STARTS + SHAPES if known in found])))


if __name__ == "__main__":
    main()
