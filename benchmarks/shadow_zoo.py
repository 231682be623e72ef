"""Every model of a zoo under shadows, float16 and bfloat16, forward and backward: the false alarms, and what they cost.

    python benchmarks/shadow_zoo.py ../shared/zoo --json shadow_zoo.json [--jobs 2] [--only TEXT]

A zoo is a folder whose module `zoo` has `ZOO`, names to functions that return `(model, args, kwargs)`. float16 runs at
the loss scales that `GradScaler` goes through, until no gradient overflows. The report lists every fault that reaches
an output or a gradient; whether it is a defect is for a person to judge.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ampcheck.shadow import Shadow
from ampcheck.shadow.faults import OVERFLOW
from ampcheck.torchtools.pytree import tensors

SCALES = (65536.0, 1024.0, 16.0, 1.0)
SECONDS = 120


def run_model(build: Any, low: torch.dtype) -> dict[str, Any]:
    """One forward and backward of one model under the shadow."""
    for scale in SCALES if low is torch.float16 else (1.0,):
        torch.manual_seed(0)
        model, args, kwargs = build()
        start = time.perf_counter()
        with Shadow(model) as shadow:
            with torch.autocast("cpu", low):
                out = model(*args, **kwargs)
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
        "faults": [{"text": str(f), "kind": f.kind, "reaches": dict(f.reaches)} for f in shadow.faults],
    }


def run_part(folder: str, part: int, parts: int, only: str, queue: Any) -> None:
    """Every `parts`-th model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)
    models = importlib.import_module("zoo").ZOO
    signal.signal(signal.SIGVTALRM, _late)
    for name in [n for i, n in enumerate(models) if i % parts == part and only in n]:
        for low in (torch.float16, torch.bfloat16):
            row = {"model": name, "dtype": str(low).removeprefix("torch.")}
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # of this process: the machine may be busy
            try:
                row |= run_model(models[name], low)
            except Exception as error:  # noqa: BLE001  # a model that raises must not end the sweep
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            queue.put(row)
            gc.collect()
    queue.put(None)


def _late(*_: object) -> None:
    raise TimeoutError(f"{SECONDS} s")


def main() -> None:
    """Run the models in processes, print what reaches a result, and write every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for part in range(options.jobs):
        arguments = (str(options.zoo), part, options.jobs, options.only, queue)
        context.Process(target=run_part, args=arguments, daemon=True).start()
    rows: list[dict[str, Any]] = []
    running = options.jobs
    while running:
        row = queue.get()
        if row is None:
            running -= 1
            continue
        rows.append(row)
        for fault in row.get("faults", ()):
            if fault["reaches"]:
                share = {name: float(f"{value:.2g}") for name, value in list(fault["reaches"].items())[:2]}
                print(f"{row['model']} {row['dtype']} {share}\n    {fault['text']}", flush=True)
        if "error" in row:
            print(f"{row['model']} {row['dtype']} raises {row['error']}", flush=True)
    unruled = sum((Counter(row.get("unruled", {})) for row in rows), Counter())
    ran = [row for row in rows if "error" not in row]
    summary = {
        "command": "python benchmarks/shadow_zoo.py ZOO --json FILE",
        "torch": torch.__version__,
        "models": len({row["model"] for row in rows}),
        "runs": len(ran),
        "raised": len(rows) - len(ran),
        "ops": sum(row["ops"] for row in ran),
        "judged": sum(row["judged"] for row in ran),
        "without a rule": sum(unruled.values()),
        "runs with a fault that reaches": sum(any(f["reaches"] for f in row["faults"]) for row in ran),
        "seconds": round(sum(row["seconds"] for row in ran), 1),
    }
    print(json.dumps(summary, indent=1), dict(unruled.most_common(20)))
    options.json.write_text(json.dumps({**summary, "unruled": dict(unruled), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
