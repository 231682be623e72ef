"""The files that a run is written to, by the name of their option."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.files import write_atomically
from ampcheck.core.run import Run
from ampcheck.report.github import append_summary
from ampcheck.report.html import write_html
from ampcheck.report.markdown import comment_of
from ampcheck.report.sarif import Rule, sarif_of


def write_outputs(
    run: Run, paths: Mapping[str, Path], *, kind: str, rules: Mapping[str, Rule], folder: Path
) -> tuple[list[str], list[UsageError]]:
    """Write `run` to each path, named by its output (html, json, sarif, markdown), and the summary of a job: outputs
    that were written, and errors.

    A file that cannot be written does not keep the others from being written. kind: see `comment_of`. rules, folder:
    see `sarif_of`.
    """

    def write_sarif(path: Path) -> None:
        write_atomically(path, json.dumps(sarif_of(run, rules, folder), indent=1, allow_nan=False) + "\n")

    writers: Mapping[str, Callable[[Path], None]] = {
        "html": partial(write_html, run),
        "json": run.save,
        "sarif": write_sarif,
        "markdown": lambda path: write_atomically(path, comment_of(run, kind)),
    }
    written, errors = list[str](), list[UsageError]()
    for name, path in paths.items():
        try:
            writers[name](path)
            written.append(name)
        except UsageError as error:  # noqa: PERF203
            errors.append(error)
    try:
        append_summary(run, kind)
    except UsageError as error:
        errors.append(error)
    return written, errors
