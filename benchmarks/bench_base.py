"""How often base against head is right: on a slower commit, on one that changes nothing, and on a machine under load.

Run as `python benchmarks/bench_base.py [--times 10] [--situations slower,same,loaded] [--mode MODE] [--json PATH]`.

A git repository is made with a small model whose time is proportional to the work in it. `slower` adds 8.3 per cent of
the same work (26 layers in place of 24), `same` changes a file that is not run, `loaded` does the same beside one busy
process per core. Each time is a whole comparison with the defaults of `ampcheck speed --base`: fresh processes in every
launch. A FAIL of `same` or `loaded` is a false alarm; a PASS of `slower` is a miss. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _evidence import write_evidence

from ampcheck.record import Verdict
from ampcheck.speed.base.check import check_base
from ampcheck.speed.base.launches import luck, rounds_of, twin_noise
from ampcheck.speed.base.measure import measure_base
from ampcheck.speed.verdict import Rule

MODEL = """
import torch
from torch import nn

TIMES = {times}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(96, 96)

    def forward(self, x):
        for _ in range(TIMES):
            x = torch.relu(self.layer(x))
        return x


def make():
    torch.manual_seed(0)
    return Model().eval(), torch.randn(48, 96)
"""
SITUATIONS = ("slower", "same", "loaded")


def repository(folder: Path) -> None:
    """`main` with the model, and the branches `slower` and `same`."""

    def commit(message: str, **files: str) -> None:
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
        _git(folder, "add", "-A")
        _git(folder, "commit", "-q", "-m", message)

    _git(folder, "init", "-q", "-b", "main")
    _git(folder, "config", "user.email", "someone@example.com")
    _git(folder, "config", "user.name", "someone")
    commit("a model", model_py=MODEL.format(times=24))
    _git(folder, "checkout", "-q", "-b", "slower")
    commit("more work", model_py=MODEL.format(times=26))
    _git(folder, "checkout", "-q", "-b", "same", "main")
    commit("words", notes_md="a model")


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def once(situation: str, mode: str | None, seed: int) -> dict[str, Any]:
    """One comparison in the folder of the repository."""
    _git(Path.cwd(), "checkout", "-q", "slower" if situation == "slower" else "same")
    rule, begun = Rule(), time.perf_counter()
    with load(os.cpu_count() or 1) if situation == "loaded" else contextlib.nullcontext():
        stats = measure_base("model.py:make", "main", mode=mode, rule=rule, seed=seed)
    found = next(one for one in reversed(check_base(stats, rule)) if one.check == "regression")
    rounds = rounds_of([one[stats.judged] for one in stats.rounds])
    return {
        "verdict": str(found.verdict),
        "ratio": found.observed,
        "launches": len(stats.rounds),
        "luck of a launch": luck(rounds),
        "noise of the twin": twin_noise(rounds),
        "d": rounds.head.tolist(),
        "a": rounds.twin.tolist(),
        "wall s": time.perf_counter() - begun,
        "load": stats.conditions.get("load, highest"),
        "message": found.message,
    }


def summary(name: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
    counts = Counter(one["verdict"] for one in seen)
    return {
        "situation": name,
        "times": len(seen),
        **{str(verdict): counts[str(verdict)] for verdict in (Verdict.FAIL, Verdict.UNDECIDED, Verdict.PASS)},
        "ratio": round(median(one["ratio"] for one in seen), 4),
        "launches": median(one["launches"] for one in seen),
        "luck of a launch, %": round(100 * median(one["luck of a launch"] for one in seen), 2),
        "wall s": round(median(one["wall s"] for one in seen), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="comparisons of each situation (default: %(default)s)")
    parser.add_argument("--situations", default=",".join(SITUATIONS), help="of %(default)s")
    parser.add_argument("--mode", help="of torch.compile (default: the model as it is)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    evidence = options.json.resolve() if options.json else None
    rows, kept, start = [], {}, Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ampcheck-bench-") as folder:
        repository(Path(folder))
        os.chdir(folder)
        for name in options.situations.split(","):
            seen = []
            for number in range(options.times):
                seen.append(once(name, options.mode, number))
                print(f"{name} {number + 1}: {seen[-1]['message']}", flush=True)
            kept[name] = seen
            rows.append(summary(name, seen))
        os.chdir(start)
    table = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    table += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    print("\n".join(table))
    if evidence:
        write_evidence(evidence, {"shares": rows, "runs": kept}, table)


if __name__ == "__main__":
    main()
