"""The command line: `audit`, `blame`, `explain`, `policy`, `speed`, `history`, `lab`, `formats`. No numerics here."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version

from ampcheck import blame_cli, history_cli, lab_cli, policy_cli, speed_cli
from ampcheck.cli_output import Stdout, add_output, finish, open_standard_files, require_writable
from ampcheck.errors import UsageError
from ampcheck.visible import clean

FAILED, USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 when nothing failed, 1 for findings, 2 for a usage error."""
    open_standard_files()
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return USAGE
    try:
        code: int = options.command(options)
        return code
    except UsageError as error:
        print(f"ampcheck: {clean(str(error))}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `ampcheck explain | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("ampcheck: interrupted; nothing was written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ampcheck", description="Is this model numerically safe under autocast and torch.compile?"
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"ampcheck {version('ampcheck')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    audit = commands.add_parser(
        "audit",
        help="judge a model in low precision, eager and compiled, forward and backward; or a training loop",
        description="Judge a model in low precision, eager and compiled, forward and backward; or a training loop. "
        "Exit code 0: nothing failed; 1: findings; 2: usage error.",
    )
    audit.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="package.module:factory or path/to/file.py:factory, whose call gives (module, args) "
        "or, of a training loop, {'model', 'optimizer', 'scaler', 'step'}; "
        "without it the built-in demo is audited",
    )
    audit.add_argument(
        "--device", default="cpu", help="where to run (default: cpu); a device that this machine lacks is emulated"
    )
    audit.add_argument(
        "--dtype",
        metavar="DTYPES",
        help="what autocast casts to, separated by commas (default: float16,bfloat16); a model that is kept in 16 "
        "bits, and without this option a subject that is to be compiled, is judged as it is",
    )
    audit.add_argument("--steps", type=int, metavar="N", help="how many steps of a training loop are observed")
    audit.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    add_output(audit)
    audit.set_defaults(command=_audit)

    explain = commands.add_parser("explain", help="what a check means and how to mend what it finds")
    explain.add_argument("slug", nargs="?", metavar="SLUG", help="a check; without it all are listed")
    explain.set_defaults(command=_explain)

    blame_cli.add_command(commands)
    policy_cli.add_commands(commands)
    speed_cli.add_command(commands)
    history_cli.add_command(commands)
    lab_cli.add_command(commands)

    formats = commands.add_parser("formats", help="the facts of the floating-point formats")
    formats.set_defaults(command=_formats)
    return parser


def _audit(options: argparse.Namespace) -> int:
    dtypes = None
    if options.dtype is not None:
        dtypes = [dtype.strip() for dtype in options.dtype.split(",") if dtype.strip()]
    if dtypes == []:
        raise UsageError(f"--dtype names what autocast casts to, such as float16,bfloat16; found {options.dtype!r}")
    require_writable(html=options.html, json=options.json)

    from rich.console import Console

    from ampcheck.report import print_run, progress_bar

    console = Console()
    with progress_bar() as progress:
        progress("loading torch and the subject", 0, 1)
        from ampcheck.audit import audit
        from ampcheck.placement import place
        from ampcheck.subject import load_subject

        placement = place(options.device)
        if options.target is None:
            from ampcheck import demo

            subject = demo.subject()
        else:
            with (
                placement.entered()
            ):  # decorators such as @torch.autocast("cuda") ask for the device when they are made
                subject = load_subject(options.target)
        run = audit(
            subject,
            device=options.device,
            dtype=dtypes,
            compile=not options.no_compile,
            steps=options.steps,
            progress=progress,
        )
    if "RANK" in os.environ:  # torchrun: the first process tells what all of them found, the others end in peace
        from ampcheck.training.distributed.runs import gather_runs

        whole = gather_runs(run)
        if whole is None:
            return 0
        run = whole
    return finish(run, options, lambda: print_run(run, console, verbose=options.verbose))


def _explain(options: argparse.Namespace) -> int:
    from ampcheck.catalog import EXPLANATIONS, explain

    pages = list(EXPLANATIONS.values()) if options.slug is None else [explain(options.slug)]
    with Stdout() as out:
        for page in pages:
            if options.slug is None:
                print(f"{page.slug:20} {page.requires.split('. ')[0].rstrip('.')}.")
                continue
            for title, text in (
                (page.slug, page.requires),
                ("how it is measured", page.measured),
                ("what usually causes it", page.causes),
                ("how to mend it", page.mend),
            ):
                print(f"{title}\n{textwrap.indent(textwrap.fill(text, 98), '  ')}\n")
    return out.code()


def _formats(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ampcheck import formats

    rows = formats.table()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column == "name" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    # What does not fit a narrow terminal is wrapped by it; cut facts would be wrong facts.
    with Stdout() as out:
        Console(width=max(Console().width, 160)).print(table)
    return out.code()


def _cell(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
