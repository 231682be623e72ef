"""Model constructions in a repository: calls whose arguments are plain, as explicit code.

A name in an argument is replaced by what was assigned to it, so that `TransformerWrapper(num_tokens=256,
attn_layers=Decoder(dim=512))` is left of a script that has `layers = Decoder(dim=DIM)`; an option of the command line
by its default; a configuration whose fields are set one by one keeps its statements. What cannot be followed (an option
without a default, `**config`) makes a call no plain one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

from ampcheck.core.syntax import dotted
from ampcheck.tools.init.options import option_defaults
from ampcheck.tools.init.repository import Class, Repository, class_of
from ampcheck.tools.init.sources import Attempt, Source

_DEPTH = 12
"""Names within names that are followed."""

_OPTIONS = frozenset({"args", "opt", "opts", "options", "hparams", "params", "config", "cfg", "flags", "FLAGS"})
"""Names of parameters that hold the options of the command line."""

_PLAIN = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp)

_INPUTS = frozenset({"rand", "randn", "randint", "ones", "zeros", "arange", "full", "tensor", "eye", "linspace"})
"""Functions of torch that make inputs."""


class _NotPlainError(Exception):
    """An expression depends on what only a run knows."""


def plain_uses(model: Class, repository: Repository) -> list[Attempt]:
    """The plain constructions of a class: of tests first, then of the README and of the other files."""
    sources = sorted((*repository.sources, *repository.examples), key=lambda s: (not s.is_test, s.module != ""))
    found: dict[str, Attempt] = {}
    for source in sources:
        for use in _uses_in(source, model, repository.classes):
            if use.code not in found or (use.inputs and not found[use.code].inputs):
                found[use.code] = use
    return list(found.values())


def _uses_in(source: Source, model: Class, classes: Mapping[str, Sequence[Class]]) -> Iterator[Attempt]:
    if f"{model.name}(" not in source.text:
        return
    outer = _assigned(source.tree.body)
    scopes: list[tuple[Sequence[ast.stmt], dict[str, ast.expr | None]]] = [(source.tree.body, outer)]
    for node in source.tree.body:
        functions = [node] if isinstance(node, ast.FunctionDef) else node.body if isinstance(node, ast.ClassDef) else []
        for function in functions:
            if isinstance(function, ast.FunctionDef):
                arguments = {argument.arg: None for argument in [*function.args.args, *function.args.kwonlyargs]}
                scopes.append((function.body, {**outer, **arguments, **_assigned(function.body)}))
    for body, names in scopes:
        for statement in _flat(body):
            value = getattr(statement, "value", None)
            if not isinstance(statement, (ast.Assign, ast.Expr, ast.Return)) or not isinstance(value, ast.expr):
                continue
            call = next(_calls_of(value, model.name), None)
            if call is None:
                continue
            fields = _fields(body, statement.lineno)
            writer = _Writer(source, names, classes, fields)
            try:
                code = writer.plain(call)
            except _NotPlainError:
                continue
            target = statement.targets[0] if isinstance(statement, ast.Assign) and call is value else None
            inputs = _inputs(target.id, body, writer) if isinstance(target, ast.Name) else ""
            where = f"{source.path}:{statement.lineno}" if source.module else source.path
            setup = tuple(writer.setup)
            yield Attempt(code, tuple(sorted(writer.imports)), inputs, f"as {where} builds it", setup)


def _calls_of(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == name:
            yield node


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body and of its blocks, without those of functions and classes."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for block in ("body", "orelse", "finalbody"):
            yield from _flat(getattr(statement, block, []))


def _fields(body: Sequence[ast.stmt], end: int) -> dict[str, list[ast.Assign]]:
    """The statements `name.field = value` of a scope before a line, by name."""
    found: dict[str, list[ast.Assign]] = {}
    for statement in _flat(body):
        if isinstance(statement, ast.Assign) and statement.lineno < end:
            target = statement.targets[0]
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                found.setdefault(target.value.id, []).append(statement)
    return found


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr | None]:
    """Return what each name of a scope stands for; None where that changes or is not an assignment to the name
    alone."""
    values: dict[str, ast.expr | None] = {}
    for statement in _flat(body):
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            name = statement.targets[0].id
            values[name] = None if name in values else statement.value
        else:
            stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            if not isinstance(statement, (ast.If, ast.With, ast.Try)):
                values.update(dict.fromkeys((name.id for name in stored), None))
    return values


class _Writer:
    """Writes expressions of one scope with every name resolved; collects the imports that they need."""

    def __init__(
        self,
        source: Source,
        names: Mapping[str, ast.expr | None],
        classes: Mapping[str, Sequence[Class]],
        fields: Mapping[str, Sequence[ast.Assign]],
    ) -> None:
        self._source, self._names, self._classes, self._fields = source, names, classes, fields
        self.imports: set[str] = set()
        self.setup: list[str] = []

    def plain(self, node: ast.expr) -> str:
        """The expression as source text. Raises `_NotPlainError` where a part depends on a run."""
        return ast.unparse(ast.fix_missing_locations(self._resolved(deepcopy(node), _DEPTH)))

    def _resolved(self, node: ast.expr, depth: int) -> ast.expr:
        if depth == 0:
            raise _NotPlainError
        if isinstance(node, ast.Name):
            return self._name(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if not isinstance(node, _PLAIN) or (isinstance(node, ast.Dict) and None in node.keys):
            raise _NotPlainError
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(node, name, self._resolved(value, depth - 1))
            elif isinstance(value, list) and name != "keys":
                value[:] = [self._resolved(each, depth - 1) for each in value]
        return node

    def _attribute(self, node: ast.Attribute) -> ast.expr:
        """A name of torch, or an option of the command line, of which its default is left."""
        if dotted(node).startswith("torch."):
            return node
        if isinstance(node.value, ast.Name) and node.attr in (defaults := option_defaults(self._source.tree)):
            value = self._names.get(node.value.id)
            if (value is None and node.value.id in _OPTIONS) or (value is not None and "parse" in ast.unparse(value)):
                return ast.parse(repr(defaults[node.attr]), mode="eval").body
        raise _NotPlainError

    def _name(self, node: ast.Name, depth: int) -> ast.expr:
        value = self._names.get(node.id)
        if value is not None:
            resolved = self._resolved(deepcopy(value), depth - 1)
            if node.id not in self._fields:
                return resolved
            self._set_fields(node.id, resolved, depth)
            return node
        if node.id not in self._names and node.id in self._classes:
            self._import(node.id)
            return node
        raise _NotPlainError

    def _set_fields(self, name: str, value: ast.expr, depth: int) -> None:
        """Keep the statements that make an object and set its fields."""
        lines = [f"{name} = {ast.unparse(ast.fix_missing_locations(value))}"]
        for statement in self._fields[name]:
            field = self._resolved(deepcopy(statement.value), depth - 1)
            text = ast.unparse(ast.fix_missing_locations(field))
            lines.append(f"{ast.unparse(statement.targets[0])} = {text}")
        self.setup += [line for line in lines if line not in self.setup]

    def _call(self, node: ast.Call, depth: int) -> ast.expr:
        name = dotted(node.func)
        first, _, last = name.rpartition(".")
        if last in self._classes and name not in self._names:
            self._import(last)
            node.func = ast.Name(last)
        elif first in self._classes and first not in self._names:  # such as Config.from_name("small")
            self._import(first)
        elif name.startswith("torch.nn.") or (name.startswith("torch.") and last in _INPUTS):
            pass
        elif (
            isinstance(node.func, ast.Attribute) and last in ("bool", "float", "long", "int", "half") and not node.args
        ):
            node.func.value = self._resolved(node.func.value, depth - 1)
            return node
        elif name not in ("int", "float", "dict", "list", "tuple"):
            raise _NotPlainError
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            raise _NotPlainError
        keywords = [each for each in node.keywords if each.arg != "device"]
        node.args = [self._resolved(each, depth - 1) for each in node.args]
        node.keywords = [ast.keyword(each.arg, self._resolved(each.value, depth - 1)) for each in keywords]
        return node

    def _import(self, name: str) -> None:
        self.imports.add(self._class(name).line)

    def _class(self, name: str) -> Class:
        """The class that a name means here: of this file, of the module that it is imported from, or the only one."""
        candidates = self._classes[name]
        own = next((each for each in candidates if each.source is self._source), None)
        origin = self._source.names.get(name, "").rpartition(".")[0]
        return own or class_of(candidates, origin) or candidates[0]


def _inputs(name: str, body: Sequence[ast.stmt], writer: _Writer) -> str:
    """The arguments of the first plain call `name(...)` in a scope; "" without one."""
    calls = (call for statement in _flat(body) for call in _calls_of(statement, name))
    return next((text for call in calls if (text := _arguments(call, writer))), "")


def _arguments(call: ast.Call, writer: _Writer) -> str:
    """The arguments as a tuple or a mapping; "" where they are both or not plain."""
    try:
        if call.args and not call.keywords:
            return f"({', '.join(writer.plain(each) for each in call.args)},)"
        if call.keywords and not call.args:
            pairs = [f"{each.arg!r}: {writer.plain(each.value)}" for each in call.keywords if each.arg]
            return "{" + ", ".join(pairs) + "}"
    except _NotPlainError:
        pass
    return ""
