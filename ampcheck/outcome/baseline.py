"""The baseline: findings that a repository accepts for a time, in a file beside its `pyproject.toml`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import write_atomically
from ampcheck.core.json_files import from_plain, read_json, to_plain, untag_nonfinite
from ampcheck.core.run import PROBLEMS, Finding, Verdict
from ampcheck.core.source import Place, place_of
from ampcheck.core.text import clean

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """Findings at one place that a repository accepts.

    code: the source line. count: how many findings at that place. message: that of the first, for the reader.
    expires: the last day (`2027-05-31`) on which they are accepted; empty for no end.
    """

    check: str
    subject: str
    phase: str
    module: str
    op: str
    file: str
    code: str
    count: int
    message: str
    reason: str
    author: str
    expires: str

    @property
    def place(self) -> Place:
        """The place of the findings."""
        return self.check, self.subject, self.phase, self.module, self.op, self.file, self.code

    def __str__(self) -> str:
        until = f" until {self.expires}" if self.expires else ""
        return f"by the baseline{until}: {self.reason}{f' ({self.author})' if self.author else ''}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The accepted findings of a repository. folder: to which their files are relative."""

    folder: Path
    findings: tuple[Accepted, ...] = field(default=())

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """The baseline in a file, empty without the file. Raises `UsageError` for a damaged file."""
        if not path.is_file():
            return cls(path.parent)
        advice = "mend it, or write it again with `ampcheck baseline`"
        try:
            data = read_json(path)
            require_schema(data, path.name, "baseline of ampcheck", SCHEMA)
            findings = tuple(from_plain(Accepted, untag_nonfinite(entry)) for entry in data["findings"])
            for entry in findings:
                if entry.expires:
                    date.fromisoformat(entry.expires)
        except UsageError:
            raise
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path.name} cannot be read: {clean(str(error))[:300]}; {advice}") from error
        return cls(path.parent, findings)

    def save(self, path: Path) -> None:
        """Write the file."""
        entries = [to_plain(entry) for entry in self.findings]
        text = json.dumps({"schema": SCHEMA, "findings": entries}, indent=1, ensure_ascii=False)
        write_atomically(path, text + "\n")

    def accept(self, findings: Iterable[Finding], today: date) -> Iterator[Finding]:
        """The findings; as many problems at each place as the baseline accepts become `ACCEPTED`, but for what follows
        from another."""
        left = Counter({entry.place: entry.count for entry in self.findings})
        entries = {entry.place: entry for entry in self.findings}
        for finding in findings:
            place = place_of(finding, self.folder)
            if finding.cause or finding.verdict not in PROBLEMS or not left[place]:
                yield finding
                continue
            left[place] -= 1
            entry = entries[place]
            if not entry.expires or today <= date.fromisoformat(entry.expires):
                yield replace(finding, verdict=Verdict.ACCEPTED, accepted=str(entry))
            else:
                yield replace(finding, message=f"{finding.message} (accepted {entry})")

    def gone(self, findings: Iterable[Finding]) -> list[Accepted]:
        """The entries with fewer findings than they accept, although their check judged their subject."""
        findings = tuple(findings)
        judged = judged_by(findings)
        found = Counter(place_of(f, self.folder) for f in problems_of(findings))
        return [e for e in self.findings if (e.check, e.subject) in judged and found[e.place] < e.count]

    def pruned(self, findings: Iterable[Finding]) -> Baseline:
        """This baseline without what is gone."""
        findings = tuple(findings)
        found = Counter(place_of(f, self.folder) for f in problems_of(findings))
        gone = {entry.place for entry in self.gone(findings)}
        left = (replace(e, count=found[e.place]) if e.place in gone else e for e in self.findings)
        return Baseline(self.folder, tuple(entry for entry in left if entry.count))

    def updated(self, findings: Iterable[Finding], reason: str, author: str, expires: str) -> Baseline:
        """This baseline without what is gone, and with the problems that it does not accept yet, ordered by place."""
        findings = tuple(findings)
        problems: dict[Place, list[Finding]] = {}
        for finding in problems_of(findings):
            problems.setdefault(place_of(finding, self.folder), []).append(finding)
        entries = {entry.place: entry for entry in self.pruned(findings).findings}
        for place, group in problems.items():
            old = entries.get(place)
            if old is None:
                old = Accepted(*place, len(group), group[0].message, reason, author, expires)
            entries[place] = replace(old, count=len(group))
        return Baseline(self.folder, tuple(sorted(entries.values(), key=lambda entry: entry.place)))


def problems_of(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Problems that follow from no other, accepted or not."""
    return (f for f in findings if f.verdict in (*PROBLEMS, Verdict.ACCEPTED) and not f.cause)


def judged_by(findings: Iterable[Finding]) -> set[tuple[str, str]]:
    """The checks that gave a verdict, each with its subject."""
    return {(f.check, f.subject) for f in findings if f.verdict in (*PROBLEMS, Verdict.ACCEPTED, Verdict.PASS)}
