"""Does torch.compile pay, in which mode and precision, for which workload? With memory, cost, break-even and accuracy.

    python benchmarks/bench_matrix.py [--device cuda] [--size large] [--only NAME ...] [--budget S] [--json PATH]

Each workload's arms are paired in one job. Evidence is written after each workload, and what it holds already of the
same device and size is not measured again, unless it is named by `--only`. The machine should be quiet. Behind the
tables stands a comparison with the speedups that are commonly reported, computed from them and from the evidence of
`bench_compile_cost.py` beside them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence

from ampcheck.record import Scalar, Table
from ampcheck.speed.matrix.judge import matrix_table, shown
from ampcheck.speed.matrix.measure import BUDGET, MATRIX_MODES, measure_matrix
from ampcheck.speed.matrix.stats import MatrixStats, WorkloadStats, geometric_mean
from ampcheck.speed.matrix.workloads import SIZES, WORKLOADS
from ampcheck.speed.steps import PRECISIONS

EVIDENCE = Path(__file__).resolve().parent.parent / "reports" / "evidence"

REPORTED = (
    ("in float32, 163 models on a data-centre GPU", ("float32",), 1.2, None),
    ("under AMP, the same models", ("float16", "bfloat16"), 1.5, None),
    ("in training", tuple(PRECISIONS), 1.4, True),
)
"""What is commonly said of compiled against eager mode in the same precision: of what, precisions, speedup, trained."""

REGIONAL = {"compiles so many times faster": (5.0, 8.0), "part of the speedup that is kept": (0.8, 0.9)}
"""And of regional against full compilation."""

CLOSE = 0.1
"""Two speedups agree when they differ by no more than this share."""


def slug(device: str) -> str:
    """`cpu`, or the name of the GPU."""
    if torch.device(device).type != "cuda":
        return device
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(device).lower()).strip("_")


def speedups(found: Iterable[WorkloadStats], precisions: tuple[str, ...], trained: bool | None) -> list[float]:
    """Of the mode `default` against eager mode in the same precision, where the numbers are not wrong."""
    return [
        cell.gain.median
        for workload in found
        if trained is None or bool(WORKLOADS[workload.workload].trains) is trained
        for cell in workload.cells
        if cell.mode == "default" and cell.precision in precisions and cell.gain is not None and cell.accuracy != "fail"
    ]


def compared(found: list[WorkloadStats], costs: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Each figure commonly reported, ours, and whether they agree."""
    for what, precisions, reported, trained in REPORTED:
        ours = speedups(found, precisions, trained)
        mean = geometric_mean(ours)
        yield {
            "of": f"speedup {what}",
            "reported": f"{reported:g}",
            "here": None if mean is None else round(mean, 3),
            "from": None if mean is None else round(min(ours), 3),
            "to": None if mean is None else round(max(ours), 3),
            "cells": len(ours),
            "verdict": "not measured" if mean is None else _verdict(mean, reported, reported, CLOSE),
        }
    for what, (low, high) in REGIONAL.items():
        ours = [row[what] for row in (costs or {}).get("regional", ()) if row.get(what) is not None]
        mean = geometric_mean(ours)
        yield {
            "of": f"regional compilation: {what}",
            "reported": f"{low:g} to {high:g}",
            "here": None if mean is None else round(mean, 3),
            "from": None if mean is None else round(min(ours), 3),
            "to": None if mean is None else round(max(ours), 3),
            "cells": len(ours),
            "verdict": "not measured" if mean is None else _verdict(mean, low, high, 0.0),
        }


def _verdict(ours: float, low: float, high: float, close: float) -> str:
    if low * (1 - close) <= ours <= high * (1 + close):
        return "agrees"
    return "less here" if ours < low else "more here"


def means(found: list[WorkloadStats]) -> Iterator[dict[str, Any]]:
    """Geometric means over the workloads, for each mode and precision."""
    for precision in PRECISIONS:
        for mode in MATRIX_MODES:
            cells = [c for w in found for c in w.cells if (c.mode, c.precision) == (mode, precision) and c.ratio]
            if cells and (mode, precision) != ("eager", "float32"):
                gain = geometric_mean([c.gain.median for c in cells if c.gain])
                ratio = geometric_mean([c.ratio.median for c in cells if c.ratio])
                yield {
                    "mode": mode,
                    "precision": precision,
                    "workloads": len(cells),
                    "times eager float32": round(ratio or 0.0, 3),
                    "times eager, same precision": None if gain is None else round(gain, 3),
                    "pay": sum(c.verdict == "pays" for c in cells),
                    "wrong": sum(c.accuracy == "fail" for c in cells),
                }


def rows(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Dictionaries with the same keys as a Markdown table."""
    for number, row in enumerate(found):
        if not number:
            yield "| " + " | ".join(row) + " |"
            yield "|" + "---|" * len(row)
        yield "| " + " | ".join("" if value is None else str(value) for value in row.values()) + " |"


def table_rows(table: Table) -> Iterator[dict[str, Scalar]]:
    return (dict(zip(table.columns, row, strict=True)) for row in table.rows)


def markdown(found: list[WorkloadStats], costs: dict[str, Any] | None) -> Iterator[str]:
    judged = list(compared(found, costs))
    agree = sum(row["verdict"] == "agrees" for row in judged)
    measured = sum(row["verdict"] != "not measured" for row in judged)
    yield f"{len(found)} workloads. Of {len(judged)} figures commonly reported {measured} were measured, {agree} agree."
    yield ""
    yield "## Beside what is commonly reported"
    yield ""
    yield f"Geometric means of the mode default; from, to: of single cells; speedups agree within {100 * CLOSE:g} %."
    yield ""
    yield from rows(judged)
    yield ""
    yield "## Geometric means over the workloads"
    yield ""
    yield from rows(means(found))
    for workload in found:
        table = matrix_table(workload)
        yield from ("", f"## {table.title}", "")
        best = workload.best
        told = "no cell surely pays" if best is None or best.ratio is None else f"{best.name}, {shown(best.ratio)}"
        yield f"Best: {told}. {table.note}"
        yield ""
        yield from rows(table_rows(table))


def kept(path: Path, size: str) -> list[WorkloadStats]:
    """The workloads of this size that the evidence has."""
    if not path.is_file():
        return []
    held = json.loads(path.read_text(encoding="utf-8")).get("workloads", [])
    return [found for found in map(WorkloadStats.from_dict, held) if found.size == size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="of: " + "; ".join(WORKLOADS))
    parser.add_argument("--modes", nargs="*", default=list(MATRIX_MODES), metavar="MODE")
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS), metavar="PRECISION")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of timed blocks a workload (%(default)g)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="PATH", help="by default matrix_DEVICE.json in reports/evidence")
    parser.add_argument("--costs", type=Path, metavar="PATH", help="evidence of bench_compile_cost.py; found beside it")
    parser.add_argument("--compare", action="store_true", help="measure nothing; write the tables anew")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    place = slug(options.device)
    path = options.json or EVIDENCE / f"matrix_{place}.json"
    if not path.parent.is_dir():
        parser.error(f"there is no folder {path.parent} for the evidence")
    costs_path = options.costs or path.with_name(f"compile_cost_{place}.json")
    costs = json.loads(costs_path.read_text(encoding="utf-8")) if costs_path.is_file() else None
    found = {one.workload: one for one in kept(path, options.size)}

    def save() -> None:
        ordered = [found[name] for name in WORKLOADS if name in found]
        data = {
            "size": options.size,
            "compared": list(compared(ordered, costs)),
            "means": list(means(ordered)),
            "workloads": [one.to_dict() for one in ordered],
        }
        write_evidence(path, data, markdown(ordered, costs))

    for name in [] if options.compare else options.only or [name for name in WORKLOADS if name not in found]:
        stats: MatrixStats = measure_matrix(
            name,
            modes=options.modes,
            precisions=options.precisions,
            device=options.device,
            size=options.size,
            budget=options.budget,
            progress=lambda stage, done, total: print(f"{done}/{total} {stage}", flush=True),
        )
        found[name] = stats.workloads[0]
        save()
    save()
    print("\n".join(markdown([found[name] for name in WORKLOADS if name in found], costs)))


if __name__ == "__main__":
    main()
