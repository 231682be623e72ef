"""The files that a run is written to, by the name of their option."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ampcheck.core.files import write_atomically

if TYPE_CHECKING:
    from ampcheck.core.run import Run
    from ampcheck.report.sarif import Rule


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
