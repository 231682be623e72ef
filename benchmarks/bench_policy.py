"""What probing and emulating an autocast policy cost.

Run as `python benchmarks/bench_policy.py [--pairs N] [--json PATH]`, or, the probe only, as
`pytest benchmarks/bench_policy.py`.

Probe: `cold` is the first `measure_policy` of a fresh process that has imported torch, `warm` the median of the
following ones. Emulation: a training step (forward, loss, backward, AdamW) of the demo under `emulate("cuda")` against
the same step under the CPU's own autocast, one after the other in one process in alternating order; the figure is the
median of the paired ratios. `kernels` does the same with the CPU's own policy, every kernel of which is a Python one:
the cost of the mechanism without that of other dtypes. `per op` is the time that one small op takes longer. Entering
and leaving are timed apart. One thread. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from _evidence import markdown_table, write_evidence

from ampcheck import emulate
from ampcheck.autocast.emulate import Emulation, emulated_policy
from ampcheck.autocast.probe import measure_policy
from ampcheck.demo import CharTransformer, batch

DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia")
DTYPES = ("float16", "bfloat16")
PROBE = """
import time, torch
from ampcheck import measure_policy
begun = time.perf_counter()
measure_policy({device!r}, {dtype!r})
print(time.perf_counter() - begun)
"""


def probes(repeats: int) -> Iterator[dict[str, Any]]:
    for device in DEVICES:
        for dtype in DTYPES:
            code = PROBE.format(device=device, dtype=dtype)
            fresh = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
            measure_policy(device, dtype)
            warm = [_seconds(lambda d=device, t=dtype: measure_policy(d, t)) for _ in range(repeats)]
            policy = measure_policy(device, dtype)
            yield {
                "device": device,
                "dtype": dtype,
                "probed": len(policy.ops),
                "registered": policy.registered,
                "cold s": round(statistics.median(fresh), 3),
                "warm s": round(statistics.median(warm), 3),
            }


def training_step(seed: int = 0) -> Callable[[torch.dtype], None]:
    """One step of the demo; forward and loss under the CPU's autocast, whatever that is at the time."""
    torch.manual_seed(seed)
    model = CharTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    characters, targets = batch(8, 64)

    def step(dtype: torch.dtype) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            _, loss = model(characters, targets)
        loss.backward()
        optimizer.step()

    return step


def emulations(pairs: int) -> Iterator[dict[str, Any]]:
    own = emulated_policy("cpu")
    for dtype in (torch.float16, torch.bfloat16):
        for name, entered in (
            ("cuda", lambda: emulate("cuda")),
            ("kernels", lambda: Emulation(own, observe=_nothing)),
        ):
            step = training_step()
            times = list(paired(lambda s=step, t=dtype: s(t), entered, pairs))
            ratios = sorted(inside / plain for plain, inside in times)
            yield {
                "arm": name,
                "dtype": str(dtype).removeprefix("torch."),
                "ratio": round(statistics.median(ratios), 3),
                "p25": round(ratios[len(ratios) // 4], 3),
                "p75": round(ratios[3 * len(ratios) // 4], 3),
                "plain ms": round(1e3 * statistics.median(plain for plain, _ in times), 2),
                "pairs": pairs,
            }


def per_op(repeats: int) -> Iterator[dict[str, Any]]:
    small = torch.ones(4, 4)
    for name, call in (
        ("matmul, kept kernel", lambda: small @ small),
        ("mv, Python kernel", lambda: torch.mv(small, small[0])),
        ("softmax, Python kernel", lambda: small.softmax(-1)),
        ("exp, Python kernel", lambda: small.exp()),
        ("add, no rule", lambda: small + small),
    ):

        def many(call: Callable[[], Any] = call) -> None:
            with torch.autocast("cpu", torch.float16):
                for _ in range(200):
                    call()

        times = list(paired(many, lambda: emulate("cuda"), repeats))
        yield {
            "op": name,
            "plain us": round(5e3 * statistics.median(plain for plain, _ in times), 2),
            "added us": round(5e3 * statistics.median(inside - plain for plain, inside in times), 2),
        }


def paired(
    call: Callable[[], Any], entered: Callable[[], AbstractContextManager[Any]], pairs: int
) -> Iterator[tuple[float, float]]:
    """Seconds of the call without and within the context, entering not counted, in alternating order."""
    for number in range(pairs + 1):
        found = {}
        for inside in (False, True) if number % 2 else (True, False):
            if inside:
                with entered():
                    found[inside] = _seconds(call)
            else:
                found[inside] = _seconds(call)
        if number:  # the first pair warms up
            yield found[False], found[True]


def entering(repeats: int) -> dict[str, float]:
    """Milliseconds to enter and leave an emulation whose policy is known."""
    with emulate("cuda"):
        pass

    def enter() -> None:
        with emulate("cuda"):
            pass

    return {"enter and leave ms": round(1e3 * statistics.median(_seconds(enter) for _ in range(repeats)), 2)}


def _nothing(*call: Any) -> None:
    """An observer, for the sake of whom every kernel is a Python one."""


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@pytest.mark.parametrize("device", DEVICES)
def test_probing_a_policy(benchmark: Any, device: str) -> None:
    benchmark(measure_policy, device, "float16")


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (*markdown_table(rows), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of training steps an arm (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = {
        "probe": list(probes(5)),
        "training step": list(emulations(options.pairs)),
        "per op": list(per_op(options.pairs)),
        "entering": [entering(9)],
    }
    lines = [line for title, rows in data.items() for line in (f"## {title}", "", *_table(rows))]
    print("\n".join(lines))
    if options.json:
        write_evidence(options.json, data, lines)


if __name__ == "__main__":
    main()
