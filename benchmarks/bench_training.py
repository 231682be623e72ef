"""What it costs to watch a training loop.

Run as `python benchmarks/bench_training.py [--rounds N] [--json PATH]`, or, one figure a test, as
`pytest benchmarks/bench_training.py`.

The step is the demo's: forward under autocast, backward, AdamW, with a GradScaler for float16. Each arm has a model,
an optimizer and a scaler of its own: `plain` twice (their ratio is the noise), `every 10th` and `every` step watched by
`ampcheck.watch`. Round by round each arm runs a block of ten steps, in random order; the figure is the median over the
rounds of its time by that of the plain block of the same round. Where an arm's tensors lie in memory makes it faster or
slower by up to a percent as long as its process lives: the rounds are those of several processes, which build the arms
in random order, and the medians of each show what is left of that. `cpu` is the same ratio of processor time, which
other programs on the machine disturb less.

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
        return ampcheck.watch(self.model, self.optimizer, scaler, every=every, exact=False, fail_on="never")


def blocks(dtype: str, rounds: int, limit: float, shape: dict[str, int], seed: int) -> dict[str, Any]:
    """Seconds and processor seconds of a step, by arm and round, of this process, which must be fresh.

    seed: of the order of the arms, also of the order in which they are built.
    """
    shuffled = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    busy: dict[str, list[float]] = {name: [] for name in ARMS}
    with ExitStack() as stack:
        trainings = {name: Training(dtype, **shape) for name in shuffled.sample(list(ARMS), len(ARMS))}
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
                    busy[name].append((time.process_time() - spent) / BLOCK)
        stats = {name: watched.stats.training for name, watched in seen.items()}
    counts = {name: (training.measured, training.steps) for name, training in stats.items() if training is not None}
    return {"seconds": seconds, "busy": busy, "measured": counts}


def paired(
    dtype: str, threads: int, processes: int, rounds: int, limit: float, shape: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """The ratios of every arm, of the rounds of all processes."""
    share = -(-rounds // processes), limit / processes
    results = [
        _child("--blocks", str(seed), "--threads", str(threads), "--rounds", str(share[0]), "--seconds", str(share[1]),
               "--dtypes", dtype, "--shape", json.dumps(shape))
        for seed in range(processes)
    ]  # fmt: skip
    seconds, busy, counts = ([result[key] for result in results] for key in ("seconds", "busy", "measured"))

    def ratios(times: list[dict[str, list[float]]], name: str) -> list[list[float]]:
        return [[a / b for a, b in zip(arms[name], arms["plain"], strict=True)] for arms in times]

    for name in ARMS:
        by_process = ratios(seconds, name)
        every = sorted(ratio for values in by_process for ratio in values)
        medians = [statistics.median(values) for values in by_process]
        measured = [sum(numbers) for numbers in zip(*(count[name] for count in counts if name in count), strict=True)]
        fastest = [min(arms[name]) / min(arms["plain"]) for arms in seconds]
        yield {
            "dtype": dtype,
            "threads": threads,
            "arm": name,
            "ratio": round(statistics.median(every), 4),
            "low": round(every[len(every) // 4], 4),
            "high": round(every[-1 - len(every) // 4], 4),
            "of each process": " ".join(f"{median:.4f}" for median in sorted(medians)),
            "cpu": round(statistics.median(ratio for values in ratios(busy, name) for ratio in values), 4),
            "fastest": round(statistics.median(fastest), 4),
            "ms": round(1e3 * statistics.median(value for arms in seconds for value in arms[name]), 2),
            "rounds": len(every),
            "measured": "{} of {}".format(*measured) if measured else None,
        }


def _child(*arguments: str) -> Any:
    """What this script prints in a process of its own, with these arguments."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def resident(key: str) -> int:
    """Bytes of the resident set, now (`VmRSS`) or at its peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def shadowed(training: Training) -> int:
    """Run a step under the shadow of the audit; the bytes of the companions that are alive afterwards."""
    from ampcheck.core.subject import Subject
    from ampcheck.training.loop import TrainingLoop
    from ampcheck.training.observed import Following
    from ampcheck.training.protocol.recorder import Recorder

    shape = {"model": training.model, "optimizer": training.optimizer, "scaler": training.scaler, "step": training.step}
    loop = TrainingLoop(Subject(shape, name="demo"))
    following = Following(loop, Recorder(loop))
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
        try:
            yield _child("--peak", arm, "--dtypes", dtype, "--shape", json.dumps(shape))
        except subprocess.CalledProcessError as error:  # noqa: PERF203  # where a system does not tell its peaks
            print(f"no peak of {arm}: {error.stderr.strip().splitlines()[-1]}", file=sys.stderr)


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
    parser.add_argument("--rounds", type=int, default=24, help="of all processes together")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help=f"no new round after so many, but {FEWEST} in each process"
    )
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--threads", default="1,2", help="each in turn")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--shape", type=json.loads, default={}, help="of the demo, such as '{\"width\": 256}'")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, metavar="SEED", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(options.peak, options.dtypes, options.shape)))
        return
    if options.blocks is not None:
        torch.set_num_threads(int(options.threads))
        limits = options.rounds, options.seconds
        print(json.dumps(blocks(options.dtypes, *limits, options.shape, options.blocks)))
        return
    times, memory = [], []
    for dtype in options.dtypes.split(","):
        for threads in map(int, options.threads.split(",")):
            times += list(paired(dtype, threads, options.processes, options.rounds, options.seconds, options.shape))
        memory += list(peaks(dtype, options.shape))
    text = "Ratios are medians over the rounds, with the quartiles; `fastest` divides the fastest blocks of a process."
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
