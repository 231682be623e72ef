"""`ampcheck explain` and `ampcheck formats`: the pages about checks and verdicts, and the table of formats."""

from __future__ import annotations

import argparse
import textwrap

from ampcheck.checks import REGISTRY, VERDICTS, registered
from ampcheck.cli.output import Commands, Stdout
from ampcheck.core.check import Check
from ampcheck.core.errors import UsageError
from ampcheck.core.extensions import broken
from ampcheck.core.formats import table as table_of_formats
from ampcheck.core.text import did_you_mean


def add_command(commands: Commands) -> None:
    """Add `explain` and `formats` to the parser's commands."""
    explain = commands.add_parser("explain", help="explain a check: what it requires, its causes and remedies")
    explain.add_argument("slug", nargs="?", metavar="SLUG", help="a check or a verdict; default: list the checks")
    explain.set_defaults(command=_explain)
    formats = commands.add_parser("formats", help="print a table of the floating-point formats")
    formats.set_defaults(command=_formats)


def _explain(options: argparse.Namespace) -> int:
    from ampcheck.lint import rules

    if options.slug is None:
        lines = [f"{slug:20} {_first_sentence(one.check)}{_added(one.package)}" for slug, one in registered().items()]
        lines += [f"{code:20} {_first_sentence(rule.check)}" for code, rule in rules().items()]
        text = "\n".join([*lines, *(f"{one} is left out: {one.error}" for one in broken())])
    elif (page := page_of(slug := _named(options.slug))) is None:
        text = _paragraph(slug, VERDICTS[slug])
    else:
        titles = {
            page.slug: page.requires,
            "how it is measured": page.measured,
            "what usually causes it": page.causes,
            "how to fix it": page.fix,
        }
        text = "\n\n".join(_paragraph(title, paragraph) for title, paragraph in titles.items()) + "\n"
        if page.slug in registered() and (added := _added(registered()[page.slug].package).strip()):
            text += f"\n{added}\n"
    with Stdout() as out:
        print(text)
    return out.code()


def _named(text: str) -> str:
    """The check, the rule or the verdict that a text names, in whatever letters. Raises `UsageError` for none."""
    from ampcheck.lint import rules

    names = {name.lower(): name for name in (*REGISTRY, *rules(), *VERDICTS)}
    if (slug := names.get(text.strip().lower())) is None:
        meant = did_you_mean(text, names.values()) or f"there are {', '.join(names.values())}"
        raise UsageError(f"there is no check, rule or verdict {text!r:.60}: {meant}")
    return slug


def page_of(slug: str) -> Check | None:
    """The page of a check or of a rule of lint."""
    from ampcheck.lint import rules

    return rules()[slug].check if slug in rules() else REGISTRY.get(slug)


def _first_sentence(check: Check) -> str:
    return check.requires.split(". ")[0].rstrip(".") + "."


def _added(package: str) -> str:
    """The distribution that adds a check."""
    return f" (added by {package})" if package else ""


def _paragraph(title: str, text: str) -> str:
    return f"{title}\n{textwrap.indent(textwrap.fill(text, 98, break_on_hyphens=False), '  ')}"


def _formats(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = table_of_formats()
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    with Stdout() as out:
        Console(width=max(Console().width, 160)).print(table)  # a narrow terminal wraps lines; no number is cut
    return out.code()


def _cell(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
