"""The scripts of a repository that train, and what each needs before it can run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ampcheck.core.syntax import dotted
from ampcheck.tools.init.options import asks_for_cuda, documented_arguments, required_options, small_arguments
from ampcheck.tools.init.sources import Source

_PARSERS = ("argparse", "click", "fire", "hydra", "typer", "absl", "tyro", "simple_parsing", "HfArgumentParser")
_TRAINERS = ("main", "train", "run", "fit", "training_function", "train_model", "training_loop", "main_worker")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a constructor. annotation, default: as source text, None where there is none."""

    name: str
    annotation: str | None = None
    default: str | None = None

    @property
    def required(self) -> bool:
        """True if it has no default."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class TrainingScript:
    """A script with a training loop.

    function: the one that trains, None where the whole script is run. needs: what the user must add before it can run,
    "" for nothing. importable: whether importing it does not train. has_options: whether it reads a command line.
    arguments: of that command line. cuda: it asks for CUDA. datasets: the repository takes
    datasets from torchvision.
    """

    source: Source
    function: str | None
    signature: str
    needs: str
    importable: bool = True
    has_options: bool = False
    arguments: tuple[str, ...] = ()
    cuda: bool = False
    datasets: bool = False

    @property
    def title(self) -> str:
        """As on the command line of `ampcheck audit` where a function trains."""
        return f"{self.source.path}:{self.function}" if self.function else self.source.path

    @property
    def is_target(self) -> bool:
        """True if `ampcheck audit` can run it: it needs no arguments and no data from a test."""
        return self.function is not None and not (self.arguments or self.datasets)


def training_script(source: Source, readme: str, *, datasets: bool) -> TrainingScript | None:
    """The training loop of a file: what calls `.backward(...)`, or fits a trainer; in a package, what also steps.

    readme: its text. datasets: the repository takes datasets from torchvision.
    """
    if source.path.endswith("__init__.py") or not _trains(source.tree):
        return None
    functions = {node.name: node for node in source.tree.body if isinstance(node, ast.FunctionDef)}
    body = [node for node in source.tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    guarded = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    importable = not _trains(ast.Module([node for node in body if node not in guarded], []))
    in_package = "." in source.module
    if in_package and not guarded and not any(_trains(node) and _optimizes(node) for node in functions.values()):
        return None  # a library's function of gradients, such as a penalty
    name = next((name for name in _TRAINERS if name in functions), None)
    # A function with parameters, which Hydra or a parser fills, is called by the block below `if __name__` alone.
    filled = name is not None and any(each.required for each in function_parameters(functions[name]))
    whole = not importable or (guarded and (name is None or filled))
    if name is None and not whole:
        return None
    script = _described(source, readme, None if whole else name, functions)
    return replace(script, importable=importable, datasets=datasets)


def _described(
    source: Source, readme: str, name: str | None, functions: Mapping[str, ast.FunctionDef]
) -> TrainingScript:
    missing = [each.name for each in function_parameters(functions[name]) if each.required] if name else []
    parsers = sorted({origin.partition(".")[0] for origin in source.names.values()} & {*_PARSERS})
    if "HfArgumentParser" in source.names:
        parsers.append("HfArgumentParser")
    given = documented_arguments(source.path, readme) if parsers else None
    needs = ""
    if missing:
        needs = f"its arguments {', '.join(missing)}"
    elif given is None and (required := required_options(source.tree)):
        needs = f"the options {', '.join(required)} of its command line"
    elif given is None and parsers and not {*parsers} <= {"argparse", "hydra"}:
        needs = f"the command line that {parsers[0]} reads"
    arguments = (*(given or []), *small_arguments(source.tree, given or [])) if not needs else ()
    return TrainingScript(
        source,
        name,
        f"{name}({', '.join(missing)})" if name else source.path,
        needs,
        has_options=bool(parsers) and not needs,
        arguments=arguments,
        cuda=asks_for_cuda(source),
    )


def function_parameters(node: ast.FunctionDef) -> list[Parameter]:
    """The parameters of a function, without `*args` and `**kwargs`."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(node.args.defaults)) + list(node.args.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return [
        Parameter(
            argument.arg,
            ast.unparse(argument.annotation) if argument.annotation else None,
            ast.unparse(default) if default is not None else None,
        )
        for argument, default in pairs
    ]


def _optimizes(tree: ast.AST) -> bool:
    """Return whether code calls `step` of an optimizer or a scaler, or a trainer of a library."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(dotted(call).rpartition(".")[2] in ("step", "fit", "train") for call in calls)


def _trains(tree: ast.AST) -> bool:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    names = {dotted(call) for call in calls}
    trainer = any(name.rpartition(".")[2].endswith("Trainer") for name in names)
    fits = any(name.rpartition(".")[0].lower().endswith("trainer") and name.endswith(".fit") for name in names)
    return "backward" in methods or fits or (trainer and bool({"fit", "train", "run"} & methods))
