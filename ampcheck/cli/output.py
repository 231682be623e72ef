"""Arguments and output that commands share: the report as text and as files."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ampcheck.checks import REGISTRY
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Table
from ampcheck.report import print_run, print_tables
from ampcheck.report.fitting import LIMIT
from ampcheck.report.github import annotations_in_job
from ampcheck.report.outputs import write_outputs

if TYPE_CHECKING:
    from ampcheck.report.sarif import Rule

USAGE = 2
UNABLE = 3
"""Exit code for a defect of ampcheck or a full stdout."""

EXIT_CODES = (
    "Exit code 0: nothing failed; 1: a check failed; 2: usage error, or a subject that cannot be judged; "
    "3: a defect of ampcheck, or a full stdout; 130: interrupted; 143: stopped by SIGTERM."
)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def split_names(text: str | None) -> list[str]:
    """Names that are separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


OUTPUTS = {
    "html": ("page", "write a self-contained page"),
    "json": ("JSON", "write the run as JSON; `ampcheck report --schema` prints its schema"),
    "sarif": ("SARIF", "write the findings as SARIF 2.1.0, for code scanning"),
    "markdown": ("comment", "write a comment for a pull request; its first line names the comment to replace"),
}
"""The files that a command writes its run to: option to what it is called, and its help."""


def add_output(
    command: argparse.ArgumentParser, *, kind: str = "audit", verbose: str = "print every finding, passes too"
) -> None:
    """Add the options of `OUTPUTS`, `--github` and `--verbose`. kind: of the run, in the marker of the comment."""
    for name, (_, text) in OUTPUTS.items():
        command.add_argument(f"--{name}", metavar="PATH", help=text)
    command.add_argument(
        "--github",
        action="store_true",
        help="print annotations for GitHub, as in a job of GitHub Actions, where the summary of the job is written too",
    )
    command.add_argument("-v", "--verbose", action="store_true", help=verbose)
    command.set_defaults(kind=kind)


def outputs_of(options: argparse.Namespace) -> dict[str, str]:
    """The files that the options name."""
    return {name: path for name in OUTPUTS if (path := getattr(options, name)) is not None}


def require_writable(**paths: str | None) -> None:
    """Raise `UsageError` unless each path, named by its option, is a different file in a folder that exists."""
    taken: dict[str, str] = {}
    for name, text in paths.items():
        if text is None:
            continue
        path = Path(text)
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder")
        if (other := taken.setdefault(os.path.realpath(path), name)) != name:
            raise UsageError(f"--{other} and --{name} need a file each, both are {path}")


class Stdout:
    """The stdout of a command, as a context that may be entered several times.

    If stdout is full or closed, nothing more is printed and the command continues. A character that its encoding lacks
    becomes an escape.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None
        self._errors = "strict"

    def __enter__(self) -> Stdout:
        if isinstance(sys.stdout, io.TextIOWrapper):
            self._errors = str(sys.stdout.errors)
            self._encode("backslashreplace")
        return self

    def _encode(self, errors: str) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            try:
                sys.stdout.reconfigure(errors=errors)  # flushes first
            except OSError as error:
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        """Discard further output, and output that was not flushed."""
        self.error = self.error or error
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        try:
            if error is None and sys.stdout is not None:
                sys.stdout.flush()
        except OSError as unflushed:
            error = unflushed
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            error = error.__context__  # rich exits with 1 where the reader of a pipe has gone
        if isinstance(error, OSError):
            self._stop(error)
        self._encode(self._errors)
        return isinstance(error, OSError)

    def code(self, failed: bool = False) -> int:
        """The exit code: 1 if a check failed, else `UNABLE` if not all of the output could be printed.

        A pipe that its reader has closed, as `ampcheck explain | head` does, is no error.
        """
        if self.error is None or isinstance(self.error, BrokenPipeError):
            return int(failed)
        with suppress(OSError):
            reason = self.error.strerror or self.error
            print(f"ampcheck: cannot print to stdout: {reason}", file=sys.stderr, flush=True)
        return int(failed) or UNABLE


def print_report(
    run: Run,
    tables: Sequence[Table] = (),
    *,
    verbose: bool,
    quiet: bool = False,
    printed: int = 0,
    tables_first: bool = False,
    json: str | None = None,
) -> None:
    """Print the findings, and tables below them, or above with `tables_first`. quiet: failures and warnings alone.
    printed: lines of the report that were printed before. json: the file that the run was written to."""
    from rich.console import Console

    if tables and tables_first:
        print_tables(tables)
        print(flush=True)
        tables = ()
    more = f"{shlex.join(['ampcheck', 'report', json, '-v'])} shows all" if json else "-v shows all"
    print_run(run, Console(), verbose=verbose, quiet=quiet, limit=LIMIT - printed, more=more)
    if tables:
        print()
        print_tables(tables)


def finish(
    run: Run,
    options: argparse.Namespace,
    show: Callable[[], object],
    *,
    failed: bool | None = None,
    out: Stdout | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> int:
    """Write the files that `options` name, print the report with `show`, and return the exit code.

    A full or closed stdout thus loses no file, and a file that cannot be written loses no report. In a job of GitHub
    Actions annotations follow the report, and the summary of the job is written.
    failed: whether the exit code is 1; by default `run.failed`. rules: pages of checks, by default of all.
    Raises `UsageError`, after the report, if a file cannot be written.
    """
    if rules is None:
        rules = REGISTRY
    folder, paths, out = Path.cwd(), outputs_of(options), out or Stdout()
    files = {name: Path(path) for name, path in paths.items()}
    names, errors = write_outputs(run, files, kind=options.kind, rules=rules, folder=folder)
    written = [f"{OUTPUTS[name][0]}: {paths[name]}" for name in names]
    written += annotations_in_job(run, folder, always=options.github)
    with out:
        show()
        print(*written, sep="\n", end="\n" if written else "", flush=True)
    if errors:
        raise UsageError("; ".join(map(str, errors))) from errors[0]
    return out.code(run.failed if failed is None else failed)
