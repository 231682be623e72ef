"""Contents of a repository: its model classes, the scripts that train, its tests and its settings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampcheck.core.source import repository_of
from ampcheck.core.syntax import dotted
from ampcheck.tools.init.scripts import Parameter, TrainingScript, function_parameters, training_script
from ampcheck.tools.init.sources import Source, read_examples, read_readme, read_sources

_MODULES = ("Module", "LightningModule", "PreTrainedModel", "Sequential")
"""Last names of classes outside of the repository whose subclasses are models."""

_DEFAULT_CONFIGS = ("get_default_config", "default_config", "get_config", "get_default_cfg")
"""Class methods and static methods that make the documented configuration of a class."""

_OTHER_CI = (
    ".gitlab-ci.yml",
    ".circleci",
    "azure-pipelines.yml",
    "Jenkinsfile",
    ".travis.yml",
    "bitbucket-pipelines.yml",
)


@dataclass(frozen=True)
class Class:
    """A class of the repository. bases: their last names. parameters: of the constructor, or the fields of a
    dataclass; None where the class has none of its own. mentions: every name in its body. default_config: the method
    that makes its documented configuration, "" without one, and the fields that it sets."""

    name: str
    source: Source = field(repr=False)
    bases: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] | None = None
    methods: frozenset[str] = frozenset()
    mentions: frozenset[str] = field(default=frozenset(), repr=False)
    default_config: str = ""
    config_fields: tuple[Parameter, ...] = ()

    @property
    def line(self) -> str:
        """The line that imports it."""
        return f"from {self.source.module} import {self.name}"


@dataclass(frozen=True)
class Repository:
    """A folder and what was found in it by reading. top: the folder of its `.git`, else the folder itself.

    classes, models, scripts: of modules that an import statement can name. unnameable: paths of the other files that
    have models or a training loop. factories: functions without required parameters that return a model and its inputs.
    """

    folder: Path
    top: Path
    sources: Sequence[Source] = field(repr=False)
    examples: Sequence[Source] = field(repr=False)
    classes: Mapping[str, Sequence[Class]] = field(repr=False)
    models: Sequence[Class]
    scripts: Sequence[TrainingScript]
    other_ci: str
    unnameable: Sequence[str] = ()
    factories: Sequence[tuple[Source, str]] = field(default=(), repr=False)

    @property
    def tests(self) -> Sequence[Source]:
        """The files of the tests."""
        return [source for source in self.sources if source.is_test and "test" in source.path]


def read_repository(folder: Path) -> Repository:
    """Read every Python file and the README of a folder."""
    sources, examples = read_sources(folder), read_examples(folder)
    classes = _by_name(found for source in sources for found in _classes(source))
    readme = read_readme(folder)
    own = [source for source in sources if not source.is_test]
    datasets = any(source.takes_datasets for source in own)
    scripts = [each for source in own if (each := training_script(source, readme, datasets=datasets)) is not None]
    wanted = [*(model.source for model in _models(classes)), *(script.source for script in scripts)]
    unnameable = sorted({source.path for source in wanted if not source.has_importable_name})
    classes = _by_name(each for found in classes.values() for each in found if each.source.has_importable_name)
    scripts = [script for script in scripts if script.source.has_importable_name]
    top = repository_of(folder)
    on_github = (top / ".github").is_dir()
    other_ci = "" if on_github else next((name for name in _OTHER_CI if (top / name).exists()), "")
    models = _ranked(_models(classes), [*sources, *examples], scripts)
    factories = [each for source in sources for each in _factories(source, {model.name for model in _models(classes)})]
    return Repository(folder, top, sources, examples, classes, models, scripts, other_ci, unnameable, factories)


def _by_name(classes: Iterable[Class]) -> dict[str, list[Class]]:
    found: dict[str, list[Class]] = {}
    for each in classes:
        found.setdefault(each.name, []).append(each)
    return found


def class_of(found: Sequence[Class], module: str) -> Class | None:
    """The class, of several of one name, that a module has or re-exports from one below it."""
    exact = [each for each in found if each.source.module == module]
    below = [each for each in found if each.source.module.startswith(f"{module}.")]
    return next(iter(exact or below), None)


def parameters_of(found: Class, classes: Mapping[str, Sequence[Class]]) -> tuple[Parameter, ...]:
    """The parameters of the constructor, which may be that of a base class in the repository."""
    seen: set[str] = set()
    while found.parameters is None:
        seen.add(found.name)
        base = next((name for name in found.bases if name in classes and name not in seen), None)
        if base is None:
            return ()
        found = classes[base][0]
    return found.parameters


def _classes(source: Source) -> Iterator[Class]:
    for node in source.tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        bases = tuple(dotted(base).rpartition(".")[2] for base in node.bases)
        mentions = frozenset(
            each.id if isinstance(each, ast.Name) else each.attr
            for item in node.body
            for each in ast.walk(item)
            if isinstance(each, (ast.Name, ast.Attribute))
        )
        config = next((methods[name] for name in _DEFAULT_CONFIGS if name in methods), None)
        yield Class(
            node.name,
            source,
            bases,
            _parameters(node, methods),
            frozenset(methods),
            mentions,
            config.name if config is not None and config.decorator_list else "",
            tuple(_fields_set(config)) if config is not None else (),
        )


def _fields_set(function: ast.FunctionDef) -> Iterator[Parameter]:
    """The fields that a function sets: `config.width = 128`."""
    for node in ast.walk(function):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            yield Parameter(target.attr, None, ast.unparse(node.value))


def _parameters(node: ast.ClassDef, methods: Mapping[str, ast.FunctionDef]) -> tuple[Parameter, ...] | None:
    if "__init__" in methods:
        return tuple(function_parameters(methods["__init__"])[1:])
    if any(
        dotted(each.func if isinstance(each, ast.Call) else each).endswith("dataclass") for each in node.decorator_list
    ):
        fields = (item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))
        return tuple(
            Parameter(item.target.id, ast.unparse(item.annotation), ast.unparse(item.value) if item.value else None)
            for item in fields
            if isinstance(item.target, ast.Name)
        )
    return None


def _models(classes: Mapping[str, Sequence[Class]]) -> list[Class]:
    """The classes that derive from `nn.Module`, by the names of their bases."""
    names = set(_MODULES)
    while True:
        more = {name for name, found in classes.items() if any({*each.bases} & names for each in found)} - names
        if not more:
            break
        names |= more
    every = [each for found in classes.values() for each in found if {*each.bases} & names]
    return [each for each in every if not each.source.is_test and not each.name.startswith("_")]


def _factories(source: Source, models: set[str]) -> Iterator[tuple[Source, str]]:
    """The functions `def subject(): ...; return Model(...), inputs`; models: names of classes."""
    for node in source.tree.body if source.has_importable_name and not source.is_test else ():
        if not isinstance(node, ast.FunctionDef) or any(each.required for each in function_parameters(node)):
            continue
        built = {
            target.id
            for each in ast.walk(node)
            if isinstance(each, ast.Assign) and _builds(each.value, models)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        if returned and all(
            isinstance(value, ast.Tuple)
            and len(value.elts) == 2
            and not isinstance(value.elts[1], ast.List)  # of calls in a row
            and (_builds(value.elts[0], models) or (isinstance(value.elts[0], ast.Name) and value.elts[0].id in built))
            for value in returned
        ):
            yield source, node.name


def _builds(node: ast.expr, models: set[str]) -> bool:
    """Return whether an expression calls a class of these, such as `Model(3).eval()`."""
    return any(isinstance(each, ast.Call) and dotted(each.func).rpartition(".")[2] in models for each in ast.walk(node))


def _exported(sources: Sequence[Source]) -> set[str]:
    """Return what top-level packages import in their `__init__.py` from themselves."""
    return {
        name
        for source in sources
        if source.path.endswith("__init__.py") and "." not in source.module
        for name, origin in source.names.items()
        if origin.startswith(f"{source.module}.")
    }


def _ranked(models: Sequence[Class], sources: Sequence[Source], scripts: Sequence[TrainingScript]) -> list[Class]:
    """Whole models without their parts: first what scripts, tests and the README build, then by the number of parts.

    A part that is built there, or that a top-level package exports, is a model as well.
    """
    exported, trained = _exported(sources), [script.source for script in scripts]
    names = {model.name for model in models}
    parts = {model.name: model.mentions & names - {model.name} for model in models}
    part_of = {part for model in models for part in parts[model.name]}
    outside, inside = Counter[str](), Counter[str]()
    for source in sources:
        used, inner = _used(source.tree, names)
        is_outside = source.is_test or "." not in source.module or source in trained
        (outside if is_outside else inside).update(used)
        part_of |= inner

    def order(model: Class) -> tuple[object, ...]:
        computes = "forward" in model.methods or any(base in names for base in model.bases)
        loss = model.name.endswith(("Loss", "CrossEntropy", "Criterion"))
        known, built = outside[model.name].bit_length(), inside[model.name].bit_length()
        return (not computes or loss, -known, model.name in part_of, -built, -_reach(model.name, parts), model.name)

    whole = [model for model in models if model.name not in part_of or outside[model.name] or model.name in exported]
    return sorted(whole or models, key=order)


def _used(tree: ast.Module, names: set[str]) -> tuple[set[str], set[str]]:
    """The classes that a file builds or hands over outside of classes, and those that are arguments of another."""
    used: set[str] = set()
    inner: set[str] = set()
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            name = dotted(node.func).rpartition(".")[2]
            mentioned = {each.id for each in node.args if isinstance(each, ast.Name)}
            used |= ({name} | mentioned) & names
            inner |= {name} & names if inside else set()
            inside = inside or name in names
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return used - inner, inner


def _reach(name: str, parts: Mapping[str, frozenset[str]]) -> int:
    """Return how many model classes a class is made of, directly or not."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        new = parts.get(waiting.pop(), frozenset()) - seen
        seen |= new
        waiting += new
    return len(seen)
