"""Everything that needs a GPU, in order of worth: tests, then evidence, each step kept as it ends.

    python benchmarks/gpu.py [--minutes 40] [--zoo ../shared/zoo] [--out reports/evidence/gpu] [--dry-run]

Each step runs in a process of its own within a limit, writes its evidence into the folder, and adds a row to
`steps.json`. A later call of the same commit runs the steps that have not passed; `--minutes` is the time of all steps
of a call, and a step whose limit is longer than what is left is not begun. `--dry-run` rehearses every step on the CPU
in tiny sizes, in a folder that is removed, and ends with 1 if a step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence

from ampcheck.core.environment import environment

ROOT = Path(__file__).parents[1]
MODELS = ("gpt2", "t5", "vit", "t5_hot")
"""Of tests/transformers_models.py, compared where no zoo is at hand."""


@dataclass(frozen=True)
class Step:
    """A step. minutes: its limit. command: arguments of Python, where `{out}` is the file of the evidence and `{list}`
    the list of models. tiny: what the rehearsal adds."""

    name: str
    minutes: float
    command: str
    tiny: str = ""

    def arguments(self, folder: Path, device: str, models: str, rehearsed: bool) -> list[str]:
        """The arguments of Python."""
        known = {"out": str(folder / f"{self.name}.json"), "device": device, "list": models}
        words = f"{self.command} {self.tiny if rehearsed else ''}".split()
        return [word.format(**known) for word in words]


STEPS = (
    Step(
        "tests", 8, "-m pytest -m cuda -q -rA -p no:cacheprovider",
        "tests/units/health tests/promises/shadow/test_one_device.py",
    ),
    Step(
        "emulated_against_device", 8,
        "benchmarks/emulated_against_device.py {list} --device {device} --models 40 --minutes 7 --json {out}",
        "--models 1",
    ),
    Step(
        "health", 4, "benchmarks/bench_health.py --device {device} --json {out}", "--rounds 2 --sizes 65536"
    ),
    Step("sums", 2, "benchmarks/accumulation.py --device {device} --json {out}"),
    Step(
        "telemetry", 5, "benchmarks/bench_telemetry.py --device {device} --json {out}",
        "demo --layers 1 --rounds 1 --levels casts",
    ),
    Step(
        "telemetry_cuda_graphs", 5,
        "benchmarks/bench_telemetry.py --device {device} --mode reduce-overhead --json {out}",
        "demo --layers 1 --rounds 1 --levels casts",
    ),
    Step(
        "telemetry_max_autotune", 6,
        "benchmarks/bench_telemetry.py demo --device {device} --mode max-autotune --json {out}",
        "--layers 1 --rounds 1 --levels casts",
    ),
    Step("shadow_cost", 3, "benchmarks/shadow_cost.py --device {device} --rounds 15 --evidence {out}", "--rounds 1"),
    Step("shadow_memory", 3, "benchmarks/shadow_memory.py --device {device} --evidence {out}", "--only perceptron"),
    Step(
        "matrix", 10, "benchmarks/bench_matrix.py --device {device} --size large --budget 15 --json {out}",
        "--size small --only decoding --modes default --precisions float32 --budget 1",
    ),
    Step(
        "compile_cost", 8, "benchmarks/bench_compile_cost.py --device {device} --size large --cold 1 --json {out}",
        "varying --size small --budget 1",
    ),
    Step(
        "gate", 6, "benchmarks/bench_gate.py --device {device} --gates 40 --planted 10 --out {out}",
        "--suites 2 --gates 1 --planted 1",
    ),
    Step("lab", 5, "benchmarks/lab_evidence.py --device {device} --path {out}", "ulp"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a step ended. exit: of its process, -1 where it ran past its limit. tail: its last lines."""

    step: str
    command: str
    commit: str
    seconds: float
    exit: int
    tail: list[str]


def run(step: Step, arguments: Sequence[str], commit: str, limit: float, *, rehearsed: bool) -> Outcome:
    """Run a step to its end, or for `limit` seconds."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        ended = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its children, which would run beside the next step
        output, _ = process.communicate()
        ended = -1
    if rehearsed and "pytest" in arguments and ended == 5:
        ended = 0  # no test runs without a GPU
    command = "python " + " ".join(arguments)
    seconds = round(time.monotonic() - begin, 1)
    return Outcome(step.name, command, commit, seconds, ended, output.strip().splitlines()[-12:])


def kept(path: Path, commit: str) -> dict[str, Outcome]:
    """The outcomes of an earlier call, by step; those of another commit are left out."""
    if not path.is_file():
        return {}
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["steps"]
    return {row["step"]: Outcome(**row) for row in rows if row["commit"] == commit}


def run_all(options: argparse.Namespace, folder: Path, device: str, models: str) -> list[Outcome]:
    """Run the steps that have not passed yet, and write `steps.json` after each."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    path = folder / "steps.json"
    outcomes = kept(path, commit)
    begin = time.monotonic()
    for step in STEPS:
        left = options.minutes - (time.monotonic() - begin) / 60
        if (options.only and step.name not in options.only) or (step.name in outcomes and not outcomes[step.name].exit):
            continue
        if left < step.minutes:
            print(f"{step.name}: not begun, {left:.1f} minutes are left; run the command again to go on", flush=True)
            continue
        arguments = step.arguments(folder, device, models, options.dry_run)
        outcome = outcomes[step.name] = run(step, arguments, commit, 60 * step.minutes, rehearsed=options.dry_run)
        print(f"{step.name}: exit {outcome.exit} after {outcome.seconds:.0f} s", flush=True)
        if outcome.exit:
            print("\n".join(f"    {line}" for line in outcome.tail), flush=True)
        rows = [outcomes[each.name] for each in STEPS if each.name in outcomes]
        table = markdown_table(
            [
                {"step": row.step, "seconds": row.seconds, "exit": row.exit, "last line": (row.tail or [""])[-1]}
                for row in rows
            ]
        )
        write_evidence(path, {"steps": [asdict(row) for row in rows]}, table, device=device)
    return list(outcomes.values())


def main() -> None:
    """Run or rehearse the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0, help="of this call (default: %(default)g)")
    parser.add_argument("--zoo", type=Path, default=ROOT.parent / "shared" / "zoo", help="models that both sides audit")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "reports" / "evidence" / "gpu", help="folder of the evidence"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP", help="of: " + ", ".join(s.name for s in STEPS))
    parser.add_argument("--dry-run", action="store_true", help="rehearse every step on the CPU in tiny sizes")
    options = parser.parse_args()
    unknown = set(options.only) - {step.name for step in STEPS}
    if unknown:
        parser.error(f"no step is called {', '.join(sorted(unknown))}")
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit(f"CUDA is not available to torch {environment()['torch']}; --dry-run rehearses the steps on the CPU")
    with tempfile.TemporaryDirectory() as temporary:
        models = str(options.zoo)
        if options.dry_run or not (options.zoo / "zoo.py").is_file():
            models = str(Path(temporary, "models.txt"))
            Path(models).write_text(
                "".join(f"tests/transformers_models.py:{name}\n" for name in MODELS), encoding="utf-8"
            )
        folder = Path(temporary) if options.dry_run else options.out
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = run_all(options, folder, "cpu" if options.dry_run else "cuda", models)
    sys.exit(int(any(outcome.exit for outcome in outcomes)))


if __name__ == "__main__":
    main()
