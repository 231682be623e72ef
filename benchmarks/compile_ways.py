"""What each way to call torch.compile costs until the first result, and what it gains afterwards.

    python benchmarks/compile_ways.py [--rounds 5] [--budget 30] [--json reports/evidence/compile_ways_cpu.json]

Cold starts: in each round a fresh process for every way, in random order, with cache folders of its own. Seconds are of
a processor, with the C++ compiler. Times the default: the median over rounds of what a way takes over what the
default takes in the same round, with the least and the largest, which of five rounds are an interval at 94 per cent.
Steady state: all ways in turn in one process, paired with eager mode. The model is the demo's, two blocks of width 128.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _evidence import markdown_table, write_evidence
from bench_compile_cost import ProcessorClock

from ampcheck.demo import CharTransformer, batch
from ampcheck.speed.compiling import many_compilations
from ampcheck.speed.paired import measure_speed
from ampcheck.speed.verdict import paired_ratio

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "fullgraph=True": {"fullgraph": True},
    "dynamic=True": {"dynamic": True},
    "dynamic=False": {"dynamic": False},
}
"""Modes are compared by `bench_matrix.py`."""


def step(options: dict[str, Any] | None) -> Callable[[], object]:
    """A forward pass of the demo's model, eager without options."""
    torch.manual_seed(0)
    model, args = CharTransformer(layers=2, width=128).eval(), batch(4, 48)
    called: Any = model if options is None else torch.compile(model, **options)

    def forward() -> object:
        with torch.no_grad():
            return called(*args)

    return forward


def cold(way: str) -> float:
    """Seconds of a processor up to the first result, in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory(prefix="ampcheck-") as folder:
        env = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, "--first", way]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    return float(done.stdout)


def first(way: str) -> float:
    forward, start = step(WAYS[way]), processor()
    forward()
    return processor() - start


def processor() -> float:
    """Seconds of a processor that this process and its ended children took."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measured(rounds: int, budget: float) -> list[dict[str, Any]]:
    """A row for each way."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in random.Random(number).sample(list(WAYS), len(WAYS)):
            seconds[way].append(cold(way))
        print(f"round {number + 1} of {rounds}", flush=True)
    with many_compilations("cpu"):
        arms = {"eager": step(None), **{way: step(options) for way, options in WAYS.items()}}
        times = measure_speed(arms, subject="demo", device="cpu", budget=budget, clock=ProcessorClock())
    rows = []
    for way, own in seconds.items():
        beside = [mine / default for mine, default in zip(own, seconds["default"], strict=True)]
        gain = paired_ratio(times.reference, times.arm(way))
        rows.append(
            {
                "way": way,
                "cold, CPU s": round(median(own), 2),
                "times the default": round(median(beside), 3),
                "from": round(min(beside), 3),
                "to": round(max(beside), 3),
                "times eager": round(gain.median, 3),
                "gain from": round(gain.low, 3),
                "gain to": round(gain.high, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of timed blocks (%(default)g)")
    parser.add_argument("--json", type=Path, default=Path("reports/evidence/compile_ways_cpu.json"))
    parser.add_argument("--first", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first:
        print(first(options.first))
        return
    rows = measured(options.rounds, options.budget)
    prose = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
    write_evidence(options.json, {"rounds": options.rounds, "rows": rows}, [prose, "", *markdown_table(rows)])


if __name__ == "__main__":
    main()
