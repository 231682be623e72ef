"""Candidates for a target, best first, each with its attempts as code."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ampcheck.tools.init.arguments import guessed, of_default_config, smaller
from ampcheck.tools.init.configs import configured
from ampcheck.tools.init.libraries import library_models
from ampcheck.tools.init.repository import Class, Repository, parameters_of
from ampcheck.tools.init.sources import Attempt
from ampcheck.tools.init.uses import plain_uses

MOST = 8
"""Candidates that are tried at most."""

_TAKEN = frozenset({"ampcheck", "build", "pytest", "sys", "torch", "training", *keyword.kwlist, *dir(builtins)})
"""Names that mean something else in the generated file."""

_HOOKS = ("test", "pytest", "setup", "teardown")
"""Beginnings of names of functions that pytest itself calls."""

_USES = 4
"""Constructions of the repository's own that are tried for one model."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to try. title: as `model.GPT`. name: of its factory. signature: of the constructor. missing: required
    arguments that only the user knows. root: the folder that its import needs on `sys.path`, relative."""

    title: str
    name: str
    attempts: tuple[Attempt, ...]
    signature: str = ""
    missing: tuple[str, ...] = ()
    root: str = ""
    imports: tuple[str, ...] = ()


def candidates(repository: Repository) -> list[Candidate]:
    """The models to try: those of the repository's own factories, those that training scripts take from libraries, then
    the repository's own classes.

    Modules of one name in different folders cannot both be imported: those of the first folder remain.
    """
    roots: dict[str, str] = {}
    names: set[str] = set()
    found: list[Candidate] = []
    closed = unimportable(repository)
    classes = (_from_class(model, repository) for model in repository.models if model.source.path not in closed)
    for candidate in chain(_of_factories(repository, closed), _of_libraries(repository), classes):
        tops = {line.split()[1].partition(".")[0] for line in candidate.imports}
        if all(roots.setdefault(top, candidate.root) == candidate.root for top in tops) and candidate.name not in names:
            names.add(candidate.name)
            found.append(candidate)
        if sum(bool(each.attempts) for each in found) == MOST or len(found) == 3 * MOST:
            break
    return found


def unimportable(repository: Repository) -> dict[str, str]:
    """Scripts with model classes that train when they are imported: path to the names of the classes."""
    trains = {script.source.path for script in repository.scripts if not script.importable}
    return {
        path: ", ".join(model.name for model in repository.models if model.source.path == path)
        for path in sorted(trains & {model.source.path for model in repository.models})
    }


def _of_factories(repository: Repository, closed: Collection[str]) -> Iterator[Candidate]:
    for source, name in repository.factories:
        if source.path not in closed:
            own, line = factory_name(f"{source.module}_{name}"), f"from {source.module} import {name}"
            attempt = Attempt(f"{name}()[0]", (line,), f"{name}()[1]", f"as {source.path} builds it")
            yield Candidate(f"{source.module}.{name}", own, (attempt,), root=source.root, imports=(line,))


def _of_libraries(repository: Repository) -> Iterator[Candidate]:
    seen: set[str] = set()
    for script in repository.scripts:
        for name, attempts in library_models(script.source):
            if name not in seen and len(seen) < 2:
                seen.add(name)
                package = attempts[0].imports[0].split()[1]
                own = next((source.root for source in repository.sources if source.module == package), "")
                yield Candidate(name, factory_name(name), attempts, root=own, imports=attempts[0].imports)


def _from_class(model: Class, repository: Repository) -> Candidate:
    uses = sorted(plain_uses(model, repository), key=lambda use: len(use.code) + sum(map(len, use.setup)))[:_USES]
    attempts = [*uses, *configured(model, repository), *of_default_config(model)]
    code, imports, missing = guessed(model, repository, small=False)
    small = guessed(model, repository, small=True)[0]
    if not missing:
        origin = "with arguments after the names of its parameters" if "=" in code else "with its defaults"
        attempts.append(Attempt(code, imports, origin=origin))
        attempts.append(Attempt(small, imports, origin="with small sizes"))
    attempts += map(smaller, uses)
    parameters = parameters_of(model, repository.classes)
    signature = f"{model.name}({', '.join(each.name for each in parameters if each.required)})"
    return Candidate(
        f"{model.source.module}.{model.name}",
        factory_name(model.name),
        _distinct(attempts),
        signature,
        missing if not attempts else (),
        model.source.root,
        imports,
    )


def _distinct(attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    first: dict[tuple[str, ...], Attempt] = {}
    for attempt in attempts:
        first.setdefault((*attempt.setup, attempt.code), attempt)
    return tuple(first.values())


def factory_name(name: str) -> str:
    """`TransformerWrapper` -> `transformer_wrapper`; always a valid name for a function, and free in the file."""
    words = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3_\2\4", name)
    text = re.sub(r"\W+", "_", words).strip("_").lower()
    is_free = text.isidentifier() and text not in _TAKEN and not text.startswith(_HOOKS)
    return text if is_free else f"model_{text}"
