"""A report in a number of lines: each part has several forms, and the parts that matter most get the longest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ampcheck.core.run import SEVERITY, Verdict
from ampcheck.core.text import counted

LIMIT = 25
"""Lines of a report by default."""

Line: TypeAlias = "tuple[tuple[str, Verdict | None], ...]"
"""A line: pieces of text, each with the verdict whose colour it has."""

Form: TypeAlias = "tuple[Line, ...]"

_AFTER_CAUSE = 5
"""Lines that the first cause leaves to the others, at most."""

_WELL = 3
"""The best forms, in which the first cause is shown if it fits at all."""

_NOUNS = {Verdict.FAIL: "failures", Verdict.WARN: "warnings", Verdict.PASS: "passes"}


def plain(line: Line) -> str:
    """The text of a line."""
    return "".join(text for text, _ in line)


def lines_of(texts: Iterable[str], verdict: Verdict | None = None) -> Form:
    """Texts as lines in the colour of a verdict."""
    return tuple(((text, verdict),) for text in texts)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a report.

    forms: the same in fewer and fewer lines, the best first; the last may have none. rank: parts of a lower rank get
    their lines first. verdict, count: the findings that forms other than the best shorten or leave out, None where
    there are none.
    """

    forms: Sequence[Form]
    rank: int = 0
    verdict: Verdict | None = None
    count: int = 1


def fit(parts: Sequence[Part], limit: int | None, closing: Callable[[str], Iterable[str]]) -> Iterator[Line]:
    """The parts in at most `limit` lines, None for any number. What is shortened or left out is counted at the end.

    closing: the lines that show the counts, such as `3 failures, 2 warnings`. The first part with a verdict is the
    cause that a reader looks for: it gets its lines before the others, to which it leaves up to five. More than five
    parts about findings that may not be left out get as many more lines.
    """
    forms = [part.forms[0] for part in parts]
    if limit is not None:
        required = sum(part.verdict is not None and len(part.forms[-1]) > 0 for part in parts)
        limit = max(limit, limit - _AFTER_CAUSE + required)
    if limit is not None and sum(map(len, forms)) > limit:
        everything = _counts({verdict: sum(p.count for p in parts if p.verdict is verdict) for verdict in SEVERITY})
        forms = _chosen(parts, limit - len(list(closing(everything))))
    for form in forms:
        yield from form
    hidden: Counter[Verdict] = Counter()
    for part, form in zip(parts, forms, strict=True):
        if part.verdict is not None and form != part.forms[0]:
            hidden[part.verdict] += part.count
    if hidden:
        yield from lines_of(closing(_counts(hidden)))


def _counts(counts: Mapping[Verdict, int]) -> str:
    return ", ".join(_counted(verdict, counts[verdict]) for verdict in SEVERITY if counts.get(verdict))


def _counted(verdict: Verdict, count: int) -> str:
    named = "skipped" if verdict is Verdict.SKIP else verdict.value
    return counted(count, _NOUNS[verdict]) if verdict in _NOUNS else f"{count:,} {named}"


def _chosen(parts: Sequence[Part], limit: int) -> list[Form]:
    """A form of each part, `limit` lines together where the shortest forms allow it."""
    forms = [part.forms[-1] for part in parts]

    def grow(number: int, spared: int = 0, most: int = limit) -> None:
        """Choose the best form of at most `most` lines that leaves `spared` lines."""
        left = limit - sum(map(len, forms)) + len(forms[number]) - spared
        fits = (form for form in parts[number].forms if len(form) <= min(left, most))
        forms[number] = next(fits, forms[number])

    causes = [number for number, part in enumerate(parts) if part.verdict is not None]
    if causes:
        first, *others = causes
        spared = min(sum(parts[number].rank == parts[first].rank for number in others), _AFTER_CAUSE)
        grow(first, spared)
        if forms[first] not in parts[first].forms[:_WELL]:
            grow(first)
    for rank in sorted({part.rank for part in parts}):
        members = [number for number, part in enumerate(parts) if part.rank == rank]
        for number in members:
            if not forms[number]:
                grow(number, most=1)
        for number in members:
            grow(number)
    return forms
