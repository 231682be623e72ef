"""What the compiled part of an audit costs beside `torch.compile` itself, with cold caches.

    python benchmarks/audit_compile_cost.py [SUBJECT ...] [--rounds 5]
        --evidence reports/evidence/audit_compile_cost.json

Every measurement is a process of its own with empty cache folders. Three arms in random order in each round: the eager
audit alone, which the other two do as well; then one compiled forward and backward; then the compiled audit in its
place. Ratios are medians over rounds of what the compiled audit took over what `torch.compile` took in the same round:
in seconds on the clock, and in CPU seconds of the process with its compilers beyond those of the eager audit alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence
from shadow_cost import Block, Residual
from torch import nn

from ampcheck import Subject
from ampcheck.compiled.accuracy.judge import accuracy_run, measure_compiled_run
from ampcheck.core.limits import Limits
from ampcheck.demo import subject as demo
from ampcheck.numerics.measure import Measured, measure_numerics
from ampcheck.numerics.run import run_subject
from ampcheck.torchtools.copying import prepare, recompiled

EAGER, COMPILED, AUDIT = "eager audit", "torch.compile", "compiled audit"


def block() -> Subject:
    """A block of a transformer, 256 wide, on 2 x 64 tokens."""
    return Subject((Block(256), torch.randn(2, 64, 256)), name="transformer block")


def convolutions() -> Subject:
    """A stem and two residual blocks with batch norm, on 4 images of 32 x 32."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), Residual(32, 32, 1), Residual(32, 64, 2))
    return Subject((model, torch.randn(4, 3, 32, 32)), name="residual blocks")


def perceptron() -> Subject:
    """Two layers with an activation between them."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return Subject((model, torch.randn(32, 64)), name="perceptron")


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "demo": demo,
    "block": block,
    "convolutions": convolutions,
    "perceptron": perceptron,
}


def compile_plainly(subject: Subject, eager: Measured) -> None:
    """Forward and backward as the audit runs them, compiled."""
    plan = eager.plan
    prepared = prepare(subject, device=plan.device)
    run_subject(prepared, plan, keep=True, transform=lambda prepared: recompiled(subject, prepared))


def child(arm: str, name: str, dtype: torch.dtype) -> None:
    """Run one arm in this process, and print the seconds of what comes behind the eager audit."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    subject = SUBJECTS[name]()
    eager = measure_numerics(subject, dtype, compared=True)
    start = time.perf_counter()
    if arm == COMPILED:
        compile_plainly(subject, eager)
    elif arm == AUDIT:
        stats = measure_compiled_run(subject, eager, dtype)
        run = accuracy_run(stats, Limits())
        assert stats.inside is not None, "the audit looked into no graph"
        assert stats.inside.sites, "the audit looked into no graph"
        assert not run.failed, "a healthy model failed"
    print(json.dumps(time.perf_counter() - start))


def measure(arm: str, name: str, dtype: str) -> tuple[float, float]:
    """Seconds on the clock of the compiled part, and CPU seconds of the whole process with those it started."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--child", arm, "--dtypes", dtype, name]
        before = os.times()
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return float(done.stdout.splitlines()[-1]), cpu


def row(name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Both ratios of one subject in one dtype."""
    wall: dict[str, list[float]] = {EAGER: [], COMPILED: [], AUDIT: []}
    cpu: dict[str, list[float]] = {EAGER: [], COMPILED: [], AUDIT: []}
    for _ in range(rounds):
        for arm in random.sample(sorted(wall), len(wall)):
            seconds, processor = measure(arm, name, dtype)
            wall[arm].append(seconds)
            cpu[arm].append(processor)
    beyond = {arm: [a - b for a, b in zip(cpu[arm], cpu[EAGER], strict=True)] for arm in (COMPILED, AUDIT)}

    def ratio(times: dict[str, list[float]]) -> list[float]:
        return sorted(round(a / b, 2) for a, b in zip(times[AUDIT], times[COMPILED], strict=True))

    return {
        "subject": name,
        "dtype": dtype,
        "times torch.compile, clock": statistics.median(ratio(wall)),
        "times torch.compile, CPU": statistics.median(ratio(beyond)),
        "torch.compile, s": round(statistics.median(wall[COMPILED]), 1),
        "compiled audit, s": round(statistics.median(wall[AUDIT]), 1),
        "torch.compile, CPU s": round(statistics.median(beyond[COMPILED]), 1),
        "compiled audit, CPU s": round(statistics.median(beyond[AUDIT]), 1),
        "ratios by the clock": ratio(wall),
        "ratios by CPU": ratio(beyond),
    }


def main() -> None:
    """Measure every subject in every dtype and write the evidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="of: " + ", ".join(SUBJECTS))
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--child", choices=(EAGER, COMPILED, AUDIT), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, dtypes = options.subjects or list(SUBJECTS), options.dtypes.split(",")
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"there is no subject {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    if options.child:
        child(options.child, names[0], getattr(torch, dtypes[0]))
        return
    rows = []
    for name in names:
        for dtype in dtypes:
            rows.append(row(name, dtype, options.rounds))
            print(rows[-1], flush=True)
    table = markdown_table(rows, list(rows[0])[:-2])
    print("\n".join(table))
    if options.evidence:
        write_evidence(options.evidence, {"rounds": options.rounds, "subjects": rows}, table)


if __name__ == "__main__":
    main()
