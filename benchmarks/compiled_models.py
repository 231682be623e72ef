"""Judge many models compiled, and keep the outcome as evidence: accuracy, graphs, telemetry.

    python benchmarks/compiled_models.py ../shared/zoo --models 60 --json reports/evidence/zoo_judged.json

Each model runs under CPU autocast, forward and backward: `assert_compiled` (accuracy, then graphs),
and `watch` around one compiled step. Nothing is judged here beyond what these say; a crash of ampcheck is a row of its
own.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence
from _models import add_models, models

from ampcheck import Run, Subject, UsageError, Verdict, assert_compiled, watch
from ampcheck.compiled.accuracy.checks import CHECKS as ACCURACY_CHECKS
from ampcheck.compiled.graph.checks import GRAPH_CHECKS
from ampcheck.core.run import collect
from ampcheck.core.subject import name_of_target
from ampcheck.tools.sweep.listing import Entry


def judged(call: Callable[[], Run]) -> dict[str, Any]:
    """The outcome of one assertion: verdicts, coverage, the first of what is wrong."""
    begun = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        with warnings.catch_warnings(), collect() as runs:
            warnings.simplefilter("ignore")  # of the packages of the zoo
            try:
                run = call()
            except AssertionError:
                run = runs[-1]
        found["verdicts"] = {str(verdict): count for verdict, count in run.counts().items() if count}
        found["coverage"] = dict(run.coverage.seen)
        found["unseen"] = dict(run.coverage.unseen)
        for verdict in (Verdict.FAIL, Verdict.WARN):
            found[str(verdict)] = [
                {"check": f.check, "where": str(f.where), "message": f.message} for f in run.of(verdict)
            ]
    except UsageError as error:
        found["usage error"] = str(error)
    except Exception:  # noqa: BLE001  # a crash of ampcheck on a real model is what this script looks for
        found["crash"] = traceback.format_exc()[-2000:]
    found["seconds"] = round(time.perf_counter() - begun, 1)
    return found


def watched(subject: Subject, dtype: torch.dtype) -> Run:
    """One compiled step under `watch`."""
    model, call = subject.model, subject.calls[0]
    compiled = torch.compile(model)
    with watch(compiled, name=subject.name, fail_on="never") as seen:
        with torch.autocast("cpu", dtype):
            result = compiled(*call.args, **call.kwargs)
        loss = total(result)
        if loss is not None:
            loss.backward()
    return seen.run


def total(result: Any) -> torch.Tensor | None:
    """The mean of squares of every floating output that has a gradient."""
    from ampcheck.torchtools.pytree import tensors

    parts = [t.float().square().mean() for _, t in tensors(result) if t.is_floating_point() and t.requires_grad]
    return sum(parts[1:], parts[0]) if parts else None


def row(entry: Entry, subject: Subject, dtype: str) -> dict[str, Any]:
    low = getattr(torch, dtype)
    found: dict[str, Any] = {"name": name_of_target(entry.target), "family": entry.family}
    found["compiled"] = judged(lambda: assert_compiled(subject, dtype=dtype, checks=tuple(ACCURACY_CHECKS)))
    found["graph"] = judged(lambda: assert_compiled(subject, dtype=dtype, checks=GRAPH_CHECKS))
    found["telemetry"] = judged(lambda: watched(subject, low))
    return found


PARTS = ("compiled", "graph", "telemetry")


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    total = Counter({"models": len(rows)})
    for part in PARTS:
        for found in (one.get(part, {}) for one in rows):
            total[f"{part}: crashed"] += "crash" in found
            total[f"{part}: usage error"] += "usage error" in found
            total[f"{part}: failed"] += bool(found.get("fail"))
            total[f"{part}: warned only"] += bool(found.get("warn")) and not found.get("fail")
    yield ", ".join(f"{count} {what}" for what, count in total.items()) + "."
    yield ""
    yield "| model | family | accuracy | graphs judged | telemetry | graphs | sites | s | first failures |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in rows:
        cells = [one["name"], one["family"]]
        notes = []
        for part in PARTS:
            found = one.get(part, {})
            cells.append(" ".join(f"{count} {verdict}" for verdict, count in found.get("verdicts", {}).items()) or "-")
            first = found.get("crash", "").strip().rpartition("\n")[2] or found.get("usage error", "")
            if found.get("fail"):
                first = f"{found['fail'][0]['check']} at {found['fail'][0]['where']}"
            if first:
                notes.append(f"{part}: {first}")
        seen = one.get("telemetry", {}).get("coverage", {})
        seconds = sum(one.get(part, {}).get("seconds", 0.0) for part in PARTS)
        cells += [str(seen.get("graphs", 0)), str(seen.get("sites", 0)), f"{seconds:.0f}"]
        yield "| " + " | ".join([*cells, "; ".join(notes).replace("|", "/")[:300]]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="NAME", help="models that take too long here")
    parser.add_argument("--dtype", default="bfloat16", help="what autocast casts to (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--resume", action="store_true", help="leave out the models that the evidence has already")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    kept = options.json if options.resume else None
    rows: list[dict[str, Any]] = json.loads(kept.read_text())["rows"] if kept is not None and kept.is_file() else []
    done = {one["name"] for one in rows}
    left: list[str] = []
    for entry, subject in models(options, left):
        name = name_of_target(entry.target)
        if name in done or name in options.leave_out:
            continue
        rows.append(row(entry, subject, options.dtype))
        facts = {part: rows[-1].get(part, {}).get("verdicts", rows[-1].get(part)) for part in PARTS}
        print(name, str(facts)[:300], flush=True)
        if options.json:
            write_evidence(options.json, {"rows": rows}, markdown(rows))
    lines = list(markdown(rows))
    lines[1:1] = left
    print(lines[0])
    if options.json:
        write_evidence(options.json, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
