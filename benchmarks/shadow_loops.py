"""Memory and cost of long loops under `watch()` and under the shadow: neither may grow from step to step.

    python benchmarks/shadow_loops.py --evidence reports/evidence/shadow_loops.json [--steps 5000]

Each block trains a small model in a process of its own. Every step is followed by a plain one of a second model,
outside of the block: the cost of a step is the ratio of their processor times. Its medians over the first and the last
tenth of the steps are compared, and the resident set after the first tenth with that at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import ampcheck
from ampcheck.shadow import Shadow

BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "watch()": lambda: ampcheck.watch(fail_on="never"),
    "Shadow()": Shadow,
}


def _trainer() -> Callable[[], float]:
    """A step of a small model under bfloat16 autocast, which returns its processor time in seconds."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> float:
        start = time.thread_time()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        return time.thread_time() - start

    return step


def _resident() -> float:
    """Resident set of this process in MiB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measured(name: str, steps: int) -> dict[str, Any]:
    """The cost of steps over plain ones and the resident set, at the beginning and at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    followed, plain, tenth = _trainer(), _trainer(), steps // 10
    ratios, resident = list[float](), list[float]()
    with BLOCKS[name]():
        for number in range(steps):
            duration = followed()
            with _disable_current_modes():
                ratios.append(duration / plain())
            if (number + 1) % tenth == 0:
                resident.append(round(_resident(), 1))
    return {
        "block": name,
        "steps": steps,
        "times a plain step, first tenth": round(statistics.median(ratios[1:tenth]), 2),
        "times a plain step, last tenth": round(statistics.median(ratios[-tenth:]), 2),
        "resident MiB after each tenth": resident,
    }


def main() -> None:
    """Measure both blocks and write the evidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--measure", metavar="BLOCK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure, options.steps)))
        return
    rows = []
    for name in BLOCKS:
        command = [sys.executable, __file__, "--measure", name, "--steps", str(options.steps)]
        child = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
        rows.append(json.loads(child.stdout.splitlines()[-1]))
    table = markdown_table(rows)
    print("\n".join(table))
    if options.evidence:
        write_evidence(options.evidence, {"loops": rows}, table)


if __name__ == "__main__":
    main()
