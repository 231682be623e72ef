"""What the installed, unused plugin adds to a session of trivial tests, in milliseconds.

Run as `python benchmarks/bench_plugin.py [--json PATH]`. Each pair is one session with the plugin and one with
`-p no:ampcheck`, in alternating order, so that drift of the machine falls on both alike. Two cases: the tests are only
collected; and they run where Python writes no caches, as in many containers, so that pytest rewrites the modules of the
plugin each time. The figures are the medians of the pairs' differences, in wall time and in the CPU time of the process
(which a busy machine disturbs less), with distribution-free intervals (order statistics of the sign test). Nothing is
asserted. Needs Unix for the CPU time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

SESSION = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
CASES = {
    "collecting": ("--collect-only",),
    "running, no cache is written": (),
}
WITHOUT = ("-p", "no:ampcheck")
PROBE = "def pytest_unconfigure():\n    import sys\n    print('torch imported:', 'torch' in sys.modules)\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of sessions in each case (default: 40)")
    parser.add_argument("--tests", type=int, default=300, help="trivial tests (default: 300)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the evidence here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_tests(Path(folder), options.tests)
        evidence = measure(Path(folder), options.pairs, options.tests)
    print(describe(evidence))
    if options.json:
        text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(evidence, indent=1))
        options.json.write_text(text + "\n", encoding="utf-8")


def write_tests(folder: Path, count: int) -> None:
    """`count` trivial tests in ten files, an empty ini file, and a conftest that reports whether torch was imported."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "conftest.py").write_text(PROBE, encoding="utf-8")
    for file in range(10):
        tests = "".join(f"def test_{number}():\n    pass\n\n\n" for number in range(file, count, 10))
        (folder / f"test_{file}.py").write_text(tests, encoding="utf-8")


def measure(folder: Path, pairs: int, tests: int) -> dict[str, Any]:
    """The evidence: every time in milliseconds, and what is said of their differences."""
    return {
        "what": "a session of pytest with the plugin ampcheck minus the same with -p no:ampcheck, in pairs",
        "command": " ".join(["python", *sys.argv]),
        "unit": "ms",
        "tests": tests,
        "pairs": pairs,
        "cases": {case: measure_case(folder, case, pairs) for case in CASES},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("ampcheck", "pytest", "pytest-xdist", "hypothesis", "torch")},
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.system()},
    }


def measure_case(folder: Path, case: str, pairs: int) -> dict[str, Any]:
    """Both arms of one case. What Python needs without the plugin is always cached."""
    cache = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / case)}
    run_session(folder, (*CASES[case], *WITHOUT), cache)
    if "no cache" in case:
        cache["PYTHONDONTWRITEBYTECODE"] = "1"
    torch_imported = run_session(folder, CASES[case], cache)[0]
    times: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for pair in range(pairs):
        arms = (("with", ()), ("without", WITHOUT))
        for name, extra in arms if pair % 2 == 0 else reversed(arms):
            times[name].append(run_session(folder, (*CASES[case], *extra), cache)[1:])
    return {
        "wall": difference([t[0] for t in times["with"]], [t[0] for t in times["without"]]),
        "cpu": difference([t[1] for t in times["with"]], [t[1] for t in times["without"]]),
        "torch_imported": torch_imported,
    }


def difference(first: list[float], second: list[float]) -> dict[str, Any]:
    """The median of the paired differences with its interval, and the times themselves."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    low, high, level = median_interval(differences)
    return {
        "median_difference": statistics.median(differences),
        "interval": [low, high],
        "confidence": level,
        "median_without": statistics.median(second),
        "with": [round(value, 2) for value in first],
        "without": [round(value, 2) for value in second],
    }


def run_session(folder: Path, extra: Sequence[str], cache: dict[str, str]) -> tuple[bool, float, float]:
    """One session: whether torch was imported, wall time and CPU time in ms."""
    wall, cpu = time.perf_counter(), cpu_of_children()
    environment = {**os.environ, **cache}
    done = subprocess.run(
        [sys.executable, *SESSION, *extra], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    times = (time.perf_counter() - wall) * 1e3, (cpu_of_children() - cpu) * 1e3
    return "torch imported: True" in done.stdout, *times


def cpu_of_children() -> float:
    """Seconds of CPU that finished child processes took, in user and kernel mode together."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The narrowest symmetric pair of order statistics that holds the median with at least this confidence.

    Returns (low, high, exact confidence). With too few values for that, the range and the confidence it has.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.5**count, 0  # tail: probability that at most `rank` of the values lie below the median
    while rank + 1 < count / 2:
        wider = tail + math.comb(count, rank + 1) * 0.5**count
        if 2 * wider > 1 - confidence:
            break
        tail, rank = wider, rank + 1
    return ordered[rank], ordered[count - 1 - rank], 1 - 2 * tail


def cpu_name() -> str:
    """The processor's name as /proc/cpuinfo gives it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe(evidence: dict[str, Any]) -> str:
    lines = []
    for case, figures in evidence["cases"].items():
        lines.append(f"the unused plugin adds to a session of {evidence['tests']} tests ({case}):")
        for clock in ("wall", "cpu"):
            times = figures[clock]
            low, high = times["interval"]
            lines.append(
                f"  {clock:4} {times['median_difference']:+.1f} ms to {times['median_without']:.0f} ms "
                f"({times['confidence']:.1%} interval {low:+.1f} to {high:+.1f} ms, {evidence['pairs']} pairs)"
            )
        lines.append(f"  torch imported: {'yes' if figures['torch_imported'] else 'no'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
