"""What commands that judge share: where they write, the check that they can, and the files themselves."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ampcheck.core.errors import UsageError

if TYPE_CHECKING:
    from ampcheck.core.run import Run

UNABLE = 3
"""Exit code: ampcheck itself could not do its work."""


def add_output(command: argparse.ArgumentParser, *, verbose: str = "print every finding, passes too") -> None:
    """Add `--html`, `--json` and `--verbose`."""
    command.add_argument("--html", metavar="PATH", help="write a self-contained page")
    command.add_argument("--json", metavar="PATH", help="write the run as JSON")
    command.add_argument("-v", "--verbose", action="store_true", help=verbose)


def require_writable(**paths: str | None) -> None:
    """Raise `UsageError` unless each path that is given is a file of its own in a folder that exists.

    Names are those of the options. To be called before the work, so that it is not lost to a typing error.
    """
    taken: dict[str, str] = {}
    for name, given in paths.items():
        if given is None:
            continue
        path = Path(given)
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder")
        if (other := taken.setdefault(os.path.realpath(path), name)) != name:
            raise UsageError(f"--{other} and --{name} need a file each, both are {path}")


class Stdout:
    """The stdout of a command, as a context that may be entered again and again.

    Where stdout is full or closed, nothing more is printed and the command goes on. A character that its encoding
    lacks becomes an escape.
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
        """Let what is still to be printed, and what was not flushed, go nowhere."""
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
        """The exit code: 1 where something failed, else `UNABLE` where not all of the output could be printed.

        A pipe whose reader has gone, as that of `ampcheck explain | head`, has taken what was wanted of it.
        """
        if self.error is None or isinstance(self.error, BrokenPipeError):
            return int(failed)
        with suppress(OSError):
            reason = self.error.strerror or self.error
            print(f"ampcheck: cannot print to stdout: {reason}", file=sys.stderr, flush=True)
        return int(failed) or UNABLE


def open_standard_files() -> None:
    """Give a process that was started without stdin, stdout or stderr (`>&-`) empty ones.

    The next file that is opened would get their number, and what native code prints would end up in it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


def finish(
    run: Run,
    options: argparse.Namespace,
    show: Callable[[], object],
    *,
    failed: bool | None = None,
    more: Mapping[str, Callable[[str], None]] | None = None,
    out: Stdout | None = None,
) -> int:
    """Write the files that `options` asks for, then print the report with `show`; returns the exit code.

    In this order a stdout that is full or closed loses no file, and a file that cannot be written loses no report.
    failed: whether the exit code is that of a failure, without it that of the run. more: other options, each with what
    writes its file. Raises `UsageError`, after the report, where a file cannot be written.
    """
    from ampcheck.report import write_html

    writers: dict[str, tuple[str, Callable[[str], None]]] = {
        "html": ("page", lambda path: write_html(run, path)),
        "json": ("JSON", lambda path: run.save(path)),
        **{name: (name, write) for name, write in (more or {}).items()},
    }
    written, errors, out = list[str](), list[UsageError](), out or Stdout()
    for name, (word, write) in writers.items():
        if path := getattr(options, name):
            try:
                write(path)
                written.append(f"{word}: {path}")
            except UsageError as error:
                errors.append(error)
    with out:
        show()
        print(*written, sep="\n", end="\n" if written else "", flush=True)
    if errors:
        raise UsageError("; ".join(map(str, errors))) from errors[0]
    return out.code(run.failed if failed is None else failed)
