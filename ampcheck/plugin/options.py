"""The options of the plugin, their ini settings, and how pytest describes the marker."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

DEVICES = ("cpu", "cuda", "cuda:N", "xpu", "xpu:N", "mps")
"""Values of `--ampcheck-device`; N is the index of a device."""

OPTIONS = {
    "--ampcheck": ("", "print a summary of the findings and the coverage of ampcheck's asserts and marked tests"),
    "--ampcheck-html": ("PATH", "write the findings as one HTML page; implies --ampcheck"),
    "--ampcheck-json": ("PATH", "write the findings as JSON; implies --ampcheck"),
    "--ampcheck-sarif": ("PATH", "write the findings as SARIF 2.1.0, for code scanning; implies --ampcheck"),
    "--ampcheck-device": ("DEVICE", f"device of the fixture ampcheck_device: {', '.join(DEVICES)} (default: cpu)"),
    "--ampcheck-update": ("", "write policy locks instead of comparing with them; implies --ampcheck"),
    "--ampcheck-guard": (
        "",
        "fail a test that changes autocast, a precision flag or the default dtype and does not restore it",
    ),
    "--ampcheck-history": (
        "DIR",
        "append the results of speed tests to the history in this folder; implies --ampcheck",
    ),
}
"""Flag to the name of its value ("" for a switch) and its help. `--ampcheck-html` is `ampcheck_html` in an ini file."""


FILES = ("html", "json", "sarif")
"""The files that a session writes, by their options."""

MARKER = (
    "ampcheck(*checks, lock=False, device=None, speed=None): observe the test's body and fail it with the findings of "
    "these checks, such as 'overflow' or 'autocast-state'; without names, of every check that can be observed. "
    "lock=True (or a path): compare the body's calls under autocast with ampcheck.lock.json in the test's folder. "
    "device='cuda': run the body under that device's autocast policy. speed={'at_least': 1.2}: defaults of the fixture "
    "speed. With lock, device or speed alone nothing is observed. The closest marker counts."
)
"""The marker's entry in `pytest --markers`; `marker.py` reads its arguments."""


def add_options(parser: pytest.Parser) -> None:
    """Add every option and its ini setting."""
    group = parser.getgroup("ampcheck", "mixed precision and compilation (ampcheck)")
    for flag, (value, text) in OPTIONS.items():
        form: dict[str, Any] = {"metavar": value} if value else {"action": "store_const", "const": True}
        group.addoption(flag, default=None, help=text, **form)
        kind: Literal["string", "bool"] = "string" if value else "bool"
        parser.addini(flag[2:].replace("-", "_"), help=text, type=kind, default=None)


@dataclass(frozen=True)
class Options:
    """The values of the options. Paths are absolute; a worker of xdist has none.

    files: of `FILES`, those to write. junit: pytest writes JUnit XML, to which the findings of each test are added.
    """

    enabled: bool
    device: str
    update: bool = False
    guard: bool = False
    junit: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)
    history: Path | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> Options:
        """Read the options. Raises `pytest.UsageError` for invalid ones."""
        files = {name: text for name in FILES if (text := _value(config, f"ampcheck_{name}")) is not None}
        history = _value(config, "ampcheck_history")
        device = _parse_device(_value(config, "ampcheck_device"))
        update, guard = (bool(_value(config, name)) for name in ("ampcheck_update", "ampcheck_guard"))
        enabled = bool(_value(config, "ampcheck")) or update or bool(files) or history is not None
        junit = bool(config.getoption("xmlpath", None))
        if hasattr(config, "workerinput"):
            return cls(enabled, device, update, guard, junit)
        folder = config.invocation_params.dir
        paths: dict[str, Path] = {}
        for name, text in files.items():
            path = _parse_path(f"--ampcheck-{name}", text, folder)
            if other := next((other for other, taken in paths.items() if taken == path), None):
                raise pytest.UsageError(
                    f"--ampcheck-{other} and --ampcheck-{name} need a file each, both are {files[other]}"
                )
            paths[name] = path
        kept = None if history is None else _parse_path("--ampcheck-history", history, folder, is_file=False)
        return cls(enabled, device, update, guard, junit, paths, kept)


def _value(config: pytest.Config, name: str) -> Any:
    value = config.getoption(name)
    try:
        return config.getini(name) if value is None else value
    except (TypeError, ValueError, pytest.UsageError) as error:
        raise pytest.UsageError(f"{name} of the ini file cannot be read: {error}") from error


def _parse_device(text: str | None) -> str:
    if text is not None and not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", text):
        raise pytest.UsageError(f"--ampcheck-device={text} is no device: choose one of {', '.join(DEVICES)}")
    return text or "cpu"


def _parse_path(flag: str, text: str, folder: Path, *, is_file: bool = True) -> Path:
    """An absolute path to write to. A folder is created later, a file needs one that exists."""
    path = Path(os.path.abspath(folder / text))
    if not text or (path.is_dir() if is_file else path.exists() and not path.is_dir()):
        kinds = ("file", "folder") if is_file else ("folder", "file")
        raise pytest.UsageError(f"{flag}={text} needs the name of a {kinds[0]}, not of a {kinds[1]}")
    existing = path.parent if is_file else next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise pytest.UsageError(f"{flag}={text} needs a folder that exists and can be written to: {existing}")
    return path
