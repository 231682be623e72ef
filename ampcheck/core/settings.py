"""The settings of a repository: `[tool.ampcheck]` of its `pyproject.toml`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ampcheck.core.arguments import parse_choice, parse_flag, parse_integer, show
from ampcheck.core.errors import UsageError
from ampcheck.core.json_files import conflict_in
from ampcheck.core.limits import Limits
from ampcheck.core.run import FAIL_ON
from ampcheck.core.text import did_you_mean

LEVELS = ("fail", "warn", "ignore")
"""Severities of a check: its warnings fail, its failures warn, or it reports nothing."""

BASELINE = "ampcheck.baseline.json"


@dataclass(frozen=True, slots=True)
class Target:
    """A subject to audit and its options, which override those of the command line's defaults.

    target: as on the command line. device: empty for the CPU, or CUDA where the code asks for it. dtype: of autocast,
    empty for the defaults of the audit. severity: by check, over that of the repository. fail_on: empty for that of the
    repository. full, graphs: as of a `Plan`. arguments: what the code finds on its command line.
    """

    target: str
    device: str = ""
    dtype: tuple[str, ...] = ()
    compile: bool = True
    steps: int | None = None
    horizon: int | None = None
    severity: Mapping[str, str] = field(default_factory=dict)
    fail_on: str = ""
    full: bool = False
    graphs: bool = False
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `[tool.ampcheck]`.

    folder: of the `pyproject.toml`; the working directory where there is none. severity: a level of `LEVELS` by check
    or glob pattern of checks; later ones win. select: patterns of the checks that are reported, empty for all.
    fail_on: the mildest verdict that fails. baseline: the file of accepted findings, relative to the folder.
    """

    folder: Path
    limits: Limits = field(default_factory=Limits)
    targets: tuple[Target, ...] = ()
    select: tuple[str, ...] = ()
    severity: Mapping[str, str] = field(default_factory=dict)
    fail_on: str = "fail"
    baseline: str = BASELINE


def load_settings(start: Path | None = None) -> Settings:
    """The settings of the nearest `pyproject.toml` at or above `start` (the working directory); defaults without one.

    Raises `UsageError` for a file that cannot be read, unknown names and invalid values.
    """
    folder = (start or Path.cwd()).resolve()
    for parent in (folder, *folder.parents):
        if (path := parent / "pyproject.toml").is_file():
            found = path.stat()
            return _read(path, found.st_mtime_ns, found.st_size)
    return Settings(folder)


def resolve_limits(limits: Limits | None) -> Limits:
    """The limits that were passed, by default those of the settings. Raises `UsageError` for another type."""
    if limits is None:
        return load_settings().limits
    if not isinstance(limits, Limits):
        raise UsageError(f"limits must be ampcheck.Limits(...); found a {type(limits).__name__}")
    return limits


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as data. Raises `ValueError` for another text."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    return tomllib.loads(text)


@lru_cache(maxsize=8)
def _read(path: Path, _changed: int, _size: int) -> Settings:
    """The settings in a file; every assertion asks for them."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        whole = parse_toml(text)
    except RecursionError:
        raise UsageError(f"{path.name} cannot be read: its arrays or tables nest too deep; write them flat") from None
    except (OSError, ValueError) as error:
        reason = str(error)  # tomllib repeats keys of any length
        reason = reason if len(reason) <= 300 else f"{reason[:220]} … {reason[-70:]}"
        raise UsageError(f"{path.name} cannot be read: {conflict_in(text) or reason}") from error
    source = f"[tool.ampcheck] of {path.name}"
    table = _table(_table(whole, "tool", path.name), "ampcheck", path.name)
    keys = ("limits", "targets", "select", "ignore", "severity", "fail-on", "baseline")
    _require_known(table, keys, source)
    return Settings(
        folder=path.parent,
        limits=Limits().with_(_table(table, "limits", path.name), f"[tool.ampcheck.limits] of {path.name}"),
        targets=tuple(_target(entry, source) for entry in _list(table, "targets", source)),
        select=_names(table, "select", source),
        severity=_severity(table, source),
        fail_on=parse_choice(table.get("fail-on", "fail"), f"fail-on in {source}", FAIL_ON),
        baseline=_text(table, "baseline", source, BASELINE),
    )


def _target(entry: object, source: str) -> Target:
    name = entry.get("target") if isinstance(entry, Mapping) else entry
    if isinstance(name, str) and not name.strip():
        raise UsageError(f"a target in {source} must name what to audit, such as 'check_model.py:subject'; found ''")
    if isinstance(entry, str):
        return Target(entry)
    where = f"a target in {source}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("target"), str):
        raise UsageError(
            f"{where} must be a text such as 'check_model.py:subject', or a table with the key 'target'; "
            f"found {show(entry)}"
        )
    keys = ("target", "arguments", "device", "dtype", "compile", "steps", "horizon", "severity", "ignore", "fail-on")
    where = f"the target {entry['target']} in {source}"
    _require_known(entry, keys, where)
    steps, horizon = (
        None if key not in entry else parse_integer(entry[key], f"{key} of {where}") for key in ("steps", "horizon")
    )
    dtype = [entry["dtype"]] if isinstance(entry.get("dtype"), str) else _list(entry, "dtype", where)
    return Target(
        target=entry["target"],
        device=_text(entry, "device", where, "cpu") if "device" in entry else "",
        dtype=_names({"dtype": dtype}, "dtype", where),
        compile=parse_flag(entry.get("compile", True), f"compile of {where}"),
        steps=steps,
        horizon=horizon,
        arguments=_names(entry, "arguments", where),
        severity=_severity(entry, where),
        fail_on=parse_choice(entry["fail-on"], f"fail-on of {where}", FAIL_ON) if "fail-on" in entry else "",
    )


def _severity(table: Mapping[str, Any], source: str) -> dict[str, str]:
    levels = dict.fromkeys(_names(table, "ignore", source), "ignore")
    for check, level in _table(table, "severity", source).items():
        levels[check] = parse_choice(level, f"severity.{check} in {source}", LEVELS)
    return levels


def _require_known(table: Mapping[str, Any], known: Sequence[str], source: str) -> None:
    if unknown := sorted(set(table) - set(known)):
        meant = f" {did_you_mean(unknown[0], known)}".rstrip()
        raise UsageError(f"{source} has an unknown key {unknown[0]!r:.40};{meant} there are {', '.join(known)}")


def _list(table: Mapping[str, Any], key: str, source: str) -> list[Any]:
    value = table.get(key, [])
    if not isinstance(value, list):
        raise UsageError(f"{key} in {source} must be a list; found {show(value)}")
    return value


def _names(table: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    names = _list(table, key, source)
    if wrong := [name for name in names if not isinstance(name, str) or not name]:
        raise UsageError(f"{key} in {source} must be a list of names; found {show(wrong[0])}")
    return tuple(names)


def _text(table: Mapping[str, Any], key: str, source: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} in {source} must be a text; found {show(value)}")
    return value


def _table(holder: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    table = holder.get(key, {})
    if not isinstance(table, dict):
        raise UsageError(f"{key!r} in {source} is a {type(table).__name__}; a table is required")
    return table
