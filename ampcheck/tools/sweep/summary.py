"""A sweep as one run: a table of its targets, one of their families, and the findings of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampcheck.core.run import SEVERITY, Finding, Run, Scalar, Table, Verdict, merge
from ampcheck.core.text import counted
from ampcheck.tools.sweep.listing import Entry
from ampcheck.tools.sweep.results import JUDGED, Result

_SHOWN = (Verdict.FAIL, Verdict.WARN, Verdict.INCOMPLETE, Verdict.PASS)
_PROBLEMS = SEVERITY[:4]


@dataclass(frozen=True, slots=True)
class Swept:
    """A target of a sweep with the result of its audit.

    name: in reports, which no other target of the sweep has. run: as the repository judges it. compilation: the run
    about it, None where it was not measured.
    """

    entry: Entry
    name: str
    result: Result
    run: Run
    compilation: Run | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its findings that is not a skip."""
        return next((verdict for verdict in self.run.counts() if verdict is not Verdict.SKIP), Verdict.SKIP)

    def problem(self, *, place: bool) -> str:
        """Why it was not judged, or its worst finding. place: with where that is."""
        worst = next((found[0] for verdict in _PROBLEMS if (found := self.run.of(verdict))), None)
        if self.result.reason or worst is None:
            return self.result.reason
        arm, where = f" ({worst.arm})" if worst.arm else "", f" at {worst.where}" if str(worst.where) else ""
        return f"{worst.check}{arm}{where if place else ''}"

    @property
    def clean(self) -> bool:
        """True if it was judged, and nothing was found."""
        return self.result.ended == JUDGED and self.verdict in (Verdict.PASS, Verdict.ACCEPTED, Verdict.SKIP)


def sweep_run(swept: Sequence[Swept], total: int) -> Run:
    """All findings that are no pass or skip, and the coverage of each target, below the tables of the sweep.

    The evidence of a target stays in its own file: that of hundreds would make no page. total: of targets; fewer
    results are those of a sweep that was interrupted.
    """
    runs = [run for target in swept for run in (target.run, target.compilation) if run is not None]
    merged = merge(Run(run.environment, tuple(filter(_kept, run.findings)), run.coverage) for run in runs)
    coverage = replace(merged.coverage, seen={"targets": len(swept), **merged.coverage.seen})
    of = counted(total, "targets") if len(swept) == total else f"{len(swept):,} of {total:,} targets, interrupted"
    title = ", ".join((f"sweep of {of}", *(f"{count:,} {word}" for word, count in _counts(swept).items() if count)))
    return replace(merged, coverage=coverage, tables=tuple(_tables(swept)), title=title)


def _counts(swept: Sequence[Swept]) -> dict[str, int]:
    """Return how many targets end in which way."""
    verdicts = Counter(target.verdict for target in swept)
    return {
        "failed": verdicts[Verdict.FAIL],
        "warned only": verdicts[Verdict.WARN],
        "clean": sum(target.clean for target in swept),
        "not judged": sum(target.result.ended != JUDGED for target in swept),
    }


def _kept(finding: Finding) -> bool:
    return finding.verdict not in (Verdict.PASS, Verdict.SKIP) or finding.check == "coverage"


def _tables(swept: Sequence[Swept]) -> list[Table]:
    tables = [sweep_table(swept)]
    families: dict[str, list[Swept]] = {}
    for target in swept:
        families.setdefault(target.entry.family, []).append(target)
    if any(families):
        tables.append(_families(families))
    compiled = [target for target in swept if target.compilation is not None]
    if not compiled:
        return tables
    from ampcheck.speed.gains.tables import figures_of, gain_tables  # imports torch

    models = [(t.name, t.entry.family, figures_of(t.compilation)) for t in compiled if t.compilation is not None]
    return [*tables, *gain_tables(models)]


def sweep_table(swept: Sequence[Swept]) -> Table:
    """A row for each target."""
    families = any(target.entry.family for target in swept)
    columns = (
        *("target", *(("family",) if families else ()), "verdict", *map(str, _SHOWN)),
        *("ops", "gradients", "seconds", "GiB", "first problem"),
    )
    note = (
        "Findings of each target by verdict; ops and gradients that were judged; seconds and the peak of memory of its "
        "process, sampled; its worst finding, or why it was not judged."
    )
    return Table("Targets", columns, [_row(target, families) for target in swept], note=note)


def brief_table(swept: Sequence[Swept]) -> Table:
    """A row for each target, for a terminal of 80 columns."""
    columns = ("target", "verdict", "fail", "warn", "s", "first problem")
    rows: list[tuple[Scalar, ...]] = []
    for target in swept:
        counts = target.run.counts()
        numbers = counts.get(Verdict.FAIL, 0), counts.get(Verdict.WARN, 0), target.result.seconds
        rows.append((target.name, str(target.verdict), *numbers, target.problem(place=False)))
    return Table("Targets", columns, rows)


def _row(target: Swept, families: bool) -> tuple[Scalar, ...]:
    counts, seen, result = target.run.counts(), target.run.coverage.seen, target.result
    return (
        *(target.name, *((target.entry.family,) if families else ()), str(target.verdict)),
        *(counts.get(verdict, 0) for verdict in _SHOWN),
        *(seen.get("ops", 0), seen.get("gradients", 0), result.seconds),
        None if result.memory is None else round(result.memory / 2**30, 2),
        target.problem(place=True),
    )


def _families(families: dict[str, list[Swept]]) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for name, members in sorted(families.items()):
        rows.append((name or "none", len(members), *_counts(members).values()))
    columns = ("family", "targets", *_counts(()))
    return Table("Families", columns, rows, note="Targets of each family by their worst verdict.")
