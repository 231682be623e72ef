"""Which verdicts need which mechanism of `tests/mechanisms.py`: the law of evidence.

    python benchmarks/ledger.py --record --jobs 2 --json FILE          # which mechanisms act in which case
    python benchmarks/ablation.py FILE [--mechanisms NAME[,NAME]] [--only-sources NAME[,NAME]] [--jobs 2] [--no-times]
        [--json reports/evidence/ablation.json]

The cases in which any of the named mechanisms acts run without all of them; where that changes a verdict, the case runs
without each of them. A mechanism stays if three cases that were not written for it change their outcome; a false alarm
that it suppresses counts as much as a defect that it finds, and a second finding of a case that is found anyway does
not. Rows of mechanisms that are gone stay in the evidence, with the
commit at which they were measured. Cost is the time of a step of a small transformer under `Shadow`, with and without
the mechanism in turns, by op; a mechanism outside of the hot path has none.
"""

from __future__ import annotations

import argparse
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

_PAIRS = 20
_BETTER = ("at", "elsewhere", "missed"), ("silent", "warned", "alarm")
"""Outcomes of defects and of healthy cases, from the best on."""

_OF_CONSTANTS = ("tests/corpus/probabilities_clamped_by_eps", "tests/corpus/root_of_clamped_zero")

WRITTEN_FOR: Mapping[str, frozenset[str]] = {
    "format-constants": frozenset(_OF_CONSTANTS),
}
"""By mechanism, the cases that came with it: `git log --diff-filter=A --format=%h -- CASE` is a commit that changes the
file of the mechanism. Those of its own unit tests are in no ledger."""

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


def booked(measured: Measured, before: Row, after: Row) -> None:
    """Book a changed case: as lost, as a false alarm, or as other findings of the same worth."""
    name = " | ".join(before.key)
    for outcomes, worse in zip(_BETTER, (measured.lost, measured.alarms), strict=True):
        rank = {outcome: number for number, outcome in enumerate(outcomes)}
        if rank.get(before.outcome, len(rank)) < rank.get(after.outcome, -1):
            worse.append(name)
            return
    measured.other.append(name)


def ablate(before: Mapping[Key, Row], names: Sequence[str], cases: Sequence[Any], jobs: int) -> dict[str, Measured]:
    """What the cases need of the named mechanisms."""
    import mechanisms

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    by_name = {}
    for name in names:
        mechanism = mechanisms.MECHANISMS[name]
        lines = lines_of([mechanisms.located(place) for place in mechanism.places])
        by_name[name] = Measured(name, mechanism.purpose, commit, lines)
    acting = {case.key: set(before[case.key].mechanisms or ()) & set(names) for case in cases if case.key in before}
    for acts in acting.values():
        for name in acts:
            by_name[name].acts += 1
    for key, together in _without(before, cases, [key for key, acts in acting.items() if acts], names, jobs):
        alone = 0
        for name in sorted(acting[key]):
            for _, row in _without(before, cases, [key], [name], 1) if len(acting[key]) > 1 else [(key, together)]:
                booked(by_name[name], before[key], row)
                alone += 1
        if not alone:  # each of them suffices
            for name in acting[key]:
                booked(by_name[name], before[key], together)
    return by_name


def _without(
    before: Mapping[Key, Row], cases: Sequence[Any], keys: Collection[Key], names: Sequence[str], jobs: int
) -> Iterator[tuple[Key, Row]]:
    """The rows that change without the named mechanisms."""
    todo = [case for case in cases if case.key in set(keys)]
    with switched(names, False):
        rows = list(rows_of(todo, jobs))
    for row in rows:
        if differences({row.key: before[row.key]}, {row.key: row}, ()):
            yield row.key, row


def table(rows: Iterable[Measured]) -> Iterator[str]:
    """The Markdown of an ablation."""
    yield (
        "| mechanism | what it is for | acts in | defects lost | false alarms | other changes | own | lines "
        "| ns per op | decision |"
    )
    yield "|" + "---|" * 10
    for row in sorted(rows, key=lambda row: (row.decision == "deleted", -row.foreign, row.name)):
        cost = "" if row.nanoseconds is None else f"{row.nanoseconds:,.0f}"
        counts = row.acts, len(row.lost), len(row.alarms), len(row.other), len(row.own), row.lines
        yield f"| {row.name} | {row.purpose} | {' | '.join(map(str, counts))} | {cost} | {row.decision} |"
    yield ""
    yield (
        f"Each mechanism was switched off in the cases in which it acts. It stays if {NEEDED} of them are lost, or "
        "become false alarms, that were not written for it (own: those that were). Other changes: of findings in cases "
        "that are found anyway."
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
        written = WRITTEN_FOR.get(name, frozenset())
        keys = (*measured.lost, *measured.alarms, *measured.other)
        measured.own = [key for key in keys if key.startswith(tuple(written))] if written else []
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
