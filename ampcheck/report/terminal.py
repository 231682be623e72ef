"""A run on a terminal: in 25 lines, cause first; plain for pytest, with colours and a table for the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ampcheck.core.run import Cause, Coverage, Finding, Run, Verdict, follow_line, source_lines
from ampcheck.core.text import counted
from ampcheck.report.fitting import LIMIT, Form, Part, fit, lines_of, plain
from ampcheck.report.sections import Sections, arrange
from ampcheck.report.text import MIN_WIDTH, cells, clean, command_lines, one_line, quantity, shorten_middle, wrap
from ampcheck.report.verdict_table import verdict_table

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    Verdict.FAIL: "bold red",
    Verdict.WARN: "yellow",
    Verdict.UNDECIDED: "magenta",
    Verdict.INCOMPLETE: "cyan",
    Verdict.ACCEPTED: "dim",
    Verdict.SKIP: "dim",
    Verdict.PASS: "green",
}
_CAUSES, _REASONS, _SUMMARY, _TABLE = range(4)
"""Ranks: failures, warnings and what could not be decided come before skips, these before passes and coverage."""

_ALL = "-v shows all"

_ALL_REASONS = "-v says why"

_MESSAGE = 3
"""Lines of a message in a report that is short of lines."""


def summary_lines(
    run: Run,
    *,
    width: int,
    verbose: bool = False,
    limit: int | None = LIMIT,
    more: str = _ALL,
    shown: Container[object] = (),
) -> Iterator[str]:
    """`run` as plain lines of at most `width` columns, but at least `MIN_WIDTH`.

    The headline; failures and warnings with their source and what follows from them; undecided, incomplete and skipped
    checks with the reason; passes as counts for each check; the coverage. At most `limit` lines: what does not fit is
    shortened or left out, and counted in a last line, with `more`, how to see it. verbose: everything in full. shown:
    keys of findings whose text stands elsewhere; they are only named.
    """
    content, width = arrange(run), max(width, MIN_WIDTH)
    problems = _problems(content, width, verbose, shown=() if verbose else shown)
    parts = [_heading(content, width), *problems, *_rest(content, width, verbose)]
    yield from map(plain, fit(parts, None if verbose else limit, _closing(width, more)))


def problem_lines(content: Sections, width: int, *, limit: int | None = LIMIT, more: str = "") -> Iterator[str]:
    """Failures and warnings with their source and what follows from them, in at most `limit` lines."""
    yield from map(plain, fit(list(_problems(content, width, verbose=False)), limit, _closing(width, more)))


def print_run(
    run: Run,
    console: Console,
    *,
    verbose: bool = False,
    quiet: bool = False,
    limit: int | None = LIMIT,
    more: str = _ALL,
) -> None:
    """Print `run` to a rich console as `summary_lines` does; if anything failed or warned, or verbose, with a table of
    verdicts by check and subject where it fits.

    quiet: the headline, failures and warnings alone. No failure is left out where this is so, or where the console is
    no terminal, on which somebody could ask for more. more: how to see what does not fit.
    """
    from rich.text import Text

    content, width = arrange(run), max(console.width, MIN_WIDTH)
    every_failure = quiet or not console.is_terminal
    parts = [_heading(content, width), *_problems(content, width, verbose, every_failure=every_failure)]
    if not quiet:
        if content.causes or verbose:
            parts.append(Part((tuple(verdict_table(content, width)), ()), _TABLE))
        elif len(content.subjects) > 1:
            judged = f"judged: {'; '.join(content.heads[name] for name in content.subjects)}"
            parts.append(
                Part((lines_of(wrap(judged, width, hanging="  ")), lines_of([one_line(judged, width)])), _SUMMARY)
            )
        parts += [*_rest(content, width, verbose, listed=True)]
    for line in fit(parts, None if verbose else limit, _closing(width, more)):
        styled = (Text(text, _STYLES[verdict] if verdict else "") for text, verdict in line)
        console.print(Text().join(styled), soft_wrap=True)  # a str would be parsed as markup


def _closing(width: int, more: str) -> Callable[[str], Iterator[str]]:
    return lambda counts: wrap(f"shortened or left out: {counts}{f'; {more}' if more else ''}", width, hanging="  ")


def _heading(content: Sections, width: int) -> Part:
    text = f"{content.run.title}: {content.headline}" if content.run.title else content.headline
    wrapped = lines_of(wrap(text, width, hanging="  "), content.verdict)
    return Part((wrapped, lines_of([one_line(text, width)], content.verdict)))


def _problems(
    content: Sections, width: int, verbose: bool, *, every_failure: bool = False, shown: Container[object] = ()
) -> Iterator[Part]:
    for cause in content.causes:
        finding, twins = cause.finding, cause.twins
        title, below = _title(finding), lines_of(_below(cause, width, verbose))
        full = (*_titled(finding, wrap(title, width, hanging="  ")), *lines_of(_in_full(finding, width)), *below)
        short = (*_titled(finding, [one_line(title, width)]), *lines_of(_in_short(finding, width)), *below)
        single = _titled(finding, [_placed(title, finding, width)])
        brief = (*single, *lines_of([f"  {one_line(finding.message, width - 2)}"]))
        advised = (*brief, *lines_of(_hint(finding, width)))
        required = every_failure and finding.verdict is Verdict.FAIL
        if twins[0].key in shown:
            yield Part((single,), _CAUSES, finding.verdict)
            continue
        yield Part((full, short, advised, brief, single, *([] if required else [()])), _CAUSES, finding.verdict)


def cause_lines(cause: Cause, width: int) -> Iterator[str]:
    """A cause in full: what its finding says, what it says in other arms, and what follows from it."""
    yield from wrap(_title(cause.finding), width, hanging="  ")
    yield from (*_in_full(cause.finding, width), *_below(cause, width, verbose=True))


def _title(finding: Finding) -> str:
    return f"{finding.verdict.upper()} {finding.check}: {finding.subject}"


def _below(cause: Cause, width: int, verbose: bool) -> Iterator[str]:
    yield from (*_other_arms(cause.twins, width, verbose), *_following(cause.following, width, verbose))


def _titled(finding: Finding, texts: Iterable[str]) -> Form:
    return lines_of(texts, finding.verdict)


def _placed(text: str, finding: Finding, width: int) -> str:
    """`text` on one line, cut before the place of the finding: its source line, or else its module."""
    place = shorten_middle(clean(finding.where.place or finding.where.module), max(width - MIN_WIDTH, width // 2))
    start = one_line(text, width)
    if not place or place in start:
        return start
    end = f", {place}"
    return one_line(f"{one_line(text, max(width - cells(end), 1))}{end}", width)


def _in_full(finding: Finding, width: int) -> Iterator[str]:
    """Message, place, source, figures, hint and command of a finding."""
    yield from wrap(finding.message, width, indent="  ", hanging="  ")
    if where := str(finding.where):
        yield from wrap(f"where: {where}", width, indent="  ", hanging="    ")
    yield from _source(finding, width)
    if numbers := _numbers(finding):
        yield from wrap(numbers, width, indent="  ", hanging="    ")
    yield from _hint(finding, width)
    yield from _command(finding, width)


def _in_short(finding: Finding, width: int) -> Iterator[str]:
    """The same without figures, with the start of the message."""
    yield from _start(wrap(finding.message, width, indent="  ", hanging="  "), _MESSAGE, width, "  ")
    if where := str(finding.where):
        yield f"  {_placed(f'where: {where}', finding, width - 2)}"
    yield from _source(finding, width)
    yield from _hint(finding, width)
    yield from _command(finding, width)


def _hint(finding: Finding, width: int) -> Iterator[str]:
    """Yield what to do about a finding, never cut."""
    if finding.hint:
        yield from wrap(f"hint: {finding.hint}", width, indent="  ", hanging="    ")


def _start(lines: Iterable[str], limit: int, width: int, indent: str) -> Iterator[str]:
    """The first lines of a text; an ellipsis at the end of the last if there are more."""
    lines = list(lines)
    yield from lines[: limit - 1]
    if rest := lines[limit - 1 :]:
        yield f"{indent}{one_line(' '.join(rest), width - len(indent))}"


def _command(finding: Finding, width: int) -> Iterator[str]:
    """The command that finds it again."""
    if finding.reproduce:
        yield from command_lines("  reproduce:", finding.reproduce, width)


def _source(finding: Finding, width: int) -> Iterator[str]:
    yield from (f"    {line}" for line in source_lines(finding, width - 4))


def _other_arms(twins: Sequence[Finding], width: int, verbose: bool) -> Iterator[str]:
    """Yield what the same finding says in its other arms."""
    for twin in twins[1:] if verbose else ():
        if twin.message != twins[0].message:
            yield from wrap(f"{twin.subject}: {twin.message}", width, indent="  ", hanging="    ")


def _following(following: Sequence[Finding], width: int, verbose: bool) -> Iterator[str]:
    if following:
        yield f"  {one_line(follow_line(following), width - 2)}" if not verbose else "  it explains:"
    for finding in following if verbose else ():
        inner = max(width - 4, MIN_WIDTH)
        yield from (f"    {line}" for line in (*wrap(_title(finding), inner, hanging="  "), *_in_full(finding, inner)))


def _numbers(finding: Finding) -> str:
    named = (("observed", finding.observed), ("limit", finding.limit))
    return ", ".join(f"{name}: {quantity(value, finding.unit)}" for name, value in named if value is not None)


def _rest(content: Sections, width: int, verbose: bool, *, listed: bool = False) -> Iterator[Part]:
    """Yield what was not judged, the passes and the coverage. listed: each reason why something was not seen in a
    line."""
    yield from _unjudged(content, width, verbose)
    if passes := list(_passes(content, width, verbose)):
        cut = (one_line(" ".join(passes), width),)
        yield Part((lines_of(passes, Verdict.PASS), lines_of(cut, Verdict.PASS)), _SUMMARY)
    covered = list(_coverage(content.run.coverage, width, listed=listed))
    yield Part((lines_of(covered), lines_of([one_line(" ".join(covered), width)])), _SUMMARY)


def _unjudged(content: Sections, width: int, verbose: bool) -> Iterator[Part]:
    """Each reason once, with its checks; without `verbose`, those of which the subject has nothing are only counted."""
    absent = [] if verbose else [f for f in content.unjudged if f.verdict is Verdict.SKIP and f.seen == 0]
    reasons: dict[tuple[Verdict, str, str], list[str]] = {}
    for finding in content.unjudged:
        if finding not in absent:
            advice = f" (hint: {finding.hint})" if finding.hint and finding.verdict is Verdict.INCOMPLETE else ""
            reason = (finding.accepted or finding.message) + advice
            named = finding.check if finding.verdict is not Verdict.SKIP else ""  # each of the others is an answer
            reasons.setdefault((finding.verdict, reason, named), []).append(finding.check)
    for (verdict, reason, _), checks in reasons.items():
        line = f"{verdict} {_counted_names(checks)}: {reason}"
        quiet = verdict in (Verdict.SKIP, Verdict.ACCEPTED)
        forms = (lines_of(wrap(line, width, hanging="  "), verdict), lines_of([one_line(line, width)], verdict), ())
        yield Part(forms, _REASONS if quiet else _CAUSES, verdict, len(checks))
    if absent:
        count = len({finding.check for finding in absent})
        line = f"{counted(count, 'checks')} {'does' if count == 1 else 'do'} not apply ({_ALL_REASONS})"
        yield Part((lines_of([one_line(line, width)], Verdict.SKIP), ()), _REASONS, Verdict.SKIP, len(absent))


def _counted_names(names: Sequence[str]) -> str:
    """`overflow ×2, flush`: each name once, with how often it stands there."""
    return ", ".join(f"{name} ×{times:,}" if times > 1 else name for name, times in Counter(names).items())


def _passes(content: Sections, width: int, verbose: bool) -> Iterator[str]:
    passed = [section for section in content.checks if section.passes]
    alone = len(passed) == 1 and len(content.run.findings) == 1
    if verbose or alone:
        for section in passed:
            for finding in section.passes:
                yield from wrap(f"pass {finding.check}: {finding.subject}: {finding.message}", width, hanging="  ")
    elif passed:
        counts = ", ".join(f"{section.check} {len(section.passes):,}" for section in passed)
        yield from wrap(f"passed: {counts}", width, hanging="  ")


def _coverage(coverage: Coverage, width: int, *, listed: bool) -> Iterator[str]:
    seen = f"coverage: {coverage if coverage.total else 'nothing was looked at'}"
    reasons = [f"{reason} ({count:,})" for reason, count in coverage.unseen.items()]
    if reasons and not listed:
        seen += f"; not seen: {', '.join(reasons)}"
    yield from wrap(seen, width, hanging="  ")
    if listed:
        for reason in reasons:
            yield from wrap(f"not seen: {reason}", width, indent="  ", hanging="    ")
