"""The contract of the tools names every room, so that a new one is decided on."""

from __future__ import annotations

import sys
from pathlib import Path

import ampcheck

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALLOWED = {"audit", "checks", "core", "demo", "report", "target", "watch"}
ABOVE = {"__main__", "cli", "plugin", "tools"}


def test_every_room_is_allowed_or_forbidden_to_the_tools() -> None:
    root = Path(ampcheck.__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each.get("source_modules") == ["ampcheck.tools"])
    forbidden = {name.removeprefix("ampcheck.") for name in contract["forbidden_modules"]}
    rooms = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms - {"__init__"} == ALLOWED | ABOVE | forbidden
    assert not ALLOWED & forbidden
