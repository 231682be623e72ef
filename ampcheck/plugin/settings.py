"""The values of the options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ampcheck.plugin.options import DEVICES, DTYPES, FILES, value


@dataclass(frozen=True)
class WatchOptions:
    """The values of `--ampcheck-watch` and its options."""

    dtype: str = "bfloat16"
    compile: bool = False
    budget: float = 5.0

    @property
    def label(self) -> str:
        """Circumstance of the tests, with which the subjects of findings end."""
        return "with models in float16" if self.dtype == "half" else f"under {self.dtype} autocast"

    @classmethod
    def of(cls, config: pytest.Config) -> WatchOptions | None:
        """Read the options; None without `--ampcheck-watch`. Raises `pytest.UsageError` for invalid ones."""
        dtype, budget = value(config, "ampcheck_dtype"), value(config, "ampcheck_budget")
        if not value(config, "ampcheck_watch"):
            for name in ("dtype", "compile", "budget"):
                if config.getoption(f"ampcheck_{name}") is not None:
                    raise pytest.UsageError(f"--ampcheck-{name} needs --ampcheck-watch, which runs the tests under AMP")
            return None
        if dtype is not None and dtype not in DTYPES:
            raise pytest.UsageError(f"--ampcheck-dtype={dtype} is unknown: choose one of {', '.join(DTYPES)}")
        try:
            factor = float(budget or cls.budget)
        except ValueError:
            factor = -1.0
        if not 0 < factor < float("inf"):
            raise pytest.UsageError(f"--ampcheck-budget={budget} must be a number above 0: times the time of the tests")
        return cls(dtype or cls.dtype, bool(value(config, "ampcheck_compile")), factor)


@dataclass(frozen=True)
class Options:
    """The values of the options. Paths are absolute; a worker of xdist has none.

    files: of `FILES`, those to write. watch: None where the suite is not watched.
    """

    enabled: bool
    device: str
    update: bool = False
    guard: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)
    history: Path | None = None
    watch: WatchOptions | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> Options:
        """Read the options. Raises `pytest.UsageError` for invalid ones."""
        files = {name: text for name in FILES if (text := value(config, f"ampcheck_{name}")) is not None}
        history = value(config, "ampcheck_history")
        device = _parse_device(value(config, "ampcheck_device"))
        update, guard = (bool(value(config, name)) for name in ("ampcheck_update", "ampcheck_guard"))
        watch = WatchOptions.of(config)
        enabled = bool(value(config, "ampcheck") or update or files or watch) or history is not None
        if hasattr(config, "workerinput"):
            return cls(enabled, device, update, guard, watch=watch)
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
        return cls(enabled, device, update, guard, paths, kept, watch)


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


def require_device(device: str) -> None:
    """Raise `UsageError` if PyTorch finds no such device here."""
    import torch

    from ampcheck.core.errors import UsageError

    kind, _, index = device.partition(":")
    backend: Any = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    if not backend.is_available():
        raise UsageError(f"--ampcheck-device={device}: PyTorch {torch.__version__} finds no such device here, use cpu")
    if index and int(index) >= (count := backend.device_count()):
        raise UsageError(f"--ampcheck-device={device}: this machine has {count} of them, the first is {kind}:0")
