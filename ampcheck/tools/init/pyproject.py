"""`[tool.ampcheck]` of a pyproject.toml: the targets are added, and every other byte stays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.settings import load_settings, parse_toml

NAME = "pyproject.toml"
_HEADER = re.compile(r"^\[tool\.ampcheck\][^\S\r\n]*(?:#[^\r\n]*)?(?:\r?\n|\Z)", re.MULTILINE)


def read_pyproject(folder: Path) -> str | None:
    """The text of the folder's file with its line ends, None where there is none.

    Raises `UsageError` where it cannot be read, or where its `[tool.ampcheck]` is wrong.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    load_settings(folder)
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def has_targets(folder: Path) -> bool:
    """Return whether the folder's own file names targets."""
    settings = load_settings(folder)
    return settings.folder == folder.resolve() and bool(settings.targets)


def with_targets(text: str | None, targets: Mapping[str, str]) -> str:
    """The text with the targets in `[tool.ampcheck]`, which is appended where there is none.

    targets: each with its device, "" for none. Raises `UsageError` where the file writes its tables in a form to which
    nothing can be added.
    """
    newline = "\r\n" if text and "\r\n" in text else "\n"
    entries = [f'{{ target = "{name}", device = "{on}" }}' if on else f'"{name}"' for name, on in targets.items()]
    key = newline.join(["targets = [", *(f"    {entry}," for entry in entries), "]", ""])
    table = f"[tool.ampcheck]{newline}{key}"
    if not text:
        return table
    if header := _HEADER.search(text):
        start, end = text[: header.end()], text[header.end() :]
        new = (start if start.endswith("\n") else start + newline) + key + end
    else:
        new = (text if text.endswith("\n") else text + newline) + newline + table
    _require_added(new, [{"target": name, "device": on} if on else name for name, on in targets.items()])
    return new


def _require_added(text: str, targets: Sequence[object]) -> None:
    try:
        added = parse_toml(text)["tool"]["ampcheck"]["targets"] == list(targets)
    except (ValueError, KeyError, TypeError):
        added = False
    if not added:
        raise UsageError(
            f"{NAME} writes [tool] or [tool.ampcheck] inline, to which no line can be added: "
            f"add targets = {list(targets)} there by hand"
        )
