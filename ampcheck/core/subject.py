"""Subjects: the models, functions and training loops that are judged."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from ampcheck.core.errors import UsageError, as_result, brief, require_ran
from ampcheck.core.text import did_you_mean, listed

SHAPES = (
    "(module, args), (module, args, kwargs), (callable, [args, args, ...]), ([module, ...], [args]), "
    "a mapping with 'step', or a callable without arguments"
)


class Kind(str, Enum):
    """Which of the five shapes a subject has."""

    FORWARD = "forward"
    COMPILE = "compile"
    REGIONAL = "compile, regional"
    TRAINING = "training"
    CALL = "call"


MODELS = (Kind.FORWARD, Kind.COMPILE, Kind.REGIONAL)
EVERY = (*MODELS, Kind.TRAINING, Kind.CALL)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, function or step to be judged.

    shape: one of
        `(module, args)` or `(module, args, kwargs)`   forward, and backward from a loss
        `(fn or module, [args, args, ...])`            successive calls
        `([module, ...], [args])`                      blocks, the output of one fed to the next
        `{"model", "optimizer", "scaler", "step", ...}` a training loop, `step(i) -> float`
        a callable without arguments
    name: its name in findings.
    loss: `loss(output) -> 0-d tensor`; by default the mean of squares of every floating output.
    dtypes: declared dtypes of module outputs, `{glob pattern of module paths: dtype}`, judged under low precision.
    limits: limits of this subject, as in `[tool.ampcheck.limits]`.
    trains: whether a callable is expected to train: one that steps no optimizer is refused.

    Raises `UsageError` for another shape.
    """

    shape: Any
    name: str = "subject"
    loss: Callable[[Any], Any] | None = None
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    trains: bool = False
    kind: Kind = field(init=False)
    model: Any = field(init=False, repr=False)
    calls: tuple[Call, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kind, model, calls = _parse(self.shape, self.name)
        for field_name, value in (("dtypes", self.dtypes), ("limits", self.limits)):
            if not isinstance(value, Mapping):
                raise UsageError(f"{field_name} of {self.name} must be a mapping; found {type(value).__name__}")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "calls", calls)

    def run_call(self) -> Any:
        """Call a callable without arguments. Raises `SubjectError` if that runs nothing."""
        return require_ran(self.shape(), self.name)

    def run_step(self, number: int) -> Any:
        """Run one step of a training loop. Raises `SubjectError` if that runs nothing."""
        return require_ran(self.shape["step"](number), f"step({number}) of {self.name}")


def as_subject(value: object, name: str = "subject") -> Subject:
    """`value` if it is a `Subject`, else a `Subject` of that shape. Raises `UsageError` for another shape."""
    return value if isinstance(value, Subject) else Subject(value, name=name)


def subject_of(model: object, inputs: object = None, name: str = "") -> Subject:
    """The subject of `assert_*(model, inputs, name=name)`: a model with its inputs, or a subject or shape alone.

    Raises `UsageError` where a `Subject` comes with inputs or a name of its own.
    """
    if isinstance(model, Subject):
        if inputs is not None:
            raise UsageError("a Subject contains its inputs: pass the Subject alone")
        if name:
            raise UsageError("a Subject has a name: pass name= to Subject(...)")
        return model
    if inputs is None:
        return Subject(model, name=name or getattr(model, "__name__", "subject"))
    return Subject((model, inputs), name=name or name_of(model))


def name_of(model: object) -> str:
    """The name in findings of a model: its class or function; of several blocks such as `Block (10 blocks)`."""
    if isinstance(model, (list, tuple)) and model:
        return f"{', '.join(dict.fromkeys(name_of(block) for block in model))} ({len(model)} blocks)"
    return str(getattr(model, "__name__", type(model).__name__))


_MEMBER = re.compile(r"(?P<collection>(?:.+?\.py|[\w.]+):[\w.]+)\[(?P<name>.+)\]", re.DOTALL)

TARGET_FORMS = "package.module:function, path/to/file.py:function, or the architecture of a library, as timm:resnet50"
"""The targets of commands, in words."""

ARCHITECTURES = ("transformers", "diffusers", "timm", "torchvision", "hf")
"""Before the colon of a target, what names an architecture instead of code; see `ampcheck.architectures`."""


def is_architecture(target: str) -> bool:
    """Return whether a target names the architecture of a library, such as `timm:resnet50`, and no code."""
    library, colon, name = target.partition(":")
    return library in ARCHITECTURES and bool(colon and name)


def split_member(target: str) -> tuple[str, str]:
    """The collection and the name of a target `collection[name]`; the target and "" of any other."""
    member = _MEMBER.fullmatch(target)
    return (member["collection"], member["name"]) if member else (target, "")


def name_of_target(target: str) -> str:
    """The name of a target in reports: that of the member of a collection, or the target itself."""
    return split_member(target)[1] or target


def names_of_targets(targets: Iterable[str]) -> dict[str, str]:
    """The name of each target in reports that have all of them; where several have one name, the whole target."""
    names = {target: name_of_target(target) for target in targets}
    counts = Counter(names.values())
    return {target: name if counts[name] == 1 else target for target, name in names.items()}


def load_subject(target: str, *, trains: bool = False) -> Subject:
    """The subject that `package.module:function`, `path/to/file.py:function` or `file.py:collection[name]` names.

    A function is called without arguments; a value that is a subject is used unchanged. collection: see
    `load_collection`; its members are functions or subjects. trains: a function that returns nothing, by its code, is
    the subject itself, as it trains. Raises `UsageError` if the target cannot be imported, the function raises, or its
    result has no known shape. The architecture of a library is built small, see `ampcheck.architectures`.
    """
    if is_architecture(target):  # by name: what is built there stands above this layer
        build: Callable[[str], Subject] = importlib.import_module("ampcheck.architectures").subject_of_architecture
        return build(target)
    collection, name = split_member(target)
    if name:
        members = load_collection(collection)
        if name not in members:
            raise UsageError(f"{collection} has no {name!r}; it has {listed(members) or 'nothing'}")
        value: object = members[name]
    else:
        value = load_attribute(target)
    function = value
    if trains and callable(function) and _returns_nothing(function):
        return Subject(function, name=target, trains=True)
    if callable(function) and not isinstance(function, Subject):
        try:
            value = require_ran(function(), target)
        except BaseException as error:  # the user's code may raise anything
            raise UsageError(f"{target} raised {brief(as_result(error))}") from error
        if value is None:
            raise UsageError(
                f"{target} returned nothing: it must return what to judge, such as (model, args); to judge the "
                f"function itself, return it from another: def subject(): return {target.rpartition(':')[2]}"
            )
    try:
        subject = as_subject(value, name_of_target(target))
    except UsageError as error:
        if not (trains and callable(function)):
            raise
        called = f"{target.rpartition(':')[2]}()"
        advice = f"if it trains, name a function that calls it and returns nothing: def train(): {called}"
        raise UsageError(f"{error}; {advice}") from error
    return subject if subject.name != "subject" else replace(subject, name=name_of_target(target))


def load_collection(target: str) -> dict[str, Any]:
    """The members by name of the collection that `package.module:attribute` or `path/to/file.py:attribute` names.

    A collection is a mapping of names, or a function without arguments that returns one, or returns or yields pairs of
    name and member. Raises `UsageError` for anything else.
    """
    value = load_attribute(target)
    try:
        if callable(value):
            value = value()
        pairs = list(value.items() if isinstance(value, Mapping) else value) if isinstance(value, Iterable) else []
        members = {name: member for name, member in pairs if isinstance(name, str) and name}
    except BaseException as error:  # the user's code may raise anything
        raise UsageError(f"the collection {target} raised {brief(as_result(error))}") from error
    if not members or len(members) < len(pairs):
        found = type(value).__name__ if not pairs else f"{len(pairs)} pairs with {len(members)} different names"
        raise UsageError(
            f"{target} must be a mapping of names to subjects or functions that return one, or a function that returns "
            f"such a mapping or yields pairs, each with a name of its own; found {found}"
        )
    return members


def load_attribute(target: str) -> Any:
    """The value that `package.module:attribute` or `path/to/file.py:attribute` names."""
    source, _, attribute = target.rpartition(":")
    if not source or not attribute:
        advice = f": name what to judge in it, as {target}:main" if Path(target).is_file() else ""
        raise UsageError(
            f"a target is 'package.module:function' or 'path/to/file.py:function', found {target!r}{advice}"
        )
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source, attribute)
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        names = [name for name in vars(module) if not name.startswith("_")]
        meant = f" {did_you_mean(attribute, names)}".rstrip()
        raise UsageError(f"{source} has no {attribute!r};{meant} it has {', '.join(names) or 'nothing'}") from error
    except BaseException as error:  # a property, or a module's __getattr__
        raise UsageError(f"{target} raised {brief(as_result(error))}") from error


def _parse(shape: Any, name: str) -> tuple[Kind, Any, tuple[Call, ...]]:
    if isinstance(shape, Mapping):
        if callable(shape.get("step")):
            return Kind.TRAINING, shape, ()
        raise _wrong(name, f"a mapping with {sorted(map(str, shape))} and no callable 'step'")
    if isinstance(shape, tuple) and len(shape) in (2, 3):
        kwargs = shape[2] if len(shape) == 3 else {}
        if not isinstance(kwargs, Mapping):
            raise _wrong(name, f"a third element of type {type(kwargs).__name__} where the keyword arguments belong")
        model = shape[0]
        if isinstance(model, (list, tuple)) and model and all(callable(block) for block in model):
            return _parse_blocks(tuple(model), shape[1], kwargs, name)
        return _parse_model(model, shape[1], kwargs, name)
    if callable(shape) and not _is_module(shape) and not isinstance(shape, type) and _takes_nothing(shape):
        return Kind.CALL, shape, ()
    raise _wrong(name, f"{type(shape).__name__}" + (f" of {len(shape)}" if isinstance(shape, Sequence) else ""))


def _parse_blocks(
    blocks: tuple[Any, ...], arguments: object, kwargs: Mapping[str, object], name: str
) -> tuple[Kind, Any, tuple[Call, ...]]:
    if not isinstance(arguments, list) or len(arguments) != 1:
        raise _wrong(name, "several blocks without a list of one set of arguments")
    if kwargs:
        raise _wrong(name, "several blocks with keyword arguments, which no block would get")
    return Kind.REGIONAL, blocks, (_call(arguments[0], {}),)


def _parse_model(
    model: Any, arguments: object, kwargs: Mapping[str, object], name: str
) -> tuple[Kind, Any, tuple[Call, ...]]:
    if not callable(model):
        raise _wrong(name, f"a first element of type {type(model).__name__}, which cannot be called")
    if isinstance(model, type) and any(base.__module__.startswith("torch.nn.") for base in model.__mro__):
        raise _wrong(name, f"the class {model.__name__} where an instance belongs, {model.__name__}(...)")
    if not isinstance(arguments, list):
        return Kind.FORWARD, model, (_call(arguments, kwargs),)
    if not arguments:
        raise _wrong(name, "an empty list of calls")
    return Kind.COMPILE, model, tuple(_call(item, kwargs) for item in arguments)


def _call(arguments: object, kwargs: Mapping[str, object]) -> Call:
    """One call: a tuple is its positional arguments, a mapping its keywords, anything else the one argument."""
    if isinstance(arguments, tuple):
        return Call(arguments, dict(kwargs))
    if isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments):
        return Call((), {**arguments, **kwargs})
    return Call((arguments,), dict(kwargs))


def _wrong(name: str, observed: str) -> UsageError:
    return UsageError(f"{name} is no subject: required is {SHAPES}; found {observed}")


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")  # an nn.Module cannot exist before torch is imported
    return torch is not None and isinstance(value, torch.nn.Module)


def _takes_nothing(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _returns_nothing(function: Callable[..., object]) -> bool:
    """Return whether a function has no `return` with a value, by its code, and can be called without arguments.

    One without any `return` loops for ever, unless it only raises.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    ops = [op for op in dis.get_instructions(code) if op.opname not in ("NOP", "CACHE")]
    returned = [
        before.argval if before.opname == "LOAD_CONST" else ...
        for before, op in pairwise(ops)
        if op.opname == "RETURN_VALUE"
    ]
    returned += [op.argval for op in ops if op.opname == "RETURN_CONST"]
    loops = any(op.opcode in dis.hasjrel + dis.hasjabs and op.argval <= op.offset for op in ops)
    return bool(returned or loops) and all(value is None for value in returned) and _takes_nothing(function)


def _import_module(name: str, attribute: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, and a console script does not
    try:
        return importlib.import_module(name)
    except BaseException as error:  # an import runs the user's code, which may raise anything
        lacking = isinstance(error, ModuleNotFoundError) and error.name == name
        meant = did_you_mean(name, ARCHITECTURES).replace("?", f":{attribute}?") if lacking else ""
        raise UsageError(f"cannot import {name}: {brief(as_result(error))}{meant and f'; {meant}'}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    file = Path(os.path.abspath(path))
    root = package_root(file)
    parts = file.relative_to(root).with_suffix("").parts
    try:
        if len(parts) == 1 or not _may_load(root / parts[0]):
            return _import_script(path)
        if sys.path[:1] != [str(root)]:
            sys.path.insert(0, str(root))
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # its siblings, last: a module of a package hides no other module
        return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    except BaseException as error:  # a script that exits would exit 0 with nothing judged
        raise UsageError(f"cannot import {path}: {brief(as_result(error))}") from error


def package_root(file: Path) -> Path:
    """The folder from which a file is imported: its own, or that around the outermost package that it is part of."""
    root = file.parent
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        root = root.parent
    return root


def _may_load(package: Path) -> bool:
    """Return whether no module from elsewhere has the name of this package, a folder, already."""
    loaded = sys.modules.get(package.name)
    origin = getattr(loaded, "__file__", None)
    return loaded is None or (origin is not None and Path(origin).resolve().parent == package.resolve())


def _import_script(path: Path) -> ModuleType:
    # Dynamo imports a frame's module by name when it resumes after a graph break.
    name = path.stem if path.stem not in sys.modules else f"ampcheck_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # its siblings, as when Python runs the file
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
