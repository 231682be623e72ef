"""Every model of a zoo under shadows, float16 and bfloat16, forward and backward: the false alarms, and what they cost.

    python benchmarks/shadow_zoo.py ../shared/zoo --json reports/evidence/zoo_verdicts.json \\
        --judged benchmarks/zoo_verdicts.json [--resume] [--jobs 2] [--only PATTERN]

The list is one of `ampcheck sweep`, and each model runs in a process of its own. float16 runs at the loss scales that
`GradScaler` goes through, until no gradient overflows. A Markdown table next to the JSON lists every fault that reaches
an output or a gradient, with what a person found out about it (`--judged`, a JSON list of {"model", "dtype", "check",
"op", "verdict", "reason", "verified"}). `--resume` keeps the rows that are there already; `commit` says which code
measured them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence

from ampcheck import UsageError
from ampcheck.core.subject import load_subject
from ampcheck.shadow import Shadow
from ampcheck.shadow.faults import OVERFLOW
from ampcheck.sweep.listing import Entry, read_list
from ampcheck.sweep.pool import Start, each
from ampcheck.torchtools.pytree import tensors

SCALES = (65536.0, 1024.0, 16.0, 1.0)
SECONDS = 120


class Commands:
    """What the process of one model does."""

    def run(self, target: str, dtype: str) -> dict[str, Any]:
        """One forward and backward of the model under the shadow."""
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        low = getattr(torch, dtype)
        for scale in SCALES if low is torch.float16 else (1.0,):
            torch.manual_seed(0)
            subject = load_subject(target)
            model, call = subject.model, subject.calls[0]
            start = time.perf_counter()
            with Shadow(model) as shadow:
                with torch.autocast("cpu", low):
                    out = model(*call.args, **call.kwargs)
                outputs = {path: t for path, t in tensors(out) if t.is_floating_point()}
                usable = [t for t in outputs.values() if t.grad_fn is not None and bool(t.isfinite().all())]
                if usable:
                    (sum(t.float().pow(2).mean() for t in usable) * scale).backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            shadow.reach({**outputs, **dict(model.named_buffers())}, gradients)
            if not any(fault.kind == OVERFLOW and fault.where.phase == "backward" for fault in shadow.faults):
                break
        return {
            "scale": scale,
            "seconds": time.perf_counter() - start,
            "judged": shadow.judge.judged if shadow.judge else 0,
            "low": shadow.judge.low if shadow.judge else 0,
            "ops": shadow.ops,
            "gradients": len(gradients),
            "unruled": dict(shadow.unruled),
            "nonfinite": [str(where) for where in shadow.judge.nonfinite] if shadow.judge else [],
            "faults": [
                {"text": str(f), "kind": f.kind, "op": f.where.op, "where": str(f.where), "reaches": dict(f.reaches)}
                for f in shadow.faults
            ],
        }


def rows_of(entry: Entry, start: Start, done: set[tuple[str, str]], commit: str) -> list[dict[str, Any]]:
    """The rows of a model that are not done."""
    rows: list[dict[str, Any]] = []
    with start("shadow_zoo:Commands", name=entry.name, pythonpath=[Path(__file__).parent]) as worker:
        for dtype in ("float16", "bfloat16"):
            if (entry.name, dtype) not in done:
                row = {"model": entry.name, "dtype": dtype, "commit": commit}
                try:
                    row |= worker.ask("run", timeout=SECONDS, target=entry.target, dtype=dtype)
                except UsageError as error:  # a model that raises, or takes too long
                    row["error"] = str(error)[:300]
                rows.append(row)
    return rows


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The totals of all rows."""
    ran = [row for row in rows if "error" not in row]
    unruled = sum((Counter(row["unruled"]) for row in ran), Counter())
    return {
        "models": len({row["model"] for row in rows}),
        "runs": len(ran),
        "raised": len(rows) - len(ran),
        "ops": sum(row["ops"] for row in ran),
        "judged": sum(row["judged"] for row in ran),
        "without a rule": sum(unruled.values()),
        "runs with a fault that reaches": sum(any(f["reaches"] for f in row["faults"]) for row in ran),
        "seconds": round(sum(row["seconds"] for row in ran), 1),
        "unruled": dict(unruled),
    }


def table(rows: list[dict[str, Any]], judged: list[dict[str, str]]) -> Iterator[str]:
    """Every finding with its judgement, those of one op of a model together; then what raised."""
    known = {(e["model"], e["dtype"], e["check"], e["op"]): e for e in judged}
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        for fault in row.get("faults", ()):
            if fault["reaches"]:
                groups.setdefault((row["model"], row["dtype"], fault["kind"], fault["op"]), []).append(fault)
    unjudged = {"verdict": "not judged", "reason": "", "verified": ""}
    verdicts = Counter(known.get(key, unjudged)["verdict"] for key in groups)
    yield ", ".join(f"{name}: {value}" for name, value in summary(rows).items() if name != "unruled") + "."
    yield ""
    yield f"Findings by verdict: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items()) or 'none'}."
    yield ""
    yield "| model | dtype | check | op | places | first at | verdict | reason | verified |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for key, faults in sorted(groups.items()):
        entry = known.get(key, unjudged)
        cells = (*key, str(len(faults)), faults[0]["where"], entry["verdict"], entry["reason"], entry["verified"])
        yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
    yield ""
    yield "| raises | dtype | what |"
    yield "|---|---|---|"
    yield from (f"| {row['model']} | {row['dtype']} | {row['error']} |" for row in rows if "error" in row)


def main() -> None:
    """Run the models in processes, print what reaches a result, and write every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", help="as of `ampcheck sweep`")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--judged", type=Path, help="what a person found out about the findings")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the evidence has already")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*", metavar="PATTERN")
    options = parser.parse_args()
    judged = json.loads(options.judged.read_text()) if options.judged else []
    kept = options.resume and options.json.is_file()
    rows: list[dict[str, Any]] = json.loads(options.json.read_text())["rows"] if kept else []
    done = {(row["model"], row["dtype"]) for row in rows}
    every = {"float16", "bfloat16"}
    todo = [e for e in read_list(options.list, options.only) if {d for n, d in done if n == e.name} != every]
    for _, found in each(todo, partial(rows_of, done=done, commit=_commit()), jobs=options.jobs):
        rows += found
        for row in found:
            for fault in row.get("faults", ()):
                if fault["reaches"]:
                    share = {name: float(f"{value:.2g}") for name, value in list(fault["reaches"].items())[:2]}
                    print(f"{row['model']} {row['dtype']} {share}\n    {fault['text']}", flush=True)
            if "error" in row:
                print(f"{row['model']} {row['dtype']} raises {row['error']}", flush=True)
        write_evidence(options.json, {**summary(rows), "rows": rows}, table(rows, judged))
    print(json.dumps(summary(rows), indent=1))
    write_evidence(options.json, {**summary(rows), "rows": rows}, table(rows, judged))


if __name__ == "__main__":
    main()
