"""How often base against head is right: on a slower commit, on one that changes nothing, and on a machine under load.

Run as `python benchmarks/bench_base.py [--times 10] [--situations slower,same,loaded] [--mode MODE] [--json PATH]`.

A git repository is made with a small model whose time is proportional to the work in it. `slower` adds 8.3 per cent of
the same work (26 layers in place of 24), `same` changes a file that is not run, `loaded` does the same beside one busy
process per core. Each time is a whole comparison with the defaults of `ampcheck speed --base`: fresh processes in every
launch. A FAIL of `same` or `loaded` is a false alarm; a PASS of `slower` is a miss. Nothing is asserted. With --json
what was found is kept after each time, and a benchmark that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from _evidence import markdown_table, write_evidence

from ampcheck.core.run import Verdict
from ampcheck.records.speed import Rule
from ampcheck.speed.base.judge import check_base
from ampcheck.speed.base.measure import measure_base
from ampcheck.speed.base.stats import launch_deviation, rounds_of, twin_noise
from ampcheck.speed.options import SpeedOptions

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "units" / "speed"))
from repositories import MODEL, commit, git, repository

SITUATIONS = ("slower", "same", "loaded")


def make_repository(folder: Path) -> None:
    """`main` with the model, and the branches `slower` and `same`."""
    repository(folder, model_py=MODEL.format(times=24))
    git(folder, "checkout", "-q", "-b", "slower")
    commit(folder, "more work", model_py=MODEL.format(times=26))
    git(folder, "checkout", "-q", "-b", "same", "main")
    commit(folder, "words", **{"notes.md": "a model"})


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
    git(Path.cwd(), "checkout", "-q", "slower" if situation == "slower" else "same")
    rule, begun = Rule(), time.perf_counter()
    with load(os.cpu_count() or 1) if situation == "loaded" else contextlib.nullcontext():
        stats = measure_base("model.py:make", "main", SpeedOptions(mode=mode, seed=seed), rule=rule)
    found = next(one for one in reversed(check_base(stats, rule)) if one.check == "regression")
    rounds = rounds_of(stats.turns(stats.judged))
    return {
        "verdict": str(found.verdict),
        "ratio": found.observed,
        "launches": len(stats.rounds),
        "luck of a launch": launch_deviation(rounds),
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
    parser.add_argument("--mode", help="of torch.compile (default: the model unmodified)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    evidence = options.json.resolve() if options.json else None
    kept, start = found_before(evidence, options.mode), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ampcheck-bench-") as folder:
        make_repository(Path(folder))
        os.chdir(folder)
        for name in options.situations.split(","):
            seen = kept.setdefault(name, [])
            for number in range(len(seen), options.times):
                seen.append(once(name, options.mode, number))
                print(f"{name} {number + 1}: {seen[-1]['message']}", flush=True)
                if evidence:
                    write_evidence(evidence, {"mode": options.mode, **facts(kept)}, table(kept))
        os.chdir(start)
    print("\n".join(table(kept)))


def found_before(evidence: Path | None, mode: str | None) -> dict[str, list[dict[str, Any]]]:
    """The runs that an interrupted or a shorter benchmark left in the same file."""
    if evidence is None or not evidence.exists():
        return {}
    before = json.loads(evidence.read_text(encoding="utf-8"))
    if before.get("mode") != mode:
        raise SystemExit(f"{evidence.name} holds runs of mode {before.get('mode')}: name another file, or remove it")
    runs: dict[str, list[dict[str, Any]]] = before["runs"]
    return runs


def facts(kept: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {"shares": [summary(name, seen) for name, seen in kept.items() if seen], "runs": kept}


def table(kept: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    rows = facts(kept)["shares"]
    return markdown_table(rows) if rows else []


if __name__ == "__main__":
    main()
