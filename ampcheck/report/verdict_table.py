"""A table of verdicts by check and subject, as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ampcheck.core.run import Verdict
from ampcheck.report.fitting import Line
from ampcheck.report.sections import CheckSection, Sections
from ampcheck.report.text import cells, clean, one_line, wrap

_GAP = "  "
_MANY_SUBJECTS = 16
"""With more subjects the table counts verdicts."""

_NOTHING = ("·", Verdict.SKIP)


def verdict_table(content: Sections, width: int) -> Iterator[Line]:
    """A column for each subject, below one another where they do not fit side by side; heads are folded, never cut."""
    judged = [section for section in content.checks if section.findings]
    if not judged:
        return
    if len(content.subjects) > _MANY_SUBJECTS:
        columns = [(f"{verdict}", verdict) for verdict in content.run.counts()]
        counts = {name: [_cell(s.counts.get(verdict, 0), verdict) for s in judged] for name, verdict in columns}
        yield from _tables(judged, counts, width)
        return
    shown = {content.heads[name]: [_cell(*section.worst_of(name)) for section in judged] for name in content.subjects}
    yield from _tables(judged, shown, width)


def _cell(count: int, verdict: Verdict) -> tuple[str, Verdict]:
    name = verdict.upper() if verdict is Verdict.FAIL else verdict.value
    return (f"{name} ×{count:,}" if count > 1 else name, verdict) if count else _NOTHING


def _tables(
    judged: Sequence[CheckSection], columns: dict[str, list[tuple[str, Verdict]]], width: int
) -> Iterator[Line]:
    """As many columns side by side as fit; below them the others, without rows in which nothing stands."""
    names = [clean(section.check) for section in judged]
    first = min(max(map(cells, (*names, "check"))), width // 2)
    left = list(columns)
    while left:
        space, shown = width - first, list[tuple[str, int]]()
        for head in left:
            words = (*clean(head).split(), *(text for text, _ in columns[head]))
            column = min(max(map(cells, words)), width - first - len(_GAP))
            if shown and column + len(_GAP) > space:
                break
            shown.append((head, column))
            space -= column + len(_GAP)
        left = left[len(shown) :]
        rows = [r for r in range(len(judged)) if any(columns[head][r] != _NOTHING for head, _ in shown)]
        yield from _table([names[r] for r in rows], first, [(h, w, [columns[h][r] for r in rows]) for h, w in shown])


def _table(
    names: Sequence[str], first: int, columns: Sequence[tuple[str, int, Sequence[tuple[str, Verdict]]]]
) -> Iterator[Line]:
    folded = [list(wrap("check", first)), *(list(wrap(head, width)) for head, width, _ in columns)]
    widths = [first, *(width for _, width, _ in columns)]
    for texts in zip_longest(*folded, fillvalue=""):
        yield ((_GAP.join(map(_padded, texts, widths)).rstrip(), None),)
    yield (("─" * (sum(widths) + len(_GAP) * (len(widths) - 1)), None),)
    for row, name in enumerate(names):
        head, *rest = [*wrap(name, first)] or [""]
        pieces: list[tuple[str, Verdict | None]] = [(_padded(head, first), None)]
        for _, width, values in columns:
            text, verdict = values[row]
            pieces += [(_GAP, None), (_padded(one_line(text, width), width), verdict)]
        yield (*pieces[:-1], (pieces[-1][0].rstrip(), pieces[-1][1]))
        yield from (((text, None),) for text in rest)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cells(text))
