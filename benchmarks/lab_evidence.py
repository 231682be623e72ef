"""Run the lab and keep what it found: every expectation with what came out, and the small tables.

python benchmarks/lab_evidence.py [NAME ...] [--device DEVICE] [--full] [--kept] [--path PATH]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from _evidence import write_evidence

from ampcheck.core.run import Run, Table
from ampcheck.report.text import number
from ampcheck.tools.lab.lab import run_lab
from ampcheck.tools.lab.registry import experiments_of

RUN = "reports/lab_run.json"
"""The whole run, which git does not keep: `ampcheck.report.write_html(Run.load(path), page)` draws it."""

KEPT = (
    "The experiments",
    "200,000 magnitudes",
    "A backward pass in float16",
    "2,000 updates",
    "Where exp overflows",
    "softmax of",
    "A float32 product",
    "The same",
    "What 60 steps came to",
    "What 400 steps came to",
    "What a step costs",
    "The demo under autocast",
    "Cost of a start",
)
"""Beginnings of the titles of tables that are kept; the others are the same on every machine."""


def default_path(device: str) -> str:
    """A file for each kind of device: what one shows says nothing about another."""
    return f"reports/evidence/lab_{device.partition(':')[0]}.json"


def kept(run: Run) -> list[Table]:
    return [table for table in run.tables if table.title.startswith(KEPT)]


def markdown(run: Run) -> Iterator[str]:
    yield f"{run.title}: " + ", ".join(f"{count} {verdict}" for verdict, count in run.counts().items())
    yield ""
    yield "| experiment | verdict | expected, and what came out |"
    yield "|---|---|---|"
    for finding in run.findings:
        yield f"| {finding.check.removeprefix('lab-')} | {finding.verdict} | {_cell(finding.message)} |"
    for table in kept(run):
        yield ""
        yield f"## {table.title}"
        yield ""
        yield "| " + " | ".join(map(_cell, table.columns)) + " |"
        yield "|" + "---|" * len(table.columns)
        for row in table.rows:
            yield "| " + " | ".join("" if value is None else _cell(number(value, 4)) for value in row) + " |"


def _of(table: Table, names: list[str]) -> Table:
    """The overview with the rows of these experiments; any other table unchanged."""
    if table.check or not names:
        return table
    return replace(table, rows=[row for row in table.rows if row[0] in names])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--path", help="default: reports/evidence/lab_DEVICE.json")
    parser.add_argument("--kept", action="store_true", help=f"write again what {RUN} holds of these experiments")
    options = parser.parse_args()
    chosen = [experiment.check for experiment in experiments_of(options.names)]
    if options.kept:
        run = Run.load(RUN)
    else:
        run = run_lab(
            options.names,
            device=options.device,
            full=options.full,
            progress=lambda stage, done, total: print(f"{done} of {total}: {stage}", flush=True),
        )
        run.save(RUN)
    run = replace(
        run,
        findings=tuple(finding for finding in run.findings if finding.check in chosen),
        tables=tuple(_of(table, options.names) for table in run.tables if table.check in chosen or not table.check),
    )
    data: dict[str, Any] = {
        "measured": dict(run.environment),
        "findings": [
            {"experiment": f.check.removeprefix("lab-"), "verdict": str(f.verdict), "message": f.message}
            for f in run.findings
        ],
        "tables": [
            {"title": t.title, "columns": list(t.columns), "rows": [list(r) for r in t.rows]} for t in kept(run)
        ],
    }
    write_evidence(Path(options.path or default_path(options.device)), data, markdown(run))


if __name__ == "__main__":
    main()
