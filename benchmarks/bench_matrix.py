"""Does torch.compile pay, in which mode and precision, for which workload? With memory, cost, break-even and accuracy.

    python benchmarks/bench_matrix.py [--device cuda] [--size large] [--only NAME ...] [--budget S] [--json PATH]

Each workload's arms are paired in one job. Evidence is written after each workload. What it holds already of the same
size, options and machine is not measured again, unless it is named by `--only`; rows of others are not changed.
The machine should be quiet. Behind the tables stands a comparison with the speedups that are commonly reported,
computed from them and from the evidence of `bench_compile_cost.py` beside them. Each arm has a copy of the model.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _evidence import Row, Rows, grouped, is_current, machine_of, options_of, read_rows, write_rows
from matrix_workloads import SIZES, WORKLOADS

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.run import Scalar, Table
from ampcheck.records.matrix import Cell, MatrixStats
from ampcheck.records.speed import Ratio, differences
from ampcheck.records.startup import BreakEven
from ampcheck.speed.matrix.judge import matrix_table
from ampcheck.speed.matrix.measure import BUDGET, MATRIX_MODES, measure_matrix
from ampcheck.speed.paired import fingerprint
from ampcheck.speed.steps import PRECISIONS

EVIDENCE = Path(__file__).resolve().parent.parent / "reports" / "evidence"

REPORTED = (
    ("in float32, 163 models on a data-centre GPU", ("float32",), 1.2, None),
    ("under AMP, the same models", ("float16", "bfloat16"), 1.5, None),
    ("in training", tuple(PRECISIONS), 1.4, True),
)
"""What is commonly said of compiled against eager mode in the same precision: of what, precisions, speedup, trained."""

CHEAPER, KEPT, GAIN = (
    "compiles so many times faster",
    "part of the speedup that is kept",
    "part of the gain that is kept",
)
REGIONAL = {CHEAPER: (5.0, 8.0), KEPT: (0.8, 0.9), GAIN: None}
"""And of regional against full compilation. What is reported to be kept is the ratio of the two speedups, which is near
1 whatever compilation gains; of the gain itself nothing is reported."""

NOTHING = "nothing to keep"
"""Where full compilation does not surely pay."""

CLOSE = 0.1
"""Two speedups agree when they differ by no more than this share."""


SCHEMA = 1
"""Version of a `MatrixStats` as data. 1: the first."""


def to_dict(stats: MatrixStats) -> dict[str, Any]:
    """The figures as data for `json.dumps`; an infinite one is None."""
    return {"schema": SCHEMA, **_finite(asdict(stats))}


def from_dict(data: Mapping[str, Any]) -> MatrixStats:
    """The figures that `to_dict` wrote. Raises `UsageError` for a newer schema or damaged data."""
    require_schema(data, "this", "matrix of ampcheck", SCHEMA)
    try:
        plain = {name: value for name, value in data.items() if name != "schema"}
        plain["subject"] = plain.pop("workload") if "workload" in plain else plain["subject"]
        cells = tuple(_cell_of(cell) for cell in plain["cells"])
        return MatrixStats(**{**plain, "cells": cells, "noise": _infinite(plain.get("noise", 0.0))})
    except (KeyError, TypeError) as error:
        raise UsageError(f"this matrix of ampcheck is damaged ({error}): measure again") from error


def _cell_of(data: Mapping[str, Any]) -> Cell:
    fields: dict[str, Any] = {**data, "noise": _infinite(data.get("noise", 0.0))}
    for name, kind in (("ratio", Ratio), ("gain", Ratio), ("break_even", BreakEven)):
        if fields.get(name):
            fields[name] = kind(**{key: _infinite(value) for key, value in fields[name].items()})
    return Cell(**fields)


def _infinite(value: Any) -> Any:
    return math.inf if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Of ratios; None of none."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def slug(device: str) -> str:
    """`cpu`, or the name of the GPU."""
    if torch.device(device).type != "cuda":
        return device
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(device).lower()).strip("_")


def speedups(found: Iterable[MatrixStats], precisions: tuple[str, ...], trained: bool | None) -> list[float]:
    """Of the mode `default` against eager mode in the same precision, where the numbers were judged and are right."""
    return [
        cell.gain.median
        for workload in found
        if trained is None or bool(WORKLOADS[workload.subject]["small"].trains) is trained
        for cell in workload.cells
        if cell.mode == "default" and cell.precision in precisions and cell.gain is not None and cell.right
    ]


def compared(found: list[MatrixStats], costs: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Each figure commonly reported, ours, and whether they agree.

    found: workloads of one size and machine. costs: rows of `bench_compile_cost.py`, of which those count that are of
    the same size and machine.
    """
    for what, precisions, reported, trained in REPORTED:
        ours: list[Any] = speedups(found, precisions, trained)
        yield _beside(f"speedup {what}", ours, (reported, reported), CLOSE)
    same = [row["regional"] for row in costs if "regional" in row and _is_beside(row, found)]
    for what, range_ in REGIONAL.items():
        ours = [row[what] for row in same if row.get(what) is not None]
        yield _beside(f"regional compilation: {what}", ours, range_, 0.0)


def _is_beside(row: Row, found: list[MatrixStats]) -> bool:
    return all(row["size"] == one.size and not differences(row["fingerprint"], one.fingerprint) for one in found)


def _beside(what: str, ours: list[Any], reported: tuple[float, float] | None, close: float) -> dict[str, Any]:
    """ours: figures, or `NOTHING`."""
    figures = [one for one in ours if one != NOTHING]
    mean = geometric_mean(one for one in figures if one > 0) if all(one > 0 for one in figures) else None
    if not figures:
        verdict = NOTHING if ours else "not measured"
    else:
        verdict = "not reported" if reported is None else _verdict(mean or 0.0, *reported, close)
    return {
        "of": what,
        "reported": None if reported is None else " to ".join(f"{one:g}" for one in dict.fromkeys(reported)),
        "here": None if mean is None else round(mean, 3),
        "from": round(min(figures), 3) if figures else None,
        "to": round(max(figures), 3) if figures else None,
        "cells": len(figures),
        "verdict": verdict,
    }


def _verdict(ours: float, low: float, high: float, close: float) -> str:
    if low * (1 - close) <= ours <= high * (1 + close):
        return "agrees"
    return "less here" if ours < low else "more here"


def means(found: list[MatrixStats]) -> Iterator[dict[str, Any]]:
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
        yield "| " + " | ".join(map(_cell, row.values())) + " |"


def _cell(value: Scalar) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table_rows(table: Table) -> Iterator[dict[str, Scalar]]:
    return (dict(zip(table.columns, row, strict=True)) for row in table.rows)


def markdown(rows_held: Rows, costs: Iterable[Row]) -> Iterator[str]:
    """A part for each size and machine."""
    costs = list(costs)
    for title, held in grouped(rows_held, list(WORKLOADS)):
        found = workloads_of(held)
        judged = list(compared(found, costs))
        reported = [row for row in judged if row["reported"] is not None]
        measured = sum(row["cells"] > 0 for row in reported)
        agree = sum(row["verdict"] == "agrees" for row in reported)
        yield from (f"## {title}", "")
        yield (
            f"{len(found)} workloads. Of {len(reported)} figures commonly reported {measured} were measured, {agree} "
            "agree."
        )
        yield from ("", "### Beside what is commonly reported", "")
        yield (
            f"Geometric means of the mode default; from, to: of single cells; speedups agree within {100 * CLOSE:g} %. "
            "Regional compilation keeps something only where full compilation surely pays."
        )
        yield ""
        yield from rows(judged)
        yield from ("", "### Geometric means over the workloads", "")
        yield from rows(means(found))
        for row, workload in zip(held, found, strict=True):
            table = matrix_table(workload)
            yield from ("", f"### {table.title}", "")
            best = workload.best
            text = "no cell surely pays and is right"
            if best is not None and best.ratio is not None:
                text = f"{best.name}, {best.ratio}"
            yield f"Best: {text}. {table.note}"
            yield from ("", f"Measured on {machine_of(row)}; {options_of(row)}", "")
            yield from rows(table_rows(table))
        yield ""


def workloads_of(held: Iterable[Row]) -> list[MatrixStats]:
    return [from_dict(row["stats"]) for row in held]


def save(path: Path, held: Rows, costs: Iterable[Row]) -> None:
    """Everything that is held, of this machine and of others."""
    costs = list(costs)
    groups = [(title, workloads_of(rows)) for title, rows in grouped(held, list(WORKLOADS))]
    data = {
        "compared": {title: list(compared(found, costs)) for title, found in groups},
        "means": {title: list(means(found)) for title, found in groups},
    }
    write_rows(path, held, data, markdown(held, costs))


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
    parser.add_argument("--compare", action="store_true", help="measure nothing; write the tables again")
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    torch.set_num_threads(options.threads)
    place = slug(options.device)
    path = options.json or EVIDENCE / f"matrix_{place}.json"
    if not path.parent.is_dir():
        parser.error(f"there is no folder {path.parent} for the evidence")
    costs_path = options.costs or path.with_name(f"compile_cost_{place}.json")
    costs, held = list(read_rows(costs_path).values()), read_rows(path)
    asked = {name: getattr(options, name) for name in ("budget", "modes", "precisions", "threads")}
    known = fingerprint(options.device)
    mine = {name for (size, name), row in held.items() if size == options.size and is_current(row, asked, known)}
    for name in [] if options.compare else options.only or [name for name in WORKLOADS if name not in mine]:
        stats = measure_matrix(
            WORKLOADS[name][options.size],
            modes=options.modes,
            precisions=options.precisions,
            device=options.device,
            budget=options.budget,
            progress=lambda stage, done, total: print(f"{done}/{total} {stage}", flush=True),
        )
        held[options.size, name] = {
            "size": options.size,
            "name": name,
            "options": asked,
            "fingerprint": dict(stats.fingerprint),
            "stats": to_dict(stats),
        }
        save(path, held, costs)
    save(path, held, costs)
    print("\n".join(markdown(held, costs)))


if __name__ == "__main__":
    main()
