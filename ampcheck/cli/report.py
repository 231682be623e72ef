"""`ampcheck report`: runs that were written as JSON, merged or compared, in every form."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from ampcheck.cli.output import EXIT_CODES, Commands, Stdout, add_output, finish, print_report
from ampcheck.cli.sweep import load_sweep
from ampcheck.core import run as records
from ampcheck.core.errors import UsageError
from ampcheck.core.run import FAIL_ON, Run, Scalar, Table, merge
from ampcheck.core.settings import Settings, load_settings
from ampcheck.outcome.compare import FACTOR, compare
from ampcheck.report.sections import headline


def add_command(commands: Commands) -> None:
    """Add `report` to the parser's commands."""
    summary = "merge or compare runs that --json wrote, and write them in every form"
    report = commands.add_parser("report", help=summary, description=f"{summary.capitalize()}. {EXIT_CODES}")
    report.add_argument(
        "runs",
        nargs="*",
        metavar="RUN.json",
        help="of --json or `pytest --ampcheck-json`; or the "
        "--results of a sweep, a folder or a URL of fsspec: all its shards as one run",
    )
    report.add_argument(
        "--compare",
        action="store_true",
        help="compare two runs, the earlier first, and print what is new, worse or gone above the findings; only what "
        "is new or worse fails; line numbers may differ",
    )
    report.add_argument(
        "--factor",
        type=float,
        metavar="FACTOR",
        help=f"with --compare: a finding is worse if it is so many times further beyond its limit (default: {FACTOR})",
    )
    report.add_argument(
        "--fail-on",
        choices=tuple(FAIL_ON),
        help="the mildest verdict with which the exit code is 1 (default: fail, or that of pyproject.toml)",
    )
    report.add_argument("--schema", action="store_true", help="print the JSON Schema of runs, and nothing else")
    add_output(report, kind="report")
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    if options.schema:
        if options.runs:
            raise UsageError("--schema prints the schema of runs alone: leave the runs out")
        with Stdout() as out:
            print(Path(records.__file__).with_name("run.schema.json").read_text(encoding="utf-8"), end="")
        return out.code()
    if not options.runs:
        raise UsageError("name the files of runs, as --json or `pytest --ampcheck-json` writes them")
    if options.factor is not None and not options.compare:
        raise UsageError("--factor has an effect with --compare alone")
    if options.compare and len(options.runs) != 2:
        raise UsageError(f"--compare takes two runs, the earlier first; found {len(options.runs)}")

    settings = load_settings()
    loaded = [load_run(path, settings, options) for path in options.runs]
    runs = [run for run, _ in loaded]
    if options.compare:
        options.kind = "compare"
        factor = FACTOR if options.factor is None else options.factor
        run = compare(runs[0], runs[1], settings.folder, factor=factor)
    else:
        run = _merged(options.runs, runs)
    failed = any(run.of(verdict) for verdict in FAIL_ON[options.fail_on or settings.fail_on])
    tables = run.tables[:1] if options.compare or len(runs) > 1 else ()
    show = partial(print_report, run, tables, verbose=options.verbose, tables_first=options.compare)
    return finish(run, options, show, failed=failed) or max(code for _, code in loaded)


def load_run(path: str, settings: Settings, options: argparse.Namespace) -> tuple[Run, int]:
    """The run in a file, or of the sweep in a folder or at a URL, and the exit code where nothing in it fails.

    options: see `load_sweep`. Raises `UsageError` where there is none.
    """
    if path and ("://" in path or Path(path).is_dir()):
        return load_sweep(path, settings, options)
    return Run.load(path), 0


def _merged(paths: list[str], runs: list[Run]) -> Run:
    """The runs as one with a table of them; a single run without changes."""
    if len(runs) == 1:
        return runs[0]
    environment: dict[str, Scalar] = {}
    for name in dict.fromkeys(name for run in runs for name in run.environment):
        values = dict.fromkeys(run.environment[name] for run in runs if name in run.environment)
        environment[name] = next(iter(values)) if len(values) == 1 else " | ".join(map(str, values))
    rows = [(path, run.title, headline(run)) for path, run in zip(paths, runs, strict=True)]
    table, merged = Table("Runs", ("file", "run", "verdict"), rows), merge(runs)
    titles = dict.fromkeys(run.title for run in runs)
    title = f"{len(runs)} runs of {next(iter(titles))}" if len(titles) == 1 else f"{len(runs)} runs"
    return replace(merged, environment=environment, tables=(table, *merged.tables), title=title)
