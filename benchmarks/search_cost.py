"""What `assert_property` costs per example, in processor time, and how much of it Hypothesis takes to draw.

    python benchmarks/search_cost.py                                    # this checkout
    python benchmarks/search_cost.py --against /path/to/older/checkout  # both, turn about

Judging is the whole less drawing: the strategy alone, with as many targets. The functions are the stable ones of
tests/units/search/textbook.py, of which nothing is minimised, and a transformer block under autocast. Times on a shared
machine differ by half from run to run; the medians over the rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
EXAMPLES = 200


def subjects() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Functions and modules that hold, with their inputs."""
    sys.path.insert(0, str(HERE / "tests" / "units" / "search"))
    import torch
    from textbook import TEXTBOOK

    from ampcheck.strategies import tensors

    torch.manual_seed(0)
    cases = {name: (case.stable, case.inputs("float16")) for name, case in TEXTBOOK.items()}
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    return {**cases, "block": (block, tensors("float32", shape=(2, 4, 16), min_value=-10, max_value=10))}


def measured() -> dict[str, dict[str, float]]:
    """Milliseconds of processor time per example of each subject."""
    from hypothesis import HealthCheck, given, seed, settings, target

    from ampcheck import assert_property
    from ampcheck.search import SearchOptions
    from ampcheck.torchtools.pytree import tensors

    def search(model: Any, inputs: Any, examples: int) -> int:
        options = SearchOptions(examples=examples)
        run = assert_property(model, inputs, dtype="float16", compile=False, options=options)
        return run.coverage.seen["examples"]

    def draw(inputs: Any) -> int:
        known: set[bytes] = set()

        @seed(0)
        @settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(drawn=inputs)
        def test(drawn: Any) -> None:
            values = [t for _, t in tensors(drawn)]
            known.add(b"".join(t.reshape(-1).contiguous().numpy().tobytes() for t in values))
            target(float(values[0].abs().amax()), label="largest")
            target(float(values[0].abs().amin()), label="smallest")

        test()
        return len(known)

    costs = {}
    for name, (model, inputs) in subjects().items():
        search(model, inputs, 5)
        start = time.process_time()
        count = search(model, inputs, EXAMPLES)
        whole = (time.process_time() - start) / count
        start = time.process_time()
        count = draw(inputs)
        costs[name] = {"whole": whole * 1e3, "drawing": (time.process_time() - start) / count * 1e3}
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="PATH", help="the root of another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured()))
        return
    roots = {"this checkout": HERE, **({"against": options.against.resolve()} if options.against else {})}
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {title: [] for title in roots}
    for _ in range(options.rounds):
        for title, root in roots.items():
            environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--measure"]
            child = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
            rounds[title].append(json.loads(child.stdout.splitlines()[-1]))
    print("ms of processor time per example: whole (judging)")
    print(f"{'':20}" + "".join(f"{title:>22}" for title in roots))
    for name in rounds["this checkout"][0]:
        cells = []
        for title in roots:
            whole = statistics.median(r[name]["whole"] for r in rounds[title])
            judging = statistics.median(r[name]["whole"] - r[name]["drawing"] for r in rounds[title])
            cells.append(f"{whole:10.2f} ({judging:6.2f})".rjust(22))
        print(f"{name:20}" + "".join(cells))


if __name__ == "__main__":
    main()
