"""How often `ampcheck bisect --commits` names the commit that changed a verdict, and none where no commit did.

    python benchmarks/bisect_tries.py [--tries 10] [--situations numeric,slower,same,same-speed] \\
        --json reports/evidence/bisect_tries.json

Each try is a git history of 40 commits, each of which edits the model's file. In `numeric` a scale of 1e6, which
overflows in float16, comes in at a random commit; in `slower` 25 per cent more of the same work; in `same` and
`same-speed` nothing that a verdict depends on. The audits, worktrees, processes and timings are real. `right`: the
commit was named, or none where none was planted; `undecided`: the search said so; `wrong`: another commit, or one where
none was planted. Nothing is asserted. With --json each try is kept, and an interrupted benchmark goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from _evidence import markdown_table, write_evidence

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.core.settings import Target
from ampcheck.speed.options import SpeedOptions
from ampcheck.tools.bisect.commits import Commits
from ampcheck.tools.bisect.history import History
from ampcheck.tools.bisect.judge import judge_history
from ampcheck.tools.sweep.results import Allowance, ResultFolder

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "units" / "speed"))
from repositories import MODEL, git, repository

COMMITS = 40
SITUATIONS = ("numeric", "slower", "same", "same-speed")
TIMES, MORE = 24, 30


def model(situation: str, number: int, change: int) -> str:
    """The text of the model's file in a commit."""
    planted = number >= change
    text = MODEL.format(times=MORE if situation == "slower" and planted else TIMES)
    if situation == "numeric" and planted:
        text = text.replace("return x\n", "return x * 1e6\n")
    return f"{text}\nREVISION = {number}\n"


def make_history(folder: Path, situation: str, change: int) -> list[str]:
    """The commits of a history, the oldest first, in one call of git."""
    repository(folder, model_py=model(situation, 0, change))
    stream = []
    for number in range(1, COMMITS):
        text, message = model(situation, number, change), f"revision {number}"
        parent = "from refs/heads/main^0\n" if number == 1 else ""
        stream.append(
            f"commit refs/heads/main\ncommitter someone <s@example.com> {1_900_000_000 + number} +0000\n"
            f"data {len(message)}\n{message}\n{parent}M 100644 inline model.py\ndata {len(text)}\n{text}\n"
        )
    script = folder / ".git" / "history"
    script.write_text("".join(stream), encoding="utf-8")
    with script.open() as file:
        subprocess.run(["git", "fast-import", "--quiet"], cwd=folder, stdin=file, check=True)
    git(folder, "reset", "-q", "--hard", "main")
    return git(folder, "rev-list", "--reverse", "main").splitlines()


def once(situation: str, seed: int) -> dict[str, Any]:
    """One search in a history of its own."""
    change = random.Random(f"{situation} {seed}").randrange(1, COMMITS)
    speed = SpeedOptions(seed=seed) if situation in ("slower", "same-speed") else None
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ampcheck-tries-") as folder:
        commits = make_history(Path(folder) / "repository", situation, change)
        start = Path.cwd()
        os.chdir(Path(folder) / "repository")
        try:
            target = Target("model.py:make", dtype=("float16",), compile=False)
            versions = Commits.of(target, f"{commits[0]}..")
            history = History(versions, ResultFolder(Path(folder) / "results"), Allowance(900.0), speed)
            try:
                check = "overflow" if situation == "numeric" else ""
                findings = judge_history(history, check).findings
            except UsageError as error:  # an end without a verdict
                return _row(change, "undecided", str(error), history, begun)
        finally:
            os.chdir(start)
    named = [
        finding for finding in findings if finding.check != "coverage" and finding.verdict is not Verdict.UNDECIDED
    ]
    message = "; ".join(finding.message for finding in findings)
    if situation.startswith("same"):
        return _row(None, "wrong" if named else "right", message, history, begun)
    right = [f"in {commits[change][:10]} (revision {change})" in finding.message for finding in named]
    return _row(change, "undecided" if not named else "right" if all(right) else "wrong", message, history, begun)


def _row(change: int | None, outcome: str, message: str, history: History, begun: float) -> dict[str, Any]:
    return {
        "planted in": change,
        "outcome": outcome,
        "judged": len(history.results),
        "wall s": round(time.perf_counter() - begun, 1),
        "message": message[:300],
    }


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = Counter(row["outcome"] for row in rows)
    return {
        "situation": name,
        "tries": len(rows),
        **{outcome: counts[outcome] for outcome in ("right", "undecided", "wrong")},
        "judged commits": median(row["judged"] for row in rows),
        "wall s": median(row["wall s"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10, help="of each situation (default: %(default)s)")
    parser.add_argument("--situations", default=",".join(SITUATIONS), help="of %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    tries: dict[str, list[dict[str, Any]]] = {}
    if options.json is not None and options.json.exists():
        tries = json.loads(options.json.read_text(encoding="utf-8"))["tries"]
    for situation in options.situations.split(","):
        rows = tries.setdefault(situation, [])
        for seed in range(len(rows), options.tries):
            rows.append(once(situation, seed))
            print(f"{situation} {seed + 1}: {rows[-1]}", flush=True)
            if options.json is not None:
                shares = [summary(name, known) for name, known in tries.items() if known]
                write_evidence(options.json, {"shares": shares, "tries": tries}, markdown_table(shares))
    print("\n".join(markdown_table([summary(name, rows) for name, rows in tries.items() if rows])))


if __name__ == "__main__":
    main()
