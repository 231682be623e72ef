"""What commands that judge share: where they write, the check that they can, and the files themselves."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ampcheck.errors import UsageError

if TYPE_CHECKING:
    from ampcheck.record import Run


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
        if (other := taken.setdefault(os.path.abspath(path), name)) != name:
            raise UsageError(f"--{other} and --{name} need a file each, both are {path}")


def write_output(
    run: Run, options: argparse.Namespace, more: Mapping[str, Callable[[str], None]] | None = None
) -> None:
    """Write what `options` asks for and say where it lies; more: other options, each with what writes its file."""
    from ampcheck.report import write_html

    writers: dict[str, tuple[str, Callable[[str], None]]] = {
        "html": ("page", lambda path: write_html(run, path)),
        "json": ("JSON", lambda path: run.save(path)),
        **{name: (name, write) for name, write in (more or {}).items()},
    }
    for name, (word, write) in writers.items():
        if path := getattr(options, name):
            write(path)
            print(f"{word}: {path}", flush=True)
