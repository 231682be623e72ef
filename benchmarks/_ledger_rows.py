"""What the ledger keeps of a run, and how two ledgers are compared; without torch.

A row is a run of a case in a variant: of each arm the findings that are no pass and no skip, as (check, verdict,
place), and the numbers of the others. Seconds and those numbers are no part of a comparison, except that an arm in
which nothing was judged any more differs from one in which everything passed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Finding = tuple[str, str, str]
"""Check, verdict, place."""

Key = tuple[str, str]
"""Case and variant."""


@dataclass
class Arm:
    """One arm of a run: findings that are no pass and no skip, and how many passed and were skipped."""

    findings: list[Finding] = field(default_factory=list)
    passes: int = 0
    skips: int = 0

    @property
    def facts(self) -> set[str]:
        """What is compared, in words."""
        words = {" ".join(part for part in finding if part) for finding in self.findings}
        return words or ({"passes"} if self.passes else set())


@dataclass
class Row:
    """A run of a case. outcome: see `_ledger_cases.outcome`. seconds: of a processor, to one digit. mechanisms: which
    changed an outcome in the run, where that was recorded."""

    source: str
    case: str
    variant: str
    outcome: str = ""
    seconds: float = 0.0
    arms: dict[str, Arm] = field(default_factory=dict)
    mechanisms: list[str] | None = None

    @property
    def key(self) -> Key:
        return self.case, self.variant

    @property
    def checks(self) -> set[str]:
        """The checks that said something."""
        return {check for arm in self.arms.values() for check, *_ in arm.findings}

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        arms = {name: {k: v for k, v in arm.items() if v} for name, arm in plain["arms"].items()}
        return {**plain, "arms": arms}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        arms = {
            name: Arm([(f[0], f[1], f[2]) for f in arm.get("findings", ())], arm.get("passes", 0), arm.get("skips", 0))
            for name, arm in data["arms"].items()
        }
        return cls(**{**data, "arms": arms})


def read(path: Path) -> dict[Key, Row]:
    """The rows of a ledger."""
    rows = map(Row.from_json, json.loads(path.read_text(encoding="utf-8"))["rows"])
    return {row.key: row for row in rows}


@dataclass(frozen=True, order=True)
class Difference:
    """A verdict that is gone (`-`) or new (`+`)."""

    place: str
    sign: str
    fact: str

    def __str__(self) -> str:
        return f"{self.sign} {self.place}: {self.fact}"


GONE = "no longer run"


def differences(before: Mapping[Key, Row], after: Mapping[Key, Row], expected: Collection[Key]) -> list[Difference]:
    """What `after` says otherwise than `before`, of the runs that both have.

    expected: the runs of `before` that must be in `after`. A run that `before` lacks is no difference.
    """
    found: list[Difference] = []
    for key, old in before.items():
        new = after.get(key)
        if new is None:
            if key in expected:
                found.append(Difference(" | ".join(key), "-", GONE))
            continue
        for arm in {**old.arms, **new.arms}:
            facts = old.arms.get(arm, Arm()).facts, new.arms.get(arm, Arm()).facts
            place = " | ".join((*key, arm))
            found += [Difference(place, "-", fact) for fact in facts[0] - facts[1]]
            found += [Difference(place, "+", fact) for fact in facts[1] - facts[0]]
    return sorted(_essential(found))


def _essential(found: list[Difference]) -> Iterator[Difference]:
    """The differences without `passes` where findings of the same arm say as much."""
    told = {d.place for d in found if d.fact != "passes"}
    return (d for d in found if d.fact != "passes" or d.place not in told)


@dataclass(frozen=True)
class Signature:
    """Accepted differences: pattern of the place, sign, and pattern of the fact; `*` stands for anything."""

    reason: str
    place: str
    sign: str
    fact: str

    def accepts(self, difference: Difference) -> bool:
        return (
            self.sign == difference.sign
            and _matches(self.place, difference.place)
            and _matches(self.fact, difference.fact)
        )

    def __str__(self) -> str:
        return f"{self.sign} {self.place}: {self.fact} ({self.reason})"


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None


def read_signatures(path: Path) -> list[Signature]:
    """The signatures of a file; see its head for the format. Raises `ValueError` for a line that is none."""
    reason = place = ""
    found: list[Signature] = []
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for number, line in enumerate(
        re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.S).split("\n"), 1
    ):
        if line.startswith("## "):
            reason, place = line[3:].strip(), ""
        elif match := re.fullmatch(r"- `(.+)`", line):
            place = match[1]
        elif match := re.fullmatch(r"  - `([-+]) (.+)`", line):
            if not (reason and place):
                raise ValueError(f"{path.name}:{number}: a change stands below a heading with the reason and a `case`")
            found.append(Signature(reason, place, match[1], match[2]))
        elif line.lstrip().startswith(("- ", "* ")):
            raise ValueError(f"{path.name}:{number}: {line.strip()!r} is neither `case | variant | arm` nor `+ ...`")
    return found


def signed(
    found: Iterable[Difference], signatures: Collection[Signature]
) -> tuple[list[tuple[Difference, str]], list[Signature]]:
    """Each difference with the reason that accepts it, or nothing; and the signatures that accept nothing."""
    reasons, used = [], set[Signature]()
    for difference in found:
        accepting = [signature for signature in signatures if signature.accepts(difference)]
        used.update(accepting)
        reasons.append((difference, accepting[0].reason if accepting else ""))
    return reasons, [signature for signature in signatures if signature not in used]


def cover(rows: Iterable[Row], seconds: float) -> list[Key]:
    """A sample: runs in which every check speaks, cheapest first, then the cheapest of each sort, up to `seconds`.

    The first part is a greedy set cover by seconds and is taken whole.
    """
    left = sorted(rows, key=lambda row: (row.seconds, row.key))
    taken: list[Row] = []
    missing = {check for row in left for check in row.checks}
    while missing:
        best = max(left, key=lambda row: len(row.checks & missing) / (row.seconds + 0.1))
        missing -= best.checks
        taken.append(best)
        left.remove(best)
    spent = sum(row.seconds for row in taken)
    sorts: dict[tuple[str, str], list[Row]] = {}
    for row in left:
        sorts.setdefault((row.source, row.outcome), []).append(row)
    while sorts:
        for sort, members in list(sorts.items()):
            row = members.pop(0)
            if spent + row.seconds <= seconds:
                taken.append(row)
                spent += row.seconds + 0.1  # what a process costs
            if not members or spent + row.seconds > seconds:
                del sorts[sort]
    return [row.key for row in taken]


COLUMNS = {
    "at": "found at the line",
    "elsewhere": "found elsewhere",
    "missed": "missed",
    "silent": "healthy, silent",
    "warned": "healthy, warned",
    "alarm": "false alarms",
    "crash": "crashed",
    "timeout": "out of time",
    "refused": "refused",
    "": "nothing expected",
}
LISTED = ("missed", "elsewhere", "alarm", "warned", "crash", "timeout")


def table(rows: Iterable[Row], unheard: Collection[str]) -> Iterator[str]:
    """The Markdown of a ledger. unheard: checks that no run has."""
    rows = list(rows)
    yield "| source | runs | s | " + " | ".join(COLUMNS.values()) + " |"
    yield "|" + "---|" * (3 + len(COLUMNS))
    for source in [*dict.fromkeys(row.source for row in rows), "all"]:
        part = [row for row in rows if source in ("all", row.source)]
        counts = (sum(row.outcome == outcome for row in part) for outcome in COLUMNS)
        cells = source, len(part), round(sum(row.seconds for row in part)), *counts
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""
    yield (
        "Found at the line: the wanted check fails or warns where the case says; a case that names no place is found "
        "there by its check alone. Found elsewhere: something else fails or warns. A false alarm fails. s: of a "
        "processor, each rounded to one digit."
    )
    yield ""
    yield f"Checks without a run in which they speak: {', '.join(sorted(unheard)) or 'none'}."
    for outcome in LISTED:
        part = [row for row in rows if row.outcome == outcome]
        if part:
            yield from ("", f"## {COLUMNS[outcome].capitalize()}: {len(part)}", "")
            yield from (f"- {row.case}, {row.variant}: {_said(row)}" for row in part)


def _said(row: Row) -> str:
    loud = [f for arm in row.arms.values() for f in arm.findings if f[1] in ("fail", "warn") or f[0] in COLUMNS]
    texts = list(dict.fromkeys(" ".join(part for part in finding if part) for finding in loud))
    return "; ".join(texts[:3]) + (f"; {len(texts) - 3} more" if len(texts) > 3 else "") if texts else "nothing"
