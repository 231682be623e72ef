"""How a script keeps what it found: the command, the versions, the hardware's name, and the figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ampcheck.environment import environment
from ampcheck.record import write_atomically


def write_evidence(path: Path, data: Mapping[str, Any], table: Iterable[str]) -> None:
    """JSON at `path` and a Markdown table beside it."""
    known = environment()
    command = "python " + " ".join(sys.argv)
    write_atomically(path, json.dumps({"command": command, "environment": known, **data}, indent=1) + "\n")
    place = f"torch {known['torch']}, {known['device']}, {known['threads']} threads"
    lines = [f"# {path.stem}", "", f"`{command}`", "", place, "", *table]
    write_atomically(path.with_suffix(".md"), "\n".join(lines) + "\n")
