"""Reads from its source whether a region is switched on, which PyTorch forgets where it switches the region off."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterable
from functools import cache
from types import CodeType, FrameType

from ampcheck.autocast.guards.call_sites import frames
from ampcheck.torchtools.source import is_users


def switches_on(frame: FrameType | None) -> bool:
    """Return whether the source of a region for CUDA that `frame` enters switches it on.

    The source is the decorator of a function; for any other region all that the file that enters it makes, since which
    of them this is is not known. Where `enabled` is passed, and is not True, the region may be meant to be off.
    """
    for outer in frames(frame):
        if outer.f_code.co_name == "decorate_autocast":
            code = getattr(inspect.unwrap(outer.f_locals["func"]), "__code__", None)
            if code is not None and (decorators := _of_function(code)):
                return all(map(_is_on, decorators))
        if is_users(outer.f_code.co_filename):
            made = _of_file(outer.f_code.co_filename)
            return bool(made) and all(map(_is_on, made))
    return False


@cache
def _of_function(code: CodeType) -> list[ast.Call]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    except (OSError, SyntaxError, ValueError):
        return []
    return _regions(getattr(definition, "decorator_list", ()))


@cache
def _of_file(path: str) -> list[ast.Call]:
    try:
        return _regions(ast.walk(ast.parse("".join(linecache.getlines(path)))))
    except SyntaxError:
        return []


def _regions(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    """The calls that make regions, without those for another device."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "autocast"]
    return [call for call in named if _device(call) in ("cuda", None)]


def _device(call: ast.Call) -> object:
    """The device that a call names; None where it names none, or a variable does."""
    devices = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "device_type")]
    value = devices[0].value if devices and isinstance(devices[0], ast.Constant) else None
    return value if isinstance(value, str) else None


def _is_on(call: ast.Call) -> bool:
    """Return whether `enabled` is left out or True. It is the third argument, and the first one in `torch.cuda.amp`."""
    passed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if None in passed or len(call.args) > 2 or (call.args and _device(call) is None):
        return False
    return passed.get("enabled", "True") == "True"
