"""Where tensors of 16 bits stop: as the first four steps say, and as a long run shows.

    python benchmarks/stopping_points.py --evidence reports/evidence/stopping_points.json

Each loop is observed for four steps, as `ampcheck.audit` observes it, and its tensor's stop is derived from what these
steps added and kept. Then the same loop runs for 10,000 steps. Of the typical element the table has the value at which
it stops, the steps until then, its distance from the same loop in float32, or the distance of a drifting target when it
first moves again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "training"))

from stopping_loops import CASES, STEPS, pairs

ALLOWED = 0.2


def rows(steps: int) -> list[dict[str, Any]]:
    measured = []
    for case in CASES:
        for compared, (expected, observed) in pairs(case, steps).items():
            row: dict[str, Any] = {"kind": case.kind, "loop": case.name, "dtype": str(case.dtype).partition(".")[2]}
            row |= {"compared": compared, "predicted": float(f"{expected:.4g}"), "observed": float(f"{observed:.4g}")}
            row["ratio"] = round(expected / observed, 3)
            measured.append(row)
            print(*row.values(), flush=True)
    return measured


def main() -> int:
    """Returns 1 where a prediction is further off than 20 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = rows(options.steps)
    far = [row for row in measured if not abs(row["ratio"] - 1.0) <= ALLOWED]
    summary = f"{len(measured) - len(far)} of {len(measured)} predictions lie within {ALLOWED:.0%} of a long run"
    print(summary)
    if options.evidence is not None:
        table = [summary + ".", "", *markdown_table(measured)]
        write_evidence(options.evidence, {"steps": options.steps, "rows": measured, "summary": summary}, table)
    return int(bool(far))


if __name__ == "__main__":
    sys.exit(main())
