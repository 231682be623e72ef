"""What it costs to watch a training loop.

Run as `python benchmarks/bench_training.py [--rounds N] [--json PATH]`, or, one figure a test, as
`pytest benchmarks/bench_training.py`.

The step is the demo's: forward under autocast, backward, AdamW, with a GradScaler for float16. Each arm has a model,
an optimizer and a scaler of its own in one process: `plain` twice (their ratio is the noise), `every 10th` and `every`
step watched by `ampcheck.watch`. Round by round each arm runs a block of ten steps, in random order; the figure is the
median over the rounds of its time by that of the plain block of the same round. `cpu` is the same ratio of processor
time, which other programs on the machine disturb less.

Memory: the peak of the resident set over that after a plain warm-up, each arm in a process of its own; beside it the
bytes of the companions. `shadow` is a step under the shadow of `ampcheck.audit`. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from _evidence import markdown_table, write_evidence

import ampcheck
from ampcheck.demo import CharTransformer, batch

BLOCK = 10
FEWEST = 3
ARMS = {"plain": 0, "plain again": 0, "every 10th": 10, "every": 1}
DTYPES = ("bfloat16", "float16")


class Training:
    """The demo's training step with what it needs."""

    def __init__(self, dtype: str, **shape: int) -> None:
        torch.manual_seed(0)
        self.model = CharTransformer(**shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
        self._dtype, self._data = getattr(torch, dtype), batch(8, 64)

    def step(self, number: int = 0) -> float:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self._dtype):
            loss = self.model(*self._data)[1]
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())

    def watched(self, every: int) -> Any:
        scaler = self.scaler if self.scaler.is_enabled() else None
        return ampcheck.watch(self.model, self.optimizer, scaler, every=every, fail_on="never")


def paired(dtype: str, rounds: int, limit: float, shape: dict[str, int]) -> Iterator[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    busy: dict[str, list[float]] = {name: [] for name in ARMS}
    counted: dict[str, Any] = {}
    shuffled = random.Random(0)
    with ExitStack() as stack:
        trainings = {name: Training(dtype, **shape) for name in ARMS}
        seen = {name: stack.enter_context(trainings[name].watched(every)) for name, every in ARMS.items() if every}
        started = time.monotonic()
        for number in range(rounds + 1):
            if number > FEWEST and time.monotonic() - started > limit:
                break
            for name in shuffled.sample(list(ARMS), len(ARMS)):
                step = trainings[name].step
                begun, spent = time.perf_counter(), time.process_time()
                for _ in range(BLOCK):
                    step()
                if number:  # the first round warms up
                    seconds[name].append((time.perf_counter() - begun) / BLOCK)
                    busy[name].append(time.process_time() - spent)
        counted = {name: watched.stats.training for name, watched in seen.items()}
    for name in ARMS:
        ratios = sorted(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True))
        processor = statistics.median(a / b for a, b in zip(busy[name], busy["plain"], strict=True))
        stats = counted.get(name)
        yield {
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "arm": name,
            "ratio": round(statistics.median(ratios), 4),
            "low": round(ratios[len(ratios) // 4], 4),
            "high": round(ratios[-1 - len(ratios) // 4], 4),
            "cpu": round(processor, 4),
            "fastest": round(min(seconds[name]) / min(seconds["plain"]), 4),
            "ms": round(1e3 * statistics.median(seconds[name]), 2),
            "rounds": len(ratios),
            "measured": None if stats is None else f"{stats.measured} of {stats.steps}",
        }


def resident(key: str) -> int:
    """Bytes of the resident set, now (`VmRSS`) or at its peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def shadowed(training: Training) -> int:
    """Run a step under the shadow of the audit; the bytes of the companions that are alive afterwards."""
    from ampcheck.core.subject import Subject
    from ampcheck.training.loop import TrainingLoop
    from ampcheck.training.observed import Following

    shape = {"model": training.model, "optimizer": training.optimizer, "scaler": training.scaler, "step": training.step}
    loop = TrainingLoop(Subject(shape, name="demo"))
    following = Following(loop)
    with loop.preserved():
        with following.step(0):
            loop.take(0)
        return int(following.shadow.store.nbytes())


def peak(arm: str, dtype: str, shape: dict[str, int]) -> dict[str, Any]:
    """Of this process, which must be fresh: what an arm takes at its peak beyond the plain step."""
    training = Training(dtype, **shape)
    for number in range(3):
        training.step(number)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak so far
    companions = 0
    if arm == "shadow":
        companions = shadowed(training)
    elif ARMS[arm]:
        with training.watched(ARMS[arm]):
            for number in range(2 * BLOCK):
                training.step(number)
    else:
        for number in range(2 * BLOCK):
            training.step(number)
    weights = sum(p.nbytes for p in training.model.parameters())
    return {
        "dtype": dtype,
        "arm": arm,
        "peak MiB": round((resident("VmHWM") - before) / 2**20, 1),
        "companions MiB": round(companions / 2**20, 2),
        "weights MiB": round(weights / 2**20, 2),
    }


def peaks(dtype: str, shape: dict[str, int]) -> Iterator[dict[str, Any]]:
    for arm in ("plain", "every", "shadow"):
        command = [sys.executable, __file__, "--peak", arm, "--dtypes", dtype, "--shape", json.dumps(shape)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"no peak of {arm}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arm", ["plain", "every 10th", "every"])
def test_ten_steps(benchmark: Callable[..., Any], arm: str, dtype: str) -> None:
    training = Training(dtype)

    def block() -> None:
        for _ in range(BLOCK):
            training.step()

    with ExitStack() as stack:
        if ARMS[arm]:
            stack.enter_context(training.watched(ARMS[arm]))
        benchmark(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument(
        "--seconds", type=float, default=120.0, help=f"no new round after so many, but {FEWEST} at least"
    )
    parser.add_argument("--threads", default="1,2", help="each in turn")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--shape", type=json.loads, default={}, help="of the demo, such as '{\"width\": 256}'")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(options.peak, options.dtypes, options.shape)))
        return
    times, memory = [], []
    for dtype in options.dtypes.split(","):
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            times += list(paired(dtype, options.rounds, options.seconds, options.shape))
        memory += list(peaks(dtype, options.shape))
    text = "Ratios are medians over the rounds, with the quartiles; `fastest` divides the fastest blocks."
    lines = [
        text,
        "",
        *markdown_table(times),
        "",
        "Peak memory beyond that after a plain warm-up.",
        "",
        *markdown_table(memory),
    ]
    print("\n".join(lines))
    if options.json:
        write_evidence(options.json, {"times": times, "memory": memory}, lines)


if __name__ == "__main__":
    main()
