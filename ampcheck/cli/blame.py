"""`ampcheck blame`: the cause of a failure and the modules to keep in float32. No numerics here."""

from __future__ import annotations

import argparse

from ampcheck.cli.output import Commands, add_output, finish, print_report, split_names
from ampcheck.core.subject import TARGET_FORMS
from ampcheck.report import print_tables, progress_bar
from ampcheck.report.text import clean
from ampcheck.target import load_placed


def add_command(commands: Commands) -> None:
    """Add `blame` to the parser's commands."""
    blame = commands.add_parser(
        "blame",
        help="name the stage, the op and the modules that make a model fail",
        description="Name the stage (eager low precision, aot_eager, Inductor), the first op beyond its bound, and the "
        "smallest set of modules to keep in float32, as code to paste. Exit code 0: nothing fails; 1: something does; "
        "2: usage error.",
    )
    blame.add_argument("target", metavar="TARGET", help=TARGET_FORMS)
    blame.add_argument(
        "--device",
        help="device to run on (default: cpu, or cuda where the target asks for it); one that this machine lacks is "
        "emulated",
    )
    blame.add_argument(
        "--dtype",
        metavar="DTYPES",
        help="float16, bfloat16, or float32 for the model's own dtypes, separated by commas (default: "
        "float16,bfloat16; a subject to be compiled also in its own dtypes)",
    )
    blame.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="run the stages of torch.compile too"
    )
    blame.add_argument(
        "--time",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time the step with and without the modules in float32",
    )
    blame.add_argument("--steps", type=int, default=1, help="successive calls, each with an update (default: 1)")
    blame.add_argument("--runs", type=int, default=60, help="sets of modules to try at most (default: %(default)s)")
    add_output(blame, kind="blame", verbose="print every finding in full")
    blame.set_defaults(command=_blame)


def _blame(options: argparse.Namespace) -> int:
    from rich.console import Console

    with progress_bar() as progress:
        progress("loading torch and the subject", 0, 1)
        from ampcheck.autocast.asked import on_cpu_or_cuda
        from ampcheck.causes.blame import blame
        from ampcheck.causes.tables import is_code
        from ampcheck.compiled.options import BlameOptions

        run = on_cpu_or_cuda(
            lambda device: blame(
                load_placed(options.target, device),
                device=device,
                dtype=None if options.dtype is None else split_names(options.dtype),
                compile=options.compile,
                search=BlameOptions(steps=options.steps, runs=options.runs, time=options.time),
                progress=progress,
            ),
            options.device,
        )
    console = Console()

    def show() -> None:
        print_report(run, verbose=options.verbose)
        for table in run.tables:
            console.print()
            if is_code(table):
                console.print(clean(table.title), style="bold", highlight=False, markup=False)
                print(clean("\n".join(str(row[0]) for row in table.rows)), flush=True)  # no line is folded
            else:
                print_tables([table])

    return finish(run, options, show)
