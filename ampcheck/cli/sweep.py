"""`ampcheck sweep`: audit many targets, each in a process of its own."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.selection import unjudged
from ampcheck.cli.following import second_interrupt_ends
from ampcheck.cli.interrupts import ending_of
from ampcheck.cli.output import EXIT_CODES, UNABLE, USAGE, Commands, Stdout, add_output, finish
from ampcheck.cli.targets import (
    add_audit_options,
    add_selection,
    command_of,
    for_target,
    settings_of,
    targets_of,
)
from ampcheck.core.arguments import parse_integer, parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.process_memory import total_memory
from ampcheck.core.run import FAIL_ON, Run, renamed
from ampcheck.core.settings import Settings, Target
from ampcheck.core.subject import name_of_target, names_of_targets
from ampcheck.core.text import counted, listed
from ampcheck.outcome.accept import accept, selected_groups
from ampcheck.outcome.raising import with_commands
from ampcheck.report import print_tables, progress_bar
from ampcheck.report.markdown import tables_of

if TYPE_CHECKING:
    from ampcheck.tools.sweep.listing import Entry
    from ampcheck.tools.sweep.results import Result, ResultFolder, Task
    from ampcheck.tools.sweep.summary import Swept

_TIME = 900.0
_SHARE = 0.8
"""Of the machine's memory, for all jobs together, by default."""

_RESULTS = "ampcheck-sweep"

_TABLES = "sweep.md"
"""The file with all tables, among the results."""

_SHARDS = 8
"""Of a matrix, by default."""

_ROWS = 40
"""Rows of the table on a terminal up to which those without a finding are shown too."""


def add_command(commands: Commands) -> None:
    """Add `sweep` to the parser's commands."""
    summary = "audit many targets, each in a process of its own, with limits of time and memory"
    sweep = commands.add_parser(
        "sweep",
        help=summary,
        description=f"{summary.capitalize()}. Each result is saved when its target is finished, and used until "
        f"code or options change: a sweep that is interrupted goes on where it ended. {EXIT_CODES}",
    )
    sweep.add_argument(
        "list",
        metavar="LIST",
        help="a file with a target a line (# begins a comment); a collection such as path/to/file.py:MODELS, a mapping "
        "of names to functions or a function that yields such pairs; or a folder with the collection ZOO in zoo.py",
    )
    sweep.add_argument("--only", default="*", metavar="PATTERN", help="audit the targets with such a name alone")
    sweep.add_argument(
        *("--results", "--out"),
        default=_RESULTS,
        metavar="URL",
        help="where results are kept: a folder, or a URL of fsspec such as s3://bucket/sweep (default: %(default)s); "
        "`ampcheck report URL` merges those of all shards",
    )
    sweep.add_argument("--fresh", action="store_true", help="audit every target again")
    _add_machines(sweep)
    sweep.add_argument(
        "--time", type=float, default=_TIME, metavar="S", help="seconds that one target may take (default: %(default)g)"
    )
    sweep.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help=f"memory that one target may use, on Linux (default: {_SHARE:.0%} of the machine's for all jobs; of "
        "another executor, what it gives)".replace("%", "%%"),
    )
    sweep.add_argument(
        "--speed",
        action="store_true",
        help="also measure what torch.compile and bfloat16 autocast are worth: speed, breaks, accuracy, memory, and "
        "starts with empty and full caches. Minutes a model; --jobs make the intervals wider",
    )
    add_audit_options(sweep)
    add_selection(sweep)
    add_output(sweep, kind="sweep", verbose="print a row for each target, of many too")
    sweep.set_defaults(command=_sweep)


def _add_machines(sweep: argparse.ArgumentParser) -> None:
    """Add the options that say where audits run, and how many."""
    sweep.add_argument(
        "--executor",
        default="local",
        metavar="WHERE",
        help="what runs the audits: local, processes of this machine (default); slurm, an array of jobs; "
        "dask://HOST:PORT, the workers of a scheduler of dask.distributed; or package.module:factory, which returns a "
        "concurrent.futures.Executor",
    )
    sweep.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="audits at the same time, of local (default: 1) and slurm; with --matrix, the shards (default: 8)",
    )
    sweep.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="LIMIT=VALUE",
        help="a limit of the jobs of --executor slurm, such as partition=gpu, time=60 (minutes), mem=32GB, "
        "gpus_per_node=1, account=NAME; may be repeated",
    )
    part = sweep.add_mutually_exclusive_group()
    part.add_argument("--shard", metavar="k/n", help="audit part k of n, the same on each machine")
    part.add_argument(
        "--matrix", choices=("github",), help="audit nothing, and print the matrix of a job for each of --jobs shards"
    )
    sweep.add_argument(
        "--costs",
        metavar="RUN.json",
        help="make shards of equal seconds as of this run of an earlier sweep, the same file for each shard (default: "
        "of equal numbers of targets)",
    )


def _sweep(options: argparse.Namespace) -> int:
    _require_valid(options)

    from ampcheck.tools.sweep.executors import opening
    from ampcheck.tools.sweep.listing import read_list
    from ampcheck.tools.sweep.results import AUDIT, COMPILATION, Allowance, ResultFolder, Task
    from ampcheck.tools.sweep.shards import costs_of, github_matrix, parse_shard, split
    from ampcheck.tools.sweep.summary import sweep_run
    from ampcheck.tools.sweep.sweep import sweep

    settings = settings_of(options)
    shard = parse_shard(options.shard) if options.shard else None
    entries = read_list(options.list, options.only)
    costs = costs_of(options.costs, entries) if options.costs else {}
    out = Stdout()
    if options.matrix:
        matrix = github_matrix(entries, options.jobs or min(_SHARDS, len(entries)), costs)
        with out:
            print(matrix)
        return out.code()
    options.targets = [entry.target for entry in entries]
    targets = {target.target: target for target in targets_of(options, settings)}
    names = names_of_targets(targets)
    commands = (AUDIT, COMPILATION) if options.speed else (AUDIT,)
    planned = [(Task(command, targets[e.target]), e.family) for e in entries for command in commands]
    own = {entry.target: entry for entry in (split(entries, shard[1], costs)[shard[0] - 1] if shard else entries)}
    tasks = [task for task, _ in planned if task.target.target in own]
    folder = ResultFolder(options.results)
    logs = (folder.folder.path or Path(_RESULTS).absolute()) / "slurm"
    executor = opening(options.executor, jobs=options.jobs, seconds=options.time, limits=options.slurm, folder=logs)
    allowance = Allowance(options.time, _memory(options))
    found: list[_Judged] = []
    stopped = 0
    with second_interrupt_ends(), ExitStack() as until_written:
        try:
            begin = partial(_begin, folder, planned, options, out, until_written)
            results = sweep(tasks, folder, allowance, executor, fresh=options.fresh, begin=begin)
            for judged in _judged(results, len(tasks), targets, names, settings, options):
                found.append(judged)  # noqa: PERF402  # an interrupt keeps those
        except KeyboardInterrupt as error:
            _, stopped = ending_of(error)
        if folder.reused:
            verb = "is" if folder.reused == 1 else "are"
            with out:
                print(f"{counted(folder.reused, 'results')} {verb} from an earlier sweep; --fresh audits again")
        swept = _swept(own, names, found)
        run = sweep_run(swept, len(own))
        run = replace(run, title=f"shard {options.shard}: {run.title}") if shard else run
        tables = _TABLES if shard is None else f"sweep-{shard[0]}-of-{shard[1]}.md"
        if not folder.is_current():
            other = "has another sweep by now, which `ampcheck report` shows"
            with out:
                print(f"{folder.folder} {other}: name another --results to keep the two apart")
            tables = ""
        elif found:
            folder.folder.write(tables, tables_of(run))
        show, failed = partial(_show, run, swept, options, tables), any(judged.failed for judged in found)
        code = finish(run, options, show, failed=failed, out=out)
    return stopped or code or _unjudged(found, settings, each=bool(options.select))


def _begin(
    folder: ResultFolder,
    planned: Sequence[tuple[Task, str]],
    options: argparse.Namespace,
    out: Stdout,
    until_written: ExitStack,
) -> None:
    """Write the manifest, and print what it changes. until_written: ends when all files of the sweep are written."""
    if not options.shard:
        until_written.enter_context(folder.folder.only_sweep())
    changed = folder.begin(planned, shared=bool(options.shard) and not options.fresh)
    if changed and not options.fresh:
        with out:
            print(changed)


class _Judged(NamedTuple):
    """A result, its run as the repository judges it, and whether that fails."""

    result: Result
    run: Run
    failed: bool


def _judged(
    results: Generator[Result, None, None],
    total: int,
    targets: Mapping[str, Target],
    names: Mapping[str, str],
    settings: Settings,
    options: argparse.Namespace,
) -> Iterator[_Judged]:
    """The results as they come, with the progress of the sweep. names: of targets, in reports."""
    with progress_bar() as progress, closing(results):
        progress("starting", 0, total)
        for number, result in enumerate(results, 1):
            name = names[result.target]
            judged = _judge(result, targets[result.target], name, settings, options)
            progress(f"the last: {result.command} of {name}", number, total)
            yield judged


def _judge(result: Result, target: Target, name: str, settings: Settings, options: argparse.Namespace) -> _Judged:
    from ampcheck.tools.sweep.results import AUDIT

    own = for_target(settings, target, options)
    run = accept(renamed(result.run, name_of_target(target.target), name), own)
    if result.command == AUDIT:
        run = with_commands(run, partial(command_of, target))
    return _Judged(result, run, any(run.of(verdict) for verdict in FAIL_ON[own.fail_on]))


def _require_valid(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that have no effect together, and for values out of their range."""
    if options.jobs is not None:
        parse_integer(options.jobs, "--jobs")
    parse_number(options.time, "--time")
    if options.memory is not None:
        parse_number(options.memory, "--memory")
    if options.costs and not (options.shard or options.matrix):
        raise UsageError("--costs is about shards: add --shard or --matrix, or leave it out")


def _memory(options: argparse.Namespace) -> int | None:
    if options.memory is not None:
        return int(options.memory * 2**30)
    total = total_memory() if options.executor == "local" else None
    return None if total is None else int(_SHARE * total / (options.jobs or 1))


def _swept(entries: Mapping[str, Entry], names: Mapping[str, str], found: Sequence[_Judged]) -> list[Swept]:
    """The targets with an audit, in their order."""
    from ampcheck.tools.sweep.results import AUDIT, COMPILATION
    from ampcheck.tools.sweep.summary import Swept

    by_command = {(judged.result.command, judged.result.target): judged for judged in found}
    swept = []
    for target, entry in entries.items():
        if (audit := by_command.get((AUDIT, target))) is not None:
            compilation = by_command.get((COMPILATION, target))
            compiled = compilation.run if compilation else None
            swept.append(Swept(entry, names[target], audit.result, audit.run, compiled))
    return swept


def _unjudged(found: Sequence[_Judged], settings: Settings, *, each: bool) -> int:
    """The exit code of a sweep in which nothing failed: another than 0 where not all was judged. each: see
    `selected_groups`."""
    from ampcheck.tools.sweep.results import CRASHED, JUDGED

    endings = {judged.result.ended for judged in found}
    if CRASHED in endings:
        return UNABLE
    findings = [finding for judged in found for finding in judged.run.findings]
    return USAGE if unjudged(findings, selected_groups(settings, each=each)) or endings != {JUDGED} else 0


def load_sweep(place: str, settings: Settings, options: argparse.Namespace) -> tuple[Run, int]:
    """The run of the sweep whose results are in a folder or at a URL, and the exit code where nothing in it fails: that
    of the sweep itself, and 2 where targets have no result yet.

    options: of `ampcheck report`. Raises `UsageError` for a place without a sweep.
    """
    from ampcheck.tools.sweep.listing import Entry
    from ampcheck.tools.sweep.results import ResultFolder
    from ampcheck.tools.sweep.summary import sweep_run

    known = {target.target: target for target in settings.targets}
    entries: dict[str, Entry] = {}
    found: list[_Judged] = []
    planned = ResultFolder(place).sweep()
    names = names_of_targets(target.target for target, *_ in planned)
    for target, family, result in planned:
        entries[target.target] = Entry(target.target, family)
        if result is not None:
            own = known.get(target.target, target)
            target = replace(target, severity=own.severity, fail_on=own.fail_on)
            found.append(_judge(result, target, names[target.target], settings, options))
    run = sweep_run(_swept(entries, names, found), len(entries))
    lacking = {target.target: names[target.target] for target, _, result in planned if result is None}
    if lacking:
        verb = "has" if len(lacking) == 1 else "have"
        text = (
            f"{len(lacking):,} of {counted(len(entries), 'targets')} {verb} no result yet: {listed(lacking.values())}"
        )
        finding = COVERAGE.incomplete(place, text, hint="run the shards that they are in")
        run = replace(run, findings=(finding, *run.findings))
    return run, _unjudged(found, settings, each=False) or (USAGE if lacking else 0)


def _show(run: Run, swept: Sequence[Swept], options: argparse.Namespace, tables_file: str) -> None:
    from ampcheck.tools.sweep.summary import brief_table

    shown = [target for target in swept if options.verbose or len(swept) <= _ROWS or not target.clean]
    tables = [table for table in run.tables[1:] if options.verbose or len(table.rows) <= _ROWS]
    print_tables([*([brief_table(shown)] if shown else []), *tables])
    if len(shown) < len(swept):
        print(f"{counted(len(swept) - len(shown), 'targets')} without a finding: -v prints their rows, too")
    where = f"; all tables: {options.results.rstrip('/')}/{tables_file}" if swept and tables_file else ""
    print(f"{run.title}{where}")
