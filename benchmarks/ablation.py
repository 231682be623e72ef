"""Which verdicts need which mechanism of `tests/mechanisms.py`: the law of evidence.

    python benchmarks/ledger.py --record --jobs 2 --json FILE          # which mechanisms act in which case
    python benchmarks/ablation.py FILE [--mechanisms NAME[,NAME]] [--sources NAME[,NAME]] [--jobs 2] [--no-times]
        [--json reports/evidence/ablation.json]

The cases in which a mechanism acts run without it, the quickest first, until three that were not written for it change
their outcome: then it stays. At most 240 are tried. A false alarm that it suppresses counts as much as a defect that it
finds, and a second finding of a case that is found anyway does not. Rows of mechanisms that are gone stay in the
evidence, with the commit at which they were measured. Cost is the time of a step of a small transformer under `Shadow`,
with and without the mechanism in turns, by op; a mechanism outside of the hot path has none.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from _ledger_rows import Key, Row, differences, read
from ledger import ROOT, chosen, imported, rows_of, switched

EVIDENCE = ROOT / "reports" / "evidence" / "ablation.json"
NEEDED = 3
"""Cases that were not written for a mechanism and that change without it, from which it stays."""

_BATCH, _MOST = 12, 240
_PAIRS = 20
_BETTER = ("at", "elsewhere", "missed"), ("silent", "warned", "alarm")
"""Outcomes of defects and of healthy cases, from the best on."""

SIGNED: Mapping[str, str] = {
    "emptied-rows": "F.scaled_dot_product_attention makes zeros of rows that an overflowed mask hides",
    "ill": "names the line of four defects of the corpus, of which the module alone is known without it",
    "own-errors": "any test that compares a result with its reference",
    "spread": "the gradient of a bias in bfloat16 training (bert_bfloat16)",
    "taken-up": "compensated sums (pure_bfloat16_with_kahan)",
}
"""Why a mechanism stays that fewer cases need. Any other is on trial: it is to be deleted."""


@dataclass
class Measured:
    """What became of the cases without a mechanism. decision: `stays`, `stays: REASON`, `on trial` or `deleted`."""

    name: str
    purpose: str
    commit: str
    lines: int
    acts: int = 0
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    nanoseconds: float | None = None
    decision: str = ""

    @property
    def foreign(self) -> int:
        """Cases that were not written for the mechanism and that it alone finds, or keeps silent."""
        return len({*self.lost, *self.alarms} - set(self.own))

    def decide(self) -> None:
        """Apply the law."""
        reason = SIGNED.get(self.name, "")
        self.decision = "stays" if self.foreign >= NEEDED else f"stays: {reason}" if reason else "on trial"


def lines_of(places: Collection[tuple[Any, str]]) -> int:
    """The lines of the functions at these places, and of those of their modules that only they call."""
    codes: dict[int, tuple[Any, Any]] = {}
    for holder, name in places:
        function = inspect.unwrap(vars(holder)[name])
        if inspect.isfunction(function):
            codes[id(function)] = function, inspect.getmodule(function)
    grew = True
    while grew:
        grew = False
        for module in {module for _, module in codes.values()}:
            own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
            for function in own:
                callers = [f for f in own if f is not function and function.__name__ in _names(f.__code__)]
                private = function.__name__.startswith("_") and id(function) not in codes
                if private and callers and all(id(caller) in codes for caller in callers):
                    codes[id(function)] = function, module
                    grew = True
    return sum(len(inspect.getsourcelines(function)[0]) for function, _ in codes.values())


def _names(code: CodeType) -> set[str]:
    nested = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*nested)


def nanoseconds(name: str, pairs: int = _PAIRS) -> float:
    """What a mechanism adds to an op under `Shadow`: the median over pairs of steps with and without it."""
    import mechanisms
    import torch

    from ampcheck.shadow import Shadow

    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    data = torch.randn(4, 16, 32)

    def step() -> float:
        start = time.process_time_ns()
        with Shadow(layer) as shadow, torch.autocast("cpu", torch.bfloat16):
            layer(data).float().square().mean().backward()
        return (time.process_time_ns() - start) / max(1, shadow.ops)

    step()
    apart = []
    for _ in range(pairs):
        on = step()
        with mechanisms.without(name):
            apart.append(on - step())
    return statistics.median(apart)


def introduced(name: str) -> frozenset[str]:
    """The commits that brought a mechanism: its functions, or their module."""
    import mechanisms

    commits = []
    for place in mechanisms.MECHANISMS[name].places:
        module, _, function = place.partition(":")
        path = f"ampcheck/{module.replace('.', '/')}.py"
        commits += _log("-S", f"def {function.rpartition('.')[2]}(", "--", "ampcheck")[-1:]
        commits += _log("--diff-filter=A", "--", path)[-1:]
    return frozenset(commits)


@functools.cache
def added(case: str) -> str:
    """The commit that brought a case; empty for one that is not in the repository."""
    path = case.partition(":")[0]
    if path.startswith("../"):
        return ""
    return next(iter(_log("--diff-filter=A", "--", f"{path}.py", path)[-1:]), "")


def _log(*arguments: str) -> list[str]:
    command = ["git", "log", "--format=%h", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def booked(measured: Measured, before: Row, after: Row, came: Collection[str] = ()) -> None:
    """Book a changed case: as lost, as a false alarm, or as other findings of the same worth.

    came: the commits that brought the mechanism; a case of such a commit was written for it.
    """
    name = " | ".join(before.key)
    if added(before.case) in came:
        measured.own.append(name)
    for outcomes, worse in zip(_BETTER, (measured.lost, measured.alarms), strict=True):
        rank = {outcome: number for number, outcome in enumerate(outcomes)}
        if rank.get(before.outcome, len(rank)) < rank.get(after.outcome, -1):
            worse.append(name)
            return
    measured.other.append(name)


def ablate(before: Mapping[Key, Row], names: Sequence[str], cases: Sequence[Any], jobs: int) -> dict[str, Measured]:
    """What the cases need of the named mechanisms: of each as many as it takes to know that it stays."""
    import mechanisms

    (commit,) = _log("-1")
    by_name = {}
    for name in names:
        mechanism = mechanisms.MECHANISMS[name]
        lines = lines_of([mechanisms.located(place) for place in mechanism.places])
        measured = by_name[name] = Measured(name, mechanism.purpose, commit, lines)
        acting = [case for case in cases if mechanism.unseen or name in (before[case.key].mechanisms or ())]
        acting.sort(key=lambda case: before[case.key].seconds)
        measured.acts, came = len(acting), introduced(name)
        while acting[measured.tried : _MOST] and measured.foreign < NEEDED:
            batch = acting[measured.tried : min(measured.tried + _BATCH, _MOST)]
            measured.tried += len(batch)
            with switched([name], False):
                for row in rows_of(batch, jobs):
                    if differences({row.key: before[row.key]}, {row.key: row}, ()):
                        booked(measured, before[row.key], row, came)
        print(f"{name}: {measured.tried} of {measured.acts}, {measured.foreign} need it", flush=True)
    return by_name


def table(rows: Iterable[Measured]) -> Iterator[str]:
    """The Markdown of an ablation."""
    yield (
        "| mechanism | what it is for | acts in | tried | defects lost | false alarms | other changes | own | lines "
        "| ns per op | decision |"
    )
    yield "|" + "---|" * 11
    for row in sorted(rows, key=lambda row: (row.decision == "deleted", -row.foreign, row.name)):
        cost = "" if row.nanoseconds is None else f"{row.nanoseconds:,.0f}"
        counts = row.acts, row.tried, len(row.lost), len(row.alarms), len(row.other), len(row.own), row.lines
        yield f"| {row.name} | {row.purpose} | {' | '.join(map(str, counts))} | {cost} | {row.decision} |"
    yield ""
    yield (
        f"Each mechanism was switched off in the cases in which it acts, until {NEEDED} of them were lost or became "
        "false alarms that were not written for it (own: those that were): then it stays. Other changes: of findings "
        "in cases that are found anyway."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ledger", type=Path, help="a ledger that was recorded with --record")
    parser.add_argument("--mechanisms", default="", metavar="NAME[,NAME]")
    parser.add_argument("--sources", default="", metavar="NAME[,NAME]")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=EVIDENCE)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args(arguments, argparse.Namespace(quick=False, before=None))
    os.chdir(ROOT)
    sys.path.append(str(ROOT / "tests"))
    import mechanisms
    from _evidence import write_evidence

    before = read(options.ledger)
    names = options.mechanisms.split(",") if options.mechanisms else list(mechanisms.NAMES)
    cases, _ = chosen(options)
    cases = [case for case in cases if case.key in before]
    imported(cases)
    known = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.is_file() else []
    rows = {row["name"]: Measured(**row) for row in known}
    for name, measured in ablate(before, names, cases, options.jobs).items():
        if not options.no_times and any(place.startswith("shadow.") for place in mechanisms.MECHANISMS[name].places):
            measured.nanoseconds = round(nanoseconds(name))
        measured.decide()
        rows[name] = measured
    for name in rows.keys() - set(mechanisms.NAMES):
        rows[name].decision = "deleted"
    write_evidence(
        options.json, {"rows": [asdict(row) for row in rows.values()]}, table(rows.values()), a_line_each="rows"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
