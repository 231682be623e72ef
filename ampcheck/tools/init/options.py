"""The command line of a script: its options with their defaults, and how the README calls it."""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampcheck.core.syntax import dotted
from ampcheck.tools.init.sources import Source

_BATCH = frozenset({"b", "bs", "batch", "batch_size", "train_batch_size", "per_device_train_batch_size"})
_BATCH_OF_ALL = frozenset({"global_batch_size", "total_batch_size"})
_WORKERS = frozenset({"j", "workers", "num_workers", "n_workers", "n_cpu"})
_SMALL_BATCH = 8
"""Samples of a step that is observed."""

_CALL = re.compile(r"(?:python3?|accelerate launch|torchrun)\b[^`]*?\s([^\s`]+\.py)\b(?=([^`#]*))")
"""A command that runs a script, with its arguments, among which another command may begin."""

_PLACEHOLDER = re.compile(r"[<>\[\]{}$]|path/to|/path|\.\.\.|^[A-Z_]{3,}$|[|&;]|(?:^|=)[/~]")
"""Text in a README where a reader's own value belongs, such as a path outside the repository."""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of argparse. flags: its names, as `-b` and `--batch-size`, none of a positional one. default: None
    where there is none, or none that is a literal."""

    name: str
    flags: tuple[str, ...]
    default: object = None
    required: bool = False


def options_of(tree: ast.AST) -> Iterator[Option]:
    """The arguments of the parsers of argparse in a file."""
    for node in ast.walk(tree):
        called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if not isinstance(node, ast.Call) or called not in ("add_argument", "add_mutually_exclusive_group"):
            continue
        keywords = {each.arg: each.value for each in node.keywords}
        flags = tuple(each.value for each in node.args if isinstance(each, ast.Constant) and type(each.value) is str)
        optional = all(flag.startswith("-") for flag in flags) or _text(keywords.get("nargs")) in ("?", "*")
        required = _text(keywords.get("required")) not in ("", "False") or not optional
        longest = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        name = _text(keywords.get("dest")) or longest.lstrip("-").replace("-", "_")
        action = _text(keywords.get("action"))
        default = {"store_true": False, "store_false": True}.get(action) or _literal(keywords.get("default"))
        if action == "store_true" and default is None:
            default = False
        yield Option(name, flags if optional else (), default, required)


def option_defaults(tree: ast.AST) -> dict[str, object]:
    """The defaults of the options that have one, by the names of their values."""
    return {each.name: each.default for each in options_of(tree) if each.default is not None}


def required_options(tree: ast.AST) -> list[str]:
    """The arguments that a command line must have."""
    return [each.flags[0] if each.flags else each.name or "a group" for each in options_of(tree) if each.required]


def documented_arguments(path: str, examples: str) -> list[str] | None:
    """The arguments with which a README calls a script; None where it does not, or leaves values to the reader.

    path: relative to the README, which may leave out its folder.
    """
    names = {path, path.rpartition("/")[2]}
    for line in examples.replace("\\\n", " ").splitlines():
        for called, arguments in _CALL.findall(line):
            if posixpath.normpath(called) not in names:
                continue
            try:
                words = shlex.split(arguments)
            except ValueError:
                continue
            if not any(map(_PLACEHOLDER.search, words)) and not {"-h", "--help"} & {*words}:
                return words
    return None


def small_arguments(tree: ast.AST, given: Sequence[str]) -> list[str]:
    """Options for a smaller batch and no workers, of those that are not given."""
    found: list[str] = []
    flags = {word.partition("=")[0] for word in given}
    for option in options_of(tree):
        names = {option.name, *(flag.lstrip("-").replace("-", "_") for flag in option.flags)}
        default = option.default
        if not option.flags or {*option.flags} & flags or type(default) is not int:
            continue
        if names & {*_BATCH, *_BATCH_OF_ALL} and default > _SMALL_BATCH:
            found += [option.flags[-1], str(_SMALL_BATCH)]
        elif names & _WORKERS and default > 0:
            found += [option.flags[-1], "0"]
    return found


def asks_for_cuda(source: Source) -> bool:
    """Return whether code places tensors on CUDA, or uses its autocast or its scaler."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return True
        if any(map(_is_cuda, _devices(node))):
            return True
        if isinstance(node, ast.Attribute) and dotted(node).startswith("torch.cuda.amp"):
            return True
    return any(origin.startswith("torch.cuda.amp") for origin in source.names.values())


def _devices(node: ast.AST) -> list[ast.expr | None]:
    """The values of a node that say where code runs: of `device=`, and the arguments of `.to`, `autocast` and such."""
    if isinstance(node, ast.keyword):
        return [node.value] if node.arg == "device" else []
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [node.value] if any(dotted(each).rpartition(".")[2] == "device" for each in targets) else []
    if isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        named = zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)
        pairs = [*named, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        return [default for argument, default in pairs if argument.arg == "device"]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
        if name in ("to", "device", "autocast", "GradScaler"):
            return [*node.args, *(each.value for each in node.keywords)]
    return []


def _is_cuda(node: ast.expr | None) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_cuda(node.body) or _is_cuda(node.orelse)
    if isinstance(node, (ast.BoolOp, ast.JoinedStr)):
        return any(map(_is_cuda, node.values))
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and re.fullmatch(r"cuda(:\d*)?", text) is not None


def _literal(node: ast.expr | None) -> object:
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, SyntaxError):
        return None


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node).strip("'\"")
