"""`ampcheck sweep`: audit many targets, each in a process of its own."""

from __future__ import annotations

import argparse
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ampcheck.cli.following import second_interrupt_ends
from ampcheck.cli.interrupts import ending_of
from ampcheck.cli.output import EXIT_CODES, UNABLE, USAGE, Commands, add_output, finish
from ampcheck.cli.targets import (
    add_audit_options,
    add_selection,
    command_of,
    for_target,
    settings_of,
    targets_of,
    with_selection,
)
from ampcheck.core.arguments import parse_integer, parse_number
from ampcheck.core.subject import name_of_target
from ampcheck.core.text import counted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from ampcheck.core.run import Run
    from ampcheck.core.settings import Settings, Target
    from ampcheck.tools.sweep.results import Result
    from ampcheck.tools.sweep.summary import Swept

_TIME = 900.0
_SHARE = 0.8
"""Of the machine's memory, for all jobs together, by default."""

_TABLES = "sweep.md"
"""The file with all tables, among the results."""

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
        "--out", default="ampcheck-sweep", metavar="FOLDER", help="where results are kept (default: %(default)s)"
    )
    sweep.add_argument("--fresh", action="store_true", help="audit every target again")
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="audits at the same time (default: 1)")
    sweep.add_argument(
        "--time", type=float, default=_TIME, metavar="S", help="seconds that one target may take (default: %(default)g)"
    )
    sweep.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help=f"memory that one target may use, on Linux (default: {_SHARE:.0%} of the machine's for all jobs)".replace(
            "%", "%%"
        ),
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


def _sweep(options: argparse.Namespace) -> int:
    parse_integer(options.jobs, "--jobs")
    parse_number(options.time, "--time")
    if options.memory is not None:
        parse_number(options.memory, "--memory")

    from ampcheck.outcome.accept import selected_groups
    from ampcheck.report.markdown import tables_of
    from ampcheck.tools.sweep.listing import read_list
    from ampcheck.tools.sweep.results import AUDIT, COMPILATION, CRASHED, JUDGED, Allowance, ResultFolder, Task
    from ampcheck.tools.sweep.summary import Swept, sweep_run
    from ampcheck.tools.sweep.sweep import sweep

    settings = settings_of(options)
    entries = {entry.target: entry for entry in read_list(options.list, options.only)}
    options.targets = list(entries)
    targets = {target.target: target for target in targets_of(options, settings)}
    commands = (AUDIT, COMPILATION) if options.speed else (AUDIT,)
    tasks = [Task(command, target) for target in targets.values() for command in commands]
    folder = ResultFolder(Path(options.out))
    if not options.fresh and (text := folder.others(tasks)):
        print(text, flush=True)
    allowance = Allowance(options.time, _memory(options.memory, options.jobs))
    found: dict[str, dict[str, _Judged]] = {command: {} for command in (AUDIT, COMPILATION)}
    stopped = 0
    with second_interrupt_ends():
        try:
            results = sweep(tasks, folder, allowance, jobs=options.jobs, fresh=options.fresh)
            for judged in _judged(results, len(tasks), targets, settings, options):
                found[judged.result.command][judged.result.target] = judged
        except KeyboardInterrupt as error:
            _, stopped = ending_of(error)
        swept = []
        for name, entry in entries.items():
            if (audit := found[AUDIT].get(name)) is not None:
                compilation = found[COMPILATION].get(name)
                swept.append(Swept(entry, audit.result, audit.run, compilation.run if compilation else None))
        if folder.reused:
            verb = "is" if folder.reused == 1 else "are"
            print(f"{counted(folder.reused, 'results')} {verb} from an earlier sweep; --fresh audits again", flush=True)
        run = sweep_run(swept, len(targets))
        every = [judged for judgements in found.values() for judged in judgements.values()]
        failed = any(judged.failed for judged in every)
        show = partial(_show, run, swept, options)
        folder.write(_TABLES, tables_of(run))
        code = finish(run, options, show, failed=failed)
    endings = {judged.result.ended for judged in every}
    if stopped:
        return stopped
    if not failed and CRASHED in endings:
        return UNABLE
    lacking = with_selection([judged.run for judged in every], selected_groups(settings, each=True), options)[1]
    return code or (USAGE if lacking or endings != {JUDGED} else 0)


class _Judged(NamedTuple):
    """A result, its run as the repository judges it, and whether that fails."""

    result: Result
    run: Run
    failed: bool


def _judged(
    results: Generator[Result, None, None],
    total: int,
    targets: Mapping[str, Target],
    settings: Settings,
    options: argparse.Namespace,
) -> Iterator[_Judged]:
    """The results as they come, with the progress of the sweep."""
    from ampcheck.core.run import FAIL_ON
    from ampcheck.outcome.accept import accept
    from ampcheck.outcome.raising import with_commands
    from ampcheck.report import progress_bar
    from ampcheck.tools.sweep.results import AUDIT

    with progress_bar() as progress, closing(results):
        progress("starting", 0, total)
        for number, result in enumerate(results, 1):
            target = targets[result.target]
            own = for_target(settings, target, options)
            run = accept(result.run, own)
            if result.command == AUDIT:
                run = with_commands(run, partial(command_of, target))
            progress(f"the last: {result.command} of {name_of_target(result.target)}", number, total)
            yield _Judged(result, run, any(run.of(verdict) for verdict in FAIL_ON[own.fail_on]))


def _memory(gib: float | None, jobs: int) -> int | None:
    from ampcheck.core.process_memory import total_memory

    if gib is not None:
        return int(gib * 2**30)
    total = total_memory()
    return None if total is None else int(_SHARE * total / jobs)


def _show(run: Run, swept: Sequence[Swept], options: argparse.Namespace) -> None:
    from ampcheck.report import print_tables
    from ampcheck.tools.sweep.summary import brief_table

    shown = [target for target in swept if options.verbose or len(swept) <= _ROWS or not target.clean]
    tables = [table for table in run.tables[1:] if options.verbose or len(table.rows) <= _ROWS]
    print_tables([*([brief_table(shown)] if shown else []), *tables])
    if len(shown) < len(swept):
        print(f"{counted(len(swept) - len(shown), 'targets')} without a finding: -v prints their rows, too")
    print(f"{run.title}; all tables: {Path(options.out) / _TABLES}")
