"""The files that a run is written to, by the name of their option."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ampcheck.core.errors import UsageError
from ampcheck.core.files import write_atomically
from ampcheck.report.github import append_summary

if TYPE_CHECKING:
    from ampcheck.core.run import Run
    from ampcheck.report.sarif import Rule


def write_outputs(
    run: Run, paths: Mapping[str, Path], *, kind: str, rules: Mapping[str, Rule], folder: Path
) -> tuple[list[str], list[UsageError]]:
    """Write `run` to each path, named by its output, and the summary of a job: outputs that were written, and errors.

    A file that cannot be written does not keep the others from being written. kind, rules, folder: see `write_output`.
    """
    written, errors = list[str](), list[UsageError]()
    for name, path in paths.items():
        try:
            write_output(run, name, path, kind=kind, rules=rules, folder=folder)
            written.append(name)
        except UsageError as error:  # noqa: PERF203
            errors.append(error)
    try:
        append_summary(run, kind)
    except UsageError as error:
        errors.append(error)
    return written, errors


def write_output(run: Run, name: str, path: Path, *, kind: str, rules: Mapping[str, Rule], folder: Path) -> None:
    """Write `run` as html, json, sarif or markdown. kind: see `comment_of`. rules, folder: see `sarif_of`.

    Raises `UsageError` if the file cannot be written.
    """
    if name == "json":
        run.save(path)
    elif name == "html":
        from ampcheck.report.html import write_html

        write_html(run, path)
    elif name == "sarif":
        from ampcheck.report.sarif import sarif_of

        write_atomically(path, json.dumps(sarif_of(run, rules, folder), indent=1, allow_nan=False) + "\n")
    elif name == "markdown":
        from ampcheck.report.markdown import comment_of

        write_atomically(path, comment_of(run, kind))
    else:
        raise ValueError(f"there is no output {name!r}")
