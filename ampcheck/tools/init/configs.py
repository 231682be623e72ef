"""Models as the YAML files of a repository configure them: Hydra's `_target_`, Lightning's `class_path`, and names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ampcheck.tools.init.repository import Class, Repository, class_of, parameters_of
from ampcheck.tools.init.sources import Attempt, files_of

_FILES = 300
"""Files of YAML that are read at most, in the order of their paths."""

_BYTES = 100_000
"""A longer file is data."""

_MOST = 3
"""Constructions of one class that are tried."""

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_NAMES = ("name", "type", "model", "arch", "class_name")
"""Keys that name a class beside its arguments."""


class _NotPlainError(Exception):
    """A value depends on what only a run knows."""


def configured(model: Class, repository: Repository) -> list[Attempt]:
    """The constructions of a class that YAML files of the repository describe; none where no package reads YAML."""
    found = (
        attempt
        for path, data in _documents(repository.folder)
        for node in _mappings(data)
        if (attempt := _attempt(node, data, path, model, repository)) is not None
    )
    return list(islice(found, _MOST))


@lru_cache(maxsize=1)
def _documents(folder: Path) -> list[tuple[str, Any]]:
    """Path and content of each file of YAML."""
    try:
        yaml = importlib.import_module("yaml")  # a repository with such files has a package that reads them
    except ImportError:
        return []
    found = []
    for path in islice(files_of(folder, (".yaml", ".yml"), _BYTES), _FILES):
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        found.append((path.relative_to(folder).as_posix(), data))
    return found


def _mappings(data: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(data, Mapping):
        yield data
        data = list(data.values())
    if isinstance(data, list):
        for each in data:
            yield from _mappings(each)


def _attempt(node: Mapping[str, Any], data: object, path: str, model: Class, repository: Repository) -> Attempt | None:
    """The construction of a model that a mapping describes; None where it is of something else, or not plain."""
    target, arguments = _described(node)
    writer = _Writer(data, repository)
    try:
        if target:
            is_model = writer.own_class(target) is model
            code = writer.call(target, arguments) if is_model else ""
        else:
            code = writer.by_name(node, model)
    except _NotPlainError:
        return None
    return Attempt(code, tuple(sorted(writer.imports)), origin=f"as {path} configures it") if code else None


def _described(node: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The full name of what a mapping stands for, "" for nothing, and the arguments."""
    if isinstance(node.get("_target_"), str):
        return node["_target_"], {key: value for key, value in node.items() if key not in ("_target_", "_convert_")}
    if isinstance(node.get("class_path"), str):
        arguments = node.get("init_args") or {}
        return node["class_path"], arguments if isinstance(arguments, Mapping) else {}
    return "", {}


class _Writer:
    """Writes the values of a document as code; collects the imports that they need."""

    def __init__(self, data: object, repository: Repository) -> None:
        self._data, self._repository = data, repository
        self.imports: set[str] = set()

    def own_class(self, target: str) -> Class | None:
        """The class of the repository with a full name, which may be that of a package that re-exports it."""
        module, _, name = target.rpartition(".")
        return class_of(self._repository.classes.get(name, ()), module)

    def by_name(self, node: Mapping[str, Any], model: Class) -> str:
        """A call with the arguments beside the class's name; "" where the mapping has other keys."""
        key = next((key for key in _NAMES if node.get(key) == model.name), None)
        arguments = {name: value for name, value in node.items() if name != key}
        parameters = parameters_of(model, self._repository.classes)
        if key is None or not {*arguments} <= {each.name for each in parameters}:
            return ""
        return self._called(model, arguments)

    def call(self, target: str, arguments: Mapping[str, Any]) -> str:
        """A call of a class, or `functools.partial` of it where Hydra's `_partial_` says so."""
        own, partial = self.own_class(target), bool(arguments.get("_partial_"))
        arguments = {key: value for key, value in arguments.items() if key != "_partial_"}
        if own is not None and not partial:
            return self._called(own, arguments)
        module, _, name = target.rpartition(".")
        if not module:
            raise _NotPlainError
        self.imports.add(f"from {own.source.module if own is not None else module} import {name}")
        if not partial:
            return f"{name}({self._keywords(arguments)})"
        self.imports.add("import functools")
        return f"functools.partial({', '.join(filter(None, (name, self._keywords(arguments))))})"

    def _called(self, model: Class, arguments: Mapping[str, Any]) -> str:
        self.imports.add(model.line)
        return f"{model.name}({self._keywords(arguments)})"

    def _keywords(self, arguments: Mapping[str, Any]) -> str:
        if not all(isinstance(key, str) and key.isidentifier() for key in arguments):
            raise _NotPlainError
        return ", ".join(f"{key}={self._value(value)}" for key, value in arguments.items())

    def _value(self, value: object) -> str:
        if isinstance(value, Mapping):
            target, arguments = _described(value)
            if target:
                return self.call(target, arguments)
            return "{" + ", ".join(f"{key!r}: {self._value(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, str) and "$" in value:
            return self._value(self._referred(value))
        if value is None or isinstance(value, (str, int, float, bool)):
            return repr(value)
        raise _NotPlainError

    def _referred(self, text: str) -> object:
        """The value that an interpolation of this document stands for."""
        match, value = _REFERENCE.fullmatch(text), self._data
        for key in match[1].split(".") if match else ():
            value = value.get(key) if isinstance(value, Mapping) else None
        if match is None or value is None or value == text:
            raise _NotPlainError
        return value
