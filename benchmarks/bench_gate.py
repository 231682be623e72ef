"""Does the gate of speed keep its word? False alarms, power and spread, simulated and on this machine.

Five figures: the coefficient of variation of an A/A ratio; false alarms among suites of 20 benchmarks without any
change, simulated, and among A/A gates measured here; the share of slowdowns of 5 % that are found within 10 s; of 10 %
within 3 s. A slowdown is planted as counted work: 21 or 22 equal units where the base has 20.

    python benchmarks/bench_gate.py --out reports/evidence/bench_gate.json
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _evidence import write_evidence

from ampcheck import Verdict
from ampcheck.records.speed import LOOKS, Rule, SpeedStats
from ampcheck.speed.paired import measure_speed
from ampcheck.speed.verdict import Logs, decide, is_decided, log_ratios, median_bounds

SUITE = 20
UNITS = 20
RULE = Rule(comparisons=SUITE)
Step = Callable[[], object]
Unit = Callable[[torch.Tensor], torch.Tensor]


# Simulation -----------------------------------------------------------------------------------------------------------


def noises(random: np.random.Generator, cycles: int) -> Iterator[tuple[str, Logs, Logs]]:
    """Log-ratios of an arm and of the twin without any difference, float64 [cycles], per family of noise."""

    def pair(draw: Callable[[], Logs], own: Logs | float = 0.0) -> tuple[Logs, Logs]:
        reference = draw()
        return reference - draw() + own, reference - draw()

    yield "normal", *pair(lambda: random.normal(0, 0.03, cycles))
    yield "heavy tails", *pair(lambda: 0.02 * random.standard_t(2, cycles))
    yield (
        "preemption",
        *pair(lambda: random.normal(0, 0.01, cycles) + random.exponential(1, cycles) * (random.random(cycles) < 0.1)),
    )
    # Other work comes and goes for tens of cycles, and disturbs each block of them by itself.
    busy = np.repeat(random.random(-(-cycles // 25)) < 0.3, 25)[:cycles]
    yield "bursts", *pair(lambda: random.normal(0, 0.01, cycles) + busy * random.gamma(2, 0.1, cycles))
    yield "layout", *pair(lambda: random.normal(0, 0.02, cycles), own=random.normal(0, 0.007))


def sequential(arm: Logs, twin: Logs, rule: Rule = RULE, looks: tuple[float, ...] = LOOKS) -> Verdict:
    """What a gate says that looks at a growing part of the data and stops when it is decided."""
    verdict = Verdict.UNDECIDED
    for share in looks:
        seen = math.ceil(share * len(arm))
        verdict = decide(arm[:seen], twin[:seen], rule).verdict
        if verdict is not Verdict.UNDECIDED:
            break
    return verdict


def simulate(suites: int, seed: int = 0) -> dict[str, Any]:
    """Suites of 20 gates without a change, each gate of one family of noise and one length."""
    random = np.random.default_rng(seed)
    failed = 0
    verdicts: dict[str, Counter[str]] = {}
    for _ in range(suites):
        alarms = 0
        for gate in range(SUITE):
            cycles = int(random.integers(15, 400))
            name, arm, twin = next(itertools.islice(noises(random, cycles), gate % 5, None))
            verdict = sequential(arm, twin)
            verdicts.setdefault(name, Counter())[verdict.value] += 1
            alarms += verdict is Verdict.FAIL
        failed += alarms > 0
    return {
        "suites": suites,
        "suites that fail": failed,
        "share": failed / suites,
        "verdicts by noise": {name: dict(count) for name, count in verdicts.items()},
    }


# On this machine ------------------------------------------------------------------------------------------------------


def unit(kind: str, device: str) -> tuple[torch.Tensor, Callable[[], Unit]]:
    """An input and what makes a unit of work, whose values stay where they are: each of a chain costs the same."""
    if kind == "layers":  # weights of their own, 0.7 MiB in 20: what of them is still cached is part of the time

        def layer() -> Unit:
            linear = torch.nn.Linear(96, 96, device=device)
            return lambda x: torch.nn.functional.gelu(torch.nn.functional.layer_norm(linear(x), (96,)))

        return torch.randn(16, 96, device=device), layer
    one: Unit
    if kind == "convolution":
        convolution = torch.nn.Conv2d(8, 8, 3, padding=1).to(device)
        x, one = torch.randn(2, 8, 32, 32, device=device), lambda x: torch.tanh(convolution(x))
    elif kind == "elementwise":
        other = torch.randn(64, 512, device=device)
        x, one = torch.randn(64, 512, device=device), lambda x: torch.tanh(x + other)
    else:
        weight = torch.randn(128, 128, device=device) / 128**0.5
        x, one = torch.randn(256, 128, device=device), lambda x: torch.tanh(x @ weight)
    return x, lambda: one


def chain(kind: str, units: int, device: str) -> Step:
    """A step of `units` equal units of work, with memory of its own; compiled again where that is its kind."""
    x, make = unit(kind, device)
    ones = [make() for _ in range(units)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for one in ones:
            x = one(x)
        return x

    ready = torch.compile(run) if kind == "compiled" else run

    def step() -> object:
        with torch.no_grad():
            return ready(x)

    return step


KINDS = ("matmul", "elementwise", "convolution", "layers", "compiled")


def gates(count: int, units: int, budget: float, device: str, stop: bool, seed: int) -> list[tuple[str, SpeedStats]]:
    """Gates of base against head, head having `units` units of work; `stop` when decided, as a user's gate does."""
    found = []
    for number in range(count):
        torch.compiler.reset()  # all chains are one function to Dynamo, which would give up on it
        kind = KINDS[number % len(KINDS)]
        arms = {"base": chain(kind, UNITS, device), "head": chain(kind, units, device)}
        stats = measure_speed(
            arms,
            device=device,
            budget=budget,
            width=None,
            decided=(lambda seen: is_decided(seen, RULE)) if stop else None,
            seed=seed + number,
        )
        found.append((kind, stats))
        print(f"\r{units} units, {budget:g} s: {number + 1} of {count}", end="", flush=True)
    print()
    return found


def logs_of(stats: SpeedStats) -> tuple[Logs, Logs]:
    return log_ratios(stats.reference, stats.compared[0]), log_ratios(stats.reference, stats.twin)


def spread(found: list[tuple[str, SpeedStats]]) -> dict[str, Any]:
    """Coefficient of variation of the median ratio, in all and per kind of work."""
    ratios: dict[str, list[float]] = {}
    for kind, stats in found:
        ratios.setdefault(kind, []).append(math.exp(np.median(logs_of(stats)[0])))
    every = [ratio for some in ratios.values() for ratio in some]
    twins = [math.exp(np.median(logs_of(stats)[1])) for _, stats in found]
    return {
        "coefficient of variation": float(np.std(every, ddof=1) / np.mean(every)),
        "of the A/A twin": float(np.std(twins, ddof=1) / np.mean(twins)),
        "by work": {kind: float(np.std(some, ddof=1) / np.mean(some)) for kind, some in ratios.items()},
        "largest difference from 1": float(max(abs(1 - ratio) for ratio in every)),
        "cycles": int(np.median([stats.cycles for _, stats in found])),
        "spread of one cycle's ratio (quartiles)": float(
            np.median([np.subtract(*np.quantile(logs_of(s)[0], (0.75, 0.25))) for _, s in found])
        ),
    }


def power(found: list[tuple[str, SpeedStats]]) -> dict[str, Any]:
    verdicts = Counter(decide(*logs_of(stats), RULE).verdict.value for _, stats in found)
    return {
        "gates": len(found),
        "found": verdicts["fail"] / len(found),
        "verdicts": dict(verdicts),
        "seconds": float(np.mean([stats.spent for _, stats in found])),
        "most seconds": max(stats.spent for _, stats in found),
        "ratio by work": {
            kind: float(np.median([math.exp(np.median(logs_of(s)[0])) for k, s in found if k == kind]))
            for kind in KINDS
        },
        "ratio": float(np.median([math.exp(np.median(logs_of(stats)[0])) for _, stats in found])),
    }


def half_width(found: list[tuple[str, SpeedStats]]) -> float:
    bounds = (median_bounds(logs_of(stats)[0], RULE.confidence) for _, stats in found)
    return float(np.median([(high - low) / 2 for low, high in bounds]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=int, default=1000, help="simulated suites of 20 gates")
    parser.add_argument("--gates", type=int, default=200, help="real A/A gates")
    parser.add_argument("--planted", type=int, default=100, help="real gates for each planted slowdown")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    simulated = simulate(options.suites, options.seed)
    print(f"simulated suites of {SUITE} that fail without a cause: {simulated['suites that fail']} of {options.suites}")
    alike = gates(options.gates, UNITS, 3.0, options.device, False, options.seed)
    alarms = Counter(sequential(*logs_of(stats)).value for _, stats in alike)
    slow5 = power(gates(options.planted, UNITS + 1, 10.0, options.device, True, options.seed))
    slow10 = power(gates(options.planted, UNITS + 2, 3.0, options.device, True, options.seed))
    aa = spread(alike)
    failed = alarms["fail"] / max(1, len(alike))
    rows = [
        ("coefficient of variation of the A/A ratio", f"{100 * aa['coefficient of variation']:.2f} %", "at most 0.6 %"),
        (
            f"suites of {SUITE} that fail, simulated ({options.suites})",
            f"{100 * simulated['share']:.2f} %",
            "at most 1 %",
        ),
        (f"A/A gates that fail, real ({len(alike)})", f"{alarms['fail']} ({100 * failed:.2f} %)", "none"),
        (f"5 % slower, found within 10 s ({slow5['gates']})", f"{100 * slow5['found']:.1f} %", "at least 95 %"),
        (f"10 % slower, found within 3 s ({slow10['gates']})", f"{100 * slow10['found']:.1f} %", "at least 95 %"),
    ]
    table = ["| figure | here | wanted |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    table += ["", f"Half of a gate's interval at {RULE.confidence:.4%} confidence: {100 * half_width(alike):.2f} %."]
    print("\n".join(table))
    data = {"simulated": simulated, "A/A": {**aa, "verdicts": dict(alarms)}, "5 %": slow5, "10 %": slow10}
    if options.out:
        write_evidence(options.out, data, table, device=options.device)


if __name__ == "__main__":
    main()
