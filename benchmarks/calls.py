"""How many calls into ampcheck a watch and an audit make, counted with `sys.setprofile` in a new process each.

    python benchmarks/calls.py [--json reports/evidence/calls.json] [--most N]

`watch`: three steps of a two-layer MLP with autocast and GradScaler. `watch, parts given`: with model, optimizer
and scaler handed over. `audit`: a small model in float16, eager, without compilation. A call is a Python function of
`ampcheck/` that begins; imports are left out. With `--most` the files that begin most of them are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _evidence import write_evidence

import ampcheck

PACKAGE = str(Path(ampcheck.__file__).parent)


class Training:
    """Three steps of a two-layer MLP in float16 autocast."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def steps(self) -> None:
        model, optimizer, scaler = self.model, self.optimizer, self.scaler
        x = torch.randn(4, 8)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def watch() -> None:
    training = Training()
    with ampcheck.watch(fail_on="never"):
        training.steps()


def watch_with_parts() -> None:
    training = Training()
    with ampcheck.watch(training.model, training.optimizer, training.scaler, fail_on="never"):
        training.steps()


def audit() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    ampcheck.audit((model, (torch.randn(4, 8),)), dtype="float16", compile=False)


CASES = {"watch": watch, "watch, parts given": watch_with_parts, "audit": audit}


def counted(name: str) -> Counter[str]:
    """The calls of a case in this process, by file."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            calls[frame.f_code.co_filename[len(PACKAGE) + 1 :]] += 1

    sys.setprofile(note)
    try:
        CASES[name]()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        calls = counted(options.case)
        print(json.dumps(calls))
        return
    rows: list[dict[str, Any]] = []
    for name in CASES:
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
        calls = Counter(json.loads(done.stdout.splitlines()[-1]))
        rows.append({"case": name, "calls": calls.total(), "files": len(calls)})
        print(f"{name}: {calls.total():,} calls in {len(calls)} files")
        for file, count in calls.most_common(options.most):
            print(f"  {count:,} {file}")
    if options.json:
        table = ["| case | calls | files |", "|---|---|---|"]
        table += [f"| {row['case']} | {row['calls']:,} | {row['files']} |" for row in rows]
        write_evidence(options.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
