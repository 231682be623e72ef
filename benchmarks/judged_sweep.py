"""The failures and warnings of a sweep with what a person found out about each, as evidence.

    ampcheck sweep ../shared/zoo --no-compile --jobs 2 --json zoo.json
    python benchmarks/judged_sweep.py zoo.json --judged benchmarks/zoo_judged.json \\
        --json reports/evidence/zoo_speed.json

A sweep with `--speed` has the gains of torch.compile as well, beside those that PyTorch 2.0 was announced with.
The judgements are a JSON list of {"model", "check", "judgement", "reason"}. A Markdown table is written next to the
JSON: every failure and warning, those of one model and check together, then a row for each model.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from _evidence import markdown_table, write_evidence

from ampcheck import Finding, Run, Verdict

GAINS = "Geometric means"
CLAIM = (
    "PyTorch 2.0 was announced (pytorch.org/get-started/pytorch-2.0) with 93 % of 163 models that compile and gain "
    "1.21 times in float32 and 1.51 under AMP, on an A100. These models are small, and the device is a CPU."
)


def findings(run: Run, judged: list[dict[str, str]]) -> Iterator[str]:
    known = {(entry["model"], entry["check"]): entry for entry in judged}
    groups: dict[tuple[Verdict, str, str], list[Finding]] = {}
    for finding in run.of(Verdict.FAIL) + run.of(Verdict.WARN):
        groups.setdefault((finding.verdict, finding.name, finding.check), []).append(finding)
    judgements: Counter[str] = Counter()
    rows = []
    for (verdict, name, check), group in sorted(groups.items()):
        entry = known.get((name, check), {"judgement": "not judged", "reason": ""})
        judgements[entry["judgement"]] += len(group)
        row = {"model": name, "verdict": verdict, "check": check, "findings": len(group)}
        row["arms"] = ", ".join(dict.fromkeys(str(finding.arm) for finding in group))
        rows.append({**row, "first at": group[0].where, "judgement": entry["judgement"], "reason": entry["reason"]})
    yield "Findings by judgement: " + (", ".join(f"{n} {j}" for j, n in judgements.most_common()) or "none") + "."
    yield ""
    if rows:
        yield from markdown_table([{name: str(value).replace("|", "/") for name, value in row.items()} for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="SWEEP.json", help="what `ampcheck sweep --json` wrote")
    parser.add_argument("--judged", type=Path, metavar="PATH", help="what a person found out about the findings")
    parser.add_argument("--json", type=Path, metavar="PATH", required=True, help="write evidence here")
    options = parser.parse_args()
    run = Run.load(options.sweep)
    lines = [f"{run.title}.", "", *findings(run, json.loads(options.judged.read_text()) if options.judged else [])]
    for table in run.tables:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        cells = [{name: str("" if v is None else v).replace("|", "/") for name, v in row.items()} for row in rows]
        claim = [CLAIM, ""] if table.title == GAINS else []
        lines += ["", f"## {table.title}", "", *claim, *markdown_table(cells)]
    write_evidence(options.json, {"run": run.to_json()}, lines)


if __name__ == "__main__":
    main()
