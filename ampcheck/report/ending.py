"""The end of a watched block or training: one line that always appears, and the findings that no error shows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from ampcheck.core.run import Run, Verdict
from ampcheck.core.text import counted
from ampcheck.report.fitting import LIMIT
from ampcheck.report.sections import Sections, arrange
from ampcheck.report.terminal import problem_lines
from ampcheck.report.text import clean, one_line

_MORE = "print(seen.run), after watch(...) as seen, shows all"
_REASONS = 3
"""So many reasons are printed why something was not judged."""


def print_ending(run: Run, raised: Collection[Verdict]) -> None:
    """Print the line, and what the error of the `raised` verdicts does not show; a closed or narrow stream is no error
    of the run."""
    content, rest, causes = arrange(run), run.findings, {f.key for verdict in raised for f in run.of(verdict)}
    if causes:
        rest = tuple([finding for finding in rest if finding.key not in causes and finding.cause not in causes])
    width = shutil.get_terminal_size((120, 24)).columns
    unjudged = (Verdict.UNDECIDED, Verdict.INCOMPLETE)
    reasons = dict.fromkeys(f"{f.verdict.value} {f.check}: {f.message}" for f in rest if f.verdict in unjudged)
    shown = arrange(replace(run, findings=rest)) if causes else content
    lines = [closing_line(content), *problem_lines(shown, width, limit=LIMIT - 1 - _REASONS, more=_MORE)]
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError, ValueError):
        for line in [*lines, *(one_line(reason, width) for reason in islice(reasons, _REASONS))]:
            print(line.encode(encoding, "backslashreplace").decode(encoding))


def closing_line(content: Sections) -> str:
    """Return what was looked at and found, such as `ampcheck: 120 steps, 12 measured, nothing found`."""
    return clean(", ".join(["ampcheck: " + ", ".join(_looked_at(content)), *_found(content)]))


def _looked_at(content: Sections) -> Iterator[str]:
    coverage = content.run.coverage
    seen = coverage.seen
    if "optimizer steps" in seen:
        yield counted(seen["optimizer steps"], "steps")
        if "measured steps" in seen:
            yield f"{seen['measured steps']:,} measured"
    else:
        named = [counted(seen[sort], sort) for sort in ("steps", "ops") if seen.get(sort)]
        yield ", ".join(named) or (str(coverage) if coverage.total else "nothing was looked at")


def _found(content: Sections) -> Iterator[str]:
    yield counted(len(content.causes), "findings") if content.causes else "nothing found"
    for verdict in (Verdict.UNDECIDED, Verdict.INCOMPLETE):
        if count := len(content.run.of(verdict)):
            yield f"{count:,} {verdict.value}"
