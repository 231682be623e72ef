"""The command line: `audit`, `blame`, `explain`, `policy`, `speed`, `history`, `lab`, `formats`. No numerics here."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import NoReturn

from ampcheck.cli import blame as blame_cli
from ampcheck.cli import history as history_cli
from ampcheck.cli import lab as lab_cli
from ampcheck.cli import policy as policy_cli
from ampcheck.cli import speed as speed_cli
from ampcheck.cli.output import UNABLE, Stdout, add_output, finish, open_standard_files, require_writable
from ampcheck.core.errors import UsageError, brief, is_for_the_runner
from ampcheck.core.text import clean

FAILED, USAGE, INTERRUPTED = 1, 2, 130

EXIT_CODES = (
    "Exit code 0: nothing failed; 1: findings; 2: usage error, or a subject that cannot be judged; "
    "3: ampcheck could not do its work, for a defect of its own or a full stdout; 130: interrupted."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns an exit code of `EXIT_CODES`."""
    open_standard_files()
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return USAGE
    try:
        with _no_silent_exit():
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
        return INTERRUPTED
    except BaseException as error:  # noqa: BLE001  # a crash must not read as findings, nor `sys.exit(0)` as a pass
        return _crashed(error)


def _crashed(error: BaseException) -> int:
    """Say whether the user's code or ampcheck is to blame for an exception that ended a command."""
    if is_for_the_runner(error):  # pytest.skip() and the like
        print(f"ampcheck: the subject raises {brief(error)}, which only a test runner understands", file=sys.stderr)
        return USAGE
    try:
        from ampcheck.torchtools.source import users_error

        print(f"ampcheck: {users_error(error, 'the subject')}", file=sys.stderr)
        return USAGE
    except BaseException:  # noqa: BLE001  # it is ours
        traceback.print_exception(error)
        text = "this is a defect of ampcheck, and nothing was judged: please report it with the traceback above"
        print(f"ampcheck: {brief(error)}; {text}", file=sys.stderr)
        return UNABLE


@contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Replace `os._exit` in this process, so that code of the subject that calls it does not end in exit code 0."""
    end, pid = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() == pid:  # a forked child may end as it likes
            text = f"the subject ended the process with os._exit({status!r}); nothing was judged"
            print(f"ampcheck: {text}", file=sys.stderr, flush=True)
            status = USAGE
        end(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ampcheck",
        description="Is this model numerically safe under autocast and torch.compile?",
        epilog=EXIT_CODES,
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"ampcheck {version('ampcheck')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    audit = commands.add_parser(
        "audit",
        help="judge a model in low precision, eager and compiled, forward and backward; or a training loop",
        description="Judge a model in low precision, eager and compiled, forward and backward; or a training loop. "
        f"{EXIT_CODES}",
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
    explain.add_argument(
        "slug",
        nargs="?",
        metavar="SLUG",
        help="a check or a verdict; without it the checks are listed",
    )
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
        from ampcheck.autocast.device import place
        from ampcheck.core.subject import load_subject

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
    from ampcheck.catalog import REGISTRY, VERDICTS, explain

    if options.slug in VERDICTS:
        with Stdout() as out:
            print(f"{options.slug}\n{textwrap.indent(textwrap.fill(VERDICTS[options.slug], 98), '  ')}")
        return out.code()
    pages = list(REGISTRY.values()) if options.slug is None else [explain(options.slug)]
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

    from ampcheck.core import formats

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
