"""`ampcheck show`: short answers from a run that was written as JSON. `ampcheck guide`: a page for coding agents."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from ampcheck.cli.explain import page_of
from ampcheck.cli.output import Commands, Stdout
from ampcheck.cli.report import load_run
from ampcheck.core.errors import UsageError
from ampcheck.core.finding import SEVERITY, Finding, Scalar, Verdict, nearest_first
from ampcheck.core.json_files import tag_nonfinite, to_plain
from ampcheck.core.run import Cause, ModelMap, Run, Site, Table, causes
from ampcheck.core.settings import load_settings
from ampcheck.core.text import did_you_mean, listed
from ampcheck.report.fitting import plain
from ampcheck.report.sections import Sections, arrange
from ampcheck.report.terminal import cause_lines
from ampcheck.report.text import MIN_WIDTH, clean, number, one_line, wrap
from ampcheck.report.verdict_table import verdict_table

_VALUES = {"finding": "N", "check": "NAME", "module": "PATH", "op": "NAME", "arm": "WORD ..."}
"""Kinds of things that can be asked for, with the value of each."""

_ARTICLES = {"op": "an", "arm": "an"}

_ROOT = "(root)"
"""The module whose path is empty, as tables name it."""

_QUIET = (Verdict.SKIP, Verdict.PASS)
_FINDINGS, _ROWS = 40, 10
"""So many findings, and rows of a table, are printed; --json has all."""


def add_command(commands: Commands) -> None:
    """Add `show` and `guide` to the parser's commands."""
    summary = "answer from a run that --json wrote: its findings, one of them, a module, an op, an arm"
    show = commands.add_parser(
        "show",
        help=summary,
        description=f"{summary.capitalize()}. Exit code 0: it was read, whatever its verdict; 2: usage error.",
    )
    show.add_argument("run", metavar="RUN.json", help="of --json or `pytest --ampcheck-json`, or --results of a sweep")
    asked = ", ".join(f"{kind} {value}" for kind, value in _VALUES.items())
    text = f"{asked}; all but finding can be combined. Default: the verdict, counts, and each finding in a line"
    show.add_argument("words", nargs="*", default=[], metavar="WHAT", help=text)
    show.add_argument("--json", action="store_true", help="print the answer as JSON, in full")
    show.set_defaults(command=_show, fail_on=None)
    guide = commands.add_parser("guide", help="print a page for coding agents: which command when, how to mend what")
    guide.set_defaults(command=_guide)


def _guide(options: argparse.Namespace) -> int:
    text = Path(__file__).with_name("guide.md").read_text(encoding="utf-8")
    with Stdout() as out:
        print(re.sub(r"<!-- .* -->\n\n?", "", text), end="")  # they say how a test runs the snippets
    return out.code()


def _show(options: argparse.Namespace) -> int:
    run, _ = load_run(options.run, load_settings(), options)
    question = Question(options.run, run, _asked(options.words, Question(options.run, run).names()))
    question.require_answer()
    width = max(shutil.get_terminal_size((160, 24)).columns, MIN_WIDTH)
    with Stdout() as out:
        if options.json:
            print(json.dumps(tag_nonfinite(question.as_json()), allow_nan=False))
        else:
            print(*question.lines(width), sep="\n")
    return out.code()


def _asked(words: Iterable[str], names: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The words by what they ask for: the first after a kind is its value, whatever it is called. names: of the run."""
    asked: dict[str, list[str]] = {}
    kind = ""
    for word in words:
        if kind and (not asked[kind] or (kind == "arm" and word not in _VALUES)):
            asked[kind] += word.replace(",", " ").split() if kind == "arm" else [word or _ROOT]
        elif word in _VALUES:
            kind = word
            asked.setdefault(kind, [])
        else:
            meant = "" if asked else _what_is(word, names)
            meant = meant or did_you_mean(word, _VALUES) or "a word more than it takes"
            raise UsageError(f"after RUN.json comes one of {', '.join(_VALUES)}; found {word!r}, {meant}")
    if kind and not asked[kind]:
        raise UsageError(f"{kind} needs a value: {kind} {_VALUES[kind]}")
    if "finding" in asked and len(asked) > 1:
        raise UsageError(f"finding {asked['finding'][0]} is one finding: leave out what else chooses")
    return asked


def _what_is(word: str, names: Mapping[str, set[str]]) -> str:
    """`it is a check: ask for check overflow`; empty for a word that nothing of the run has as its name."""
    kind = next((kind for kind in _VALUES if word in names[kind]), "")
    return f"it is {_ARTICLES.get(kind, 'a')} {kind}: ask for {kind} {word}" if kind else ""


@dataclass(frozen=True, slots=True)
class Question:
    """A query of the run in the file `path`: findings, and rows of evidence, that agree with all of `asked`."""

    path: str
    run: Run
    asked: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def require_answer(self) -> None:
        """Raise `UsageError` for a run without findings, and for what the run does not name."""
        if not self.run.findings and (self.asked or not self.run.coverage.seen):
            raise UsageError(f"{self.path} is a run without findings to show; it looked at {self.run.coverage}")
        names = self.names()
        for kind, value in ((kind, value) for kind, values in self.asked.items() for value in values):
            if value not in names[kind] and not replace(self, asked={kind: [value]}).evidence():
                own = sorted(names[kind], key=lambda name: (len(name), name))
                meant = _what_is(value, names) or did_you_mean(value, own) or f"it has {listed(own, 12) or 'none'}"
                raise UsageError(f"{self.path} has no {kind} {value!r}; {meant}")

    def names(self) -> dict[str, set[str]]:
        """The names in the run by what can be asked for."""
        sites = [_names(module=site.module or _ROOT, op=site.op) for one in self.run.maps for site in one.sites]
        places = [*sites, *map(_names_of, self.run.findings)]
        names = {kind: {name for place in places for name in place.get(kind, ()) if name} for kind in _VALUES}
        return {**names, "finding": set(map(str, self.numbered()))}

    def numbered(self) -> dict[int, Cause]:
        """The causes of the run, the worst first, by their numbers."""
        wanted = nearest_first(finding for finding in self.run.findings if finding.verdict not in _QUIET)
        return dict(enumerate(causes(self.run.findings, wanted), 1))

    def findings(self) -> dict[int, Cause]:
        """Those that were asked for, in the arms that were asked for."""
        if chosen := self.asked.get("finding"):
            return {n: cause for n, cause in self.numbered().items() if str(n) == chosen[0]}
        found = {n: cause for n, cause in self.numbered().items() if self.at((*cause.twins, *cause.following))}
        return {n: replace(c, twins=tuple(self.at(c.twins)) or c.twins) for n, c in found.items()}

    def at(self, findings: Iterable[Finding]) -> list[Finding]:
        """The findings, whatever their numbers, at places that were asked for."""
        asked = [(kind, value) for kind, values in self.asked.items() for value in values]
        named = [(finding, _names_of(finding)) for finding in findings]
        return [finding for finding, names in named if all(value in names[kind] for kind, value in asked)]

    def evidence(self) -> list[Table]:
        """The values at places and the tables of the run, with the rows alone that name the module and the op."""
        wanted = [(kind, self.asked[kind][0]) for kind in ("module", "op") if kind in self.asked]
        if not wanted or "check" in self.asked:
            return []

        def agrees(row: Sequence[Scalar]) -> bool:
            cells = [_names(module=cell, op=cell) for cell in row if isinstance(cell, str)]
            return all(any(value in names[kind] for names in cells) for kind, value in wanted)

        words = {*self.asked.get("arm", ())}
        others = {f"[{one.arm}]" for one in self.run.findings if one.arm and not words <= _names_of(one)["arm"]}
        tables = (*map(_values, self.run.maps), *self.run.tables)
        shown = [table for table in tables if not any(arm in table.title for arm in others)]
        rows = [replace(table, rows=list(filter(agrees, table.rows))) for table in shown]
        return [table for table in rows if table.rows]

    def as_json(self) -> dict[str, object]:
        """The answer as data: verdict and counts of the whole run, and what was asked for."""
        findings = []
        for n, cause in self.findings().items():
            more = {"arms": [str(twin.arm) for twin in cause.twins], "explains": to_plain(cause.following)}
            accept = _acceptance(cause.finding, self.path)
            findings.append({"number": n, **to_plain(cause.finding), **more, "accept": accept})
        head = {"run": self.path, "title": self.run.title, "verdict": arrange(self.run).headline}
        counts = {str(verdict): count for verdict, count in self.run.counts().items()}
        return {**head, "counts": counts, "findings": findings, "evidence": to_plain(self.evidence())}

    def lines(self, width: int) -> Iterator[str]:
        """The answer in lines of at most `width` columns."""
        found, content = self.findings(), arrange(self.run)
        if "finding" in self.asked:
            for cause in found.values():
                yield from _in_full(cause, self.path, width)
            return
        if not self.asked:
            yield from _overview(content, width)
        for n, cause in [*found.items()][:_FINDINGS]:
            finding, where = cause.finding, cause.finding.where
            name = finding.subject if content.judged > 1 else cause.arms
            place = ", ".join(filter(None, (name, where.place or where.op, where.module)))
            text = f"{n} {finding.verdict.upper()} {finding.check}{place and f' [{place}]'}: {finding.message}"
            yield one_line(text, width)
        if len(found) > _FINDINGS:
            yield f"{len(found) - _FINDINGS:,} more: check, module, op and arm choose among them, --json has all"
        counts = [f"{verdict} {n}" for verdict in SEVERITY if (n := len(self.at(self.run.of(verdict))))]
        first = shlex.join(["ampcheck", "show", self.path, "finding", f"{min(found, default=0)}"])
        yield f"in full: {clean(first)}" if found else f"nothing to mend: {', '.join(counts) or 'no finding names it'}"
        for table in self.evidence():
            yield from ("", one_line(table.title, width))
            for row in table.rows[:_ROWS]:
                cells = zip(table.columns, row, strict=True)
                text = "; ".join(f"{name} {number(cell)}" for name, cell in cells if cell not in ("", None))
                yield from wrap(text, width, indent="  ", hanging="    ")
            if len(table.rows) > _ROWS:
                yield f"  {len(table.rows) - _ROWS:,} more: --json has all"


def _overview(content: Sections, width: int) -> Iterator[str]:
    """The verdict, counts by check and arm, and what was looked at."""
    run = content.run
    yield from wrap(f"{run.title}: {content.headline}", width, hanging="  ")
    loud = {section.check for section in content.checks if section.worst not in (None, *_QUIET)}
    yield from map(plain, verdict_table(arrange(run.only(loud)), width))
    for verdict, text in ((Verdict.PASS, "passed"), (Verdict.SKIP, "skipped")):
        counts = [f"{s.check} {s.counts[verdict]}" for s in content.checks if s.worst is verdict]
        yield from wrap(f"{text}: {', '.join(counts)}", width, hanging="  ") if counts else ()
    unseen = [f"{reason} ({count:,})" for reason, count in run.coverage.unseen.items()]
    yield from wrap(f"looked at: {run.coverage}", width, hanging="  ")
    yield from wrap(f"not seen: {', '.join(unseen)}", width, hanging="  ") if unseen else ()


def _in_full(cause: Cause, path: str, width: int) -> Iterator[str]:
    """A cause, its page, how to accept it."""
    yield from cause_lines(cause, width)
    page = page_of(cause.finding.check)
    texts = [f"usual causes: {page.causes}", f"how to fix it: {page.fix}"] if page else []
    for text in (*texts, _acceptance(cause.finding, path)):
        yield from wrap(text, width, indent="  ", hanging="    ")


def _acceptance(finding: Finding, path: str) -> str:
    """Return how the repository accepts a finding."""
    if finding.accepted:
        return f"accepted {finding.accepted}"
    if finding.where.place:
        return f"to accept it: # ampcheck: ignore[{finding.check}] REASON, in or above {finding.where.place}"
    return f"to accept all of the run: {shlex.join(['ampcheck', 'baseline', '--from', path, '--reason', 'REASON'])}"


def _values(one: ModelMap) -> Table:
    """The values of a model place by place, as a table; those that are damaged first."""
    columns = [field.name for field in fields(Site) if field.name not in ("first", "bins")]
    damaged_first = sorted(one.sites, key=lambda site: (not site.lost, not site.nonfinite))
    sites = [replace(site, module=site.module or _ROOT) for site in damaged_first]
    return Table(f"Values: {one.subject}", columns, [[getattr(site, name) for name in columns] for site in sites])


def _names_of(finding: Finding) -> dict[str, set[str]]:
    where = finding.where
    return _names(finding.check, where.module or (_ROOT if where.op else ""), where.op, str(finding.arm))


def _names(check: str = "", module: str = "", op: str = "", arm: str = "") -> dict[str, set[str]]:
    """The names by which something is found: a module by parts of its path, an op also without namespace or overload,
    an arm by its words."""
    parts = module.split(".")[:40] if " " not in module else []  # no model is deeper; other text may be
    paths = {".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1)}
    ops = {name for full in (op, op.partition(".")[0]) for name in (full, full.rpartition("::")[2])}
    return {"check": {check}, "module": paths, "op": ops, "arm": {*arm.replace(",", "").split()}}
