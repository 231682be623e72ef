"""`ampcheck lint`: mistakes of mixed precision and compilation that are visible without running."""

from __future__ import annotations

import argparse

from ampcheck.cli.output import Commands, add_output, finish, print_report, split_names
from ampcheck.core.run import PROBLEMS
from ampcheck.core.text import clean, counted


def add_command(commands: Commands) -> None:
    """Add `lint` to the parser's commands."""
    summary = "report mistakes of mixed precision and compilation that are visible without running"
    lint = commands.add_parser(
        "lint",
        help=summary,
        description="Read files of Python, without importing them or PyTorch, and report mistakes. Exit code 0: none; "
        "1: there are reports, also warnings; 2: usage error. `ampcheck explain AMP103` is the page of a rule; "
        "`# ampcheck: ignore[AMP103] reason` on or above a line accepts it.",
    )
    lint.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="files and folders (default: .)")
    lint.add_argument("--select", metavar="CODES", help="rules, their beginnings or patterns, such as AMP10,AMP113")
    lint.add_argument("--fix", action="store_true", help="write what can be mended safely, and report the rest")
    lint.add_argument("--no-cache", action="store_true", help="read every file, also those that have not changed")
    add_output(lint, kind="lint", verbose="print the hint of every report")
    lint.set_defaults(command=_lint)


def _lint(options: argparse.Namespace) -> int:
    from ampcheck.lint import fix, lint, rules

    select = split_names(options.select)
    fixed = fix(options.paths, select) if options.fix else 0
    run = lint(options.paths, select, cached=not options.no_cache)
    problems = [finding for finding in run.findings if finding.verdict in PROBLEMS]

    def show() -> None:
        if options.verbose:
            print_report(run, verbose=False)
            return
        for finding in problems:
            print(clean(f"{finding.where.place}: {finding.check} {finding.message}"))
        files = run.coverage.seen.get("files", 0)
        left = "".join(f", {counted(count, what)}" for what, count in run.coverage.unseen.items())
        text = f"{counted(len(problems), 'reports')} in {counted(files, 'files')}{left}"
        print(text + (f", {fixed:,} fixed" if fixed else ""))

    pages = {code: rule.check for code, rule in rules().items()}
    return finish(run, options, show, failed=bool(problems), rules=pages)
