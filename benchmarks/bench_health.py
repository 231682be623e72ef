"""Read rate of ampcheck.health against `copy_`, plain torch, and the statistics of hook-based detectors.

Run as `python benchmarks/bench_health.py [--json PATH]`, or, one size only, as `pytest benchmarks/bench_health.py`.

Every figure is a median of paired ratios: `copy_` and the candidate run one after the other in one process, in
alternating order, so that drift of the machine falls on both alike. A ratio of 1 means that the candidate reads its
tensor as fast as `copy_` does; times alone are given for orientation. One thread. Nothing is asserted.

Candidates: `health`, all statistics; `health, all kinds`, the same where every block of the tensor holds zeros,
subnormals, infinities and NaNs, so that nothing can be left out; `histogram`, with what can be added on top;
`health, read`, the record itself, which is what synchronises; `plain torch`, the statistics of `health` with one call
each; `hooks`, what transformers'
DebugUnderflowOverflow computes of a tensor: isnan().any(), isinf().any(), abs().min(), abs().max(). All but `health,
all kinds` see normally distributed values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcheck.core.environment import environment
from ampcheck.health import health_of, measure_health

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)  # bytes
LARGE = 64 << 20  # from here on a tensor is well beyond the second-level cache
BUDGET = {"cpu": 4 << 30, "cuda": 256 << 30}  # bytes that one candidate reads at most
TARGETS = {
    # copy_ moves two bytes for each that it reads; the rate of the memory is what a kernel that only reads can reach.
    "cuda": {"health": {"float32": 1.8, "bfloat16": 1.8, "float16": 1.8}},
}
"""A CPU has none: there it counts what a watched step costs (`bench_training.py`)."""


def plain_torch(x: torch.Tensor) -> list[float]:
    """The statistics of `health`, one call each, as one would write them."""
    magnitude = x.abs()
    finite = x.isfinite()
    tiny = torch.finfo(x.dtype).tiny
    return [
        (x == 0).sum().item(),
        ((magnitude < tiny) & (magnitude > 0)).sum().item(),
        x.isinf().sum().item(),
        x.isnan().sum().item(),
        torch.where(finite, magnitude, 0).amax().item(),
        torch.where(finite & (magnitude > 0), magnitude, torch.inf).amin().item(),
        torch.where(finite, x, 0).double().square().sum().item(),
    ]


def hooks(x: torch.Tensor) -> list[float]:
    """transformers.debug_utils: detect_overflow and get_abs_min_max."""
    magnitude = x.abs()
    return [x.isnan().any().item(), x.isinf().any().item(), magnitude.min().item(), magnitude.max().item()]


def candidates(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    mixed = x.clone()
    for place, value in enumerate((0.0, torch.finfo(x.dtype).smallest_normal / 2, torch.inf, torch.nan)):
        mixed[place::64] = value
    return {
        "health": lambda: measure_health(x),
        "health, all kinds": lambda: measure_health(mixed),
        "histogram": lambda: measure_health(x, histogram=True),
        "health, read": lambda: health_of(x),
        "plain torch": lambda: plain_torch(x),
        "hooks": lambda: hooks(x),
    }


def clock(device: str) -> Callable[[Callable[[], object], int], float]:
    """A function that runs another so many times and returns the seconds of one."""

    def on_cpu(function: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats

    def on_cuda(function: Callable[[], object], repeats: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    return on_cuda if device == "cuda" else on_cpu


def paired(first: Callable[[], object], second: Callable[[], object], rounds: int, repeats: int, device: str) -> Any:
    """Median of time(first) / time(second) over the pairs, its quartiles, and the median times."""
    run = clock(device)
    run(first, 1), run(second, 1)
    pairs = []
    for turn in range(rounds):
        if turn % 2:
            b, a = run(second, repeats), run(first, repeats)
        else:
            a, b = run(first, repeats), run(second, repeats)
        pairs.append((a, b))
    low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return middle, (low, high), times


def measure(device: str, sizes: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    for dtype in DTYPES:
        for size in sizes:
            x = torch.randn(size // dtype.itemsize, device=device).to(dtype)
            y = torch.empty_like(x)
            repeats = max(1, (1 << 20) // size) if device == "cpu" else max(1, (64 << 20) // size)
            for name, function in candidates(x).items():
                slow = name in ("plain torch", "hooks") and size >= LARGE
                turns = max(5, min(rounds // 4 if slow else rounds, BUDGET[device] // size))
                ratio, quartiles, (copy, own) = paired(lambda x=x, y=y: y.copy_(x), function, turns, repeats, device)
                yield {
                    "dtype": str(dtype).removeprefix("torch."), "bytes": size, "candidate": name, "pairs": turns,
                    "ratio": ratio, "quartiles": quartiles, "microseconds": own * 1e6, "copy_microseconds": copy * 1e6,
                    "target": TARGETS.get(device, {}).get(name, {}).get(str(dtype).removeprefix("torch."))
                    if size >= LARGE else None,
                }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    rate = row["bytes"] / row["microseconds"] / 1e3
    target = row["target"]
    verdict = "" if target is None else f"  target {target:g}: {'met' if row['ratio'] >= target else 'MISSED'}"
    return (
        f"{row['dtype']:>9} {row['bytes'] / 1024:>9,.0f} KiB  {row['candidate']:<17} {row['ratio']:>7.3f} of copy_"
        f"  [{row['quartiles'][0]:.3f}, {row['quartiles'][1]:.3f}]  {rate:>8.2f} GB/s"
        f" {row['microseconds']:>11,.1f} us{verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=40, help="pairs for each figure, where time allows (default: 40)")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="BYTES")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the evidence here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for row in measure(options.device, options.sizes, options.rounds):
        print(describe(row), flush=True)
        rows.append(row)
    if options.json:
        given = " ".join(sys.argv[1:] if arguments is None else arguments)
        evidence = {
            "what": "read rate of ampcheck.health as a share of copy_'s: medians of paired, interleaved ratios",
            "command": f"python benchmarks/bench_health.py {given}",
            "environment": environment(options.device),
            "rows": rows,
        }
        options.json.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["copy_", "health", "hooks"])
@pytest.mark.usefixtures("one_thread")
def test_one_mebibyte(benchmark: Callable[[Callable[[], object]], object], name: str, dtype: torch.dtype) -> None:
    x = torch.randn((1 << 20) // dtype.itemsize).to(dtype)
    y = torch.empty_like(x)
    benchmark.group = str(dtype)  # type: ignore[attr-defined]
    benchmark({**candidates(x), "copy_": lambda: y.copy_(x)}[name])


if __name__ == "__main__":
    main()
