"""Whose Python code called an op: the user's, the autograd engine, or code that a compiler generated."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction

from ampcheck.autocast import probe
from ampcheck.core.run import Where
from ampcheck.torchtools.copying import parameter_names
from ampcheck.torchtools.private import MODULE_CALL, backward_keeps_graph
from ampcheck.torchtools.source import AMPCHECK, is_users, short_path

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_GRAPH = os.path.join(_TORCH, "autograd", "graph.py")
_FUNCTION = os.path.join(_TORCH, "autograd", "function.py")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_INDUCTOR = os.path.join(_TORCH, "_inductor") + os.sep
_COMPILERS = (_INDUCTOR, os.path.join(_TORCH, "_functorch", "_aot_autograd") + os.sep)
_OPTIMIZER = os.path.join(_TORCH, "optim") + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_WRAPPERS = tuple(os.path.join(_TORCH, name) for name in ("_tensor.py", "functional.py", "_compile.py", "_dynamo"))
"""Thin wrappers around a single op: a call through them is the user's own. The last two wrap every dispatch mode."""

_INSIDE = (AMPCHECK, os.path.join(_TORCH, "_ops.py"), *_WRAPPERS[2:])
"""Code between an op and the call of the user that leads to it."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where an op is called.

    file, line: the innermost line of the user's code; empty where the autograd engine called the op by itself.
    direct: that line called the op, not a function of PyTorch's library. compiled: code of torch.compile called it.
    key: equal for the same call when the code runs again: that line, or the module of PyTorch that it calls.
    """

    file: str
    line: int | None
    direct: bool
    compiled: bool
    key: Hashable

    def where(self, phase: str, op: str = "") -> Where:
        """The location of this call, for a finding."""
        return Where(phase, op=op, file=self.file, line=self.line)


@dataclass(frozen=True, slots=True)
class EnginePath:
    """Path by which the autograd engine reached an op.

    checkpoint: through PyTorch's checkpoint. function: through the backward of an autograd.Function, not a hook.
    module: through a module. differentiable: this backward is to be differentiated itself (create_graph), so gradients
    are enabled throughout.
    """

    checkpoint: bool
    function: bool
    module: bool
    differentiable: bool


_USER, _ENGINE, _COMPILER, _WRAPPER, _MODULE, _LIBRARY, _PROBE, _OTHER = range(8)


def call_site(frame: FrameType | None, backward: bool) -> CallSite | None:
    """The call site of an op that `frame` leads to; None where ampcheck's probe called it.

    backward: the autograd engine runs, and its frame ends the search.
    """
    direct, compiled, key, inner = True, False, None, frame
    while inner is not None:  # of each op: no generator
        outer, inner = inner, inner.f_back
        kind, path = _classify(outer.f_code.co_filename, outer.f_code.co_name)
        if kind == _ENGINE and backward:
            break
        if kind == _PROBE:
            return None
        if kind == _USER:
            if outer.f_back is None or not outer.f_back.f_code.co_filename.startswith(_INDUCTOR):
                return CallSite(path, outer.f_lineno, direct, compiled, key or (path, outer.f_lineno))
            compiled = True  # a file that Inductor wrote
        elif kind == _COMPILER:
            compiled = True
        elif kind in (_MODULE, _LIBRARY):
            direct = False
            if kind == _MODULE and key is None:
                key = id(outer.f_locals.get("self")), path, outer.f_lineno
    return CallSite("", None, False, compiled, key)


def engine_path(frame: FrameType | None) -> EnginePath:
    """The path from the engine to the op that `frame` leads to."""
    checkpoint, function, module = False, False, False
    for outer in frames(frame):
        code = outer.f_code
        if _classify(code.co_filename, code.co_name)[0] == _ENGINE:
            # Gradients, retain_graph, create_graph. A thread of the engine's own has no such frame.
            arguments = outer.f_locals.get("args", ())
            return EnginePath(checkpoint, function, module, len(arguments) > 2 and arguments[2] is True)
        checkpoint = checkpoint or code.co_filename == _CHECKPOINT
        module = module or code is MODULE_CALL
        if code.co_filename == _FUNCTION and code.co_name.startswith("apply"):
            function = function or isinstance(outer.f_locals.get("self"), BackwardCFunction)
    keeps_graph = backward_keeps_graph()  # an approximation
    return EnginePath(checkpoint, function, module, keeps_graph)


def in_optimizer(frame: FrameType | None) -> bool:
    """Return whether an optimizer's step leads to `frame`."""
    return any(outer.f_code.co_filename.startswith(_OPTIMIZER) for outer in frames(frame))


def function_context(frame: FrameType | None) -> Any:
    """The `ctx` of the user's innermost autograd.Function whose forward leads to `frame`.

    Where no forward takes one (`setup_context`): the code of those forwards that are no module's. PyTorch calls
    them from C or from Python, depending on the release; the arguments are the same.
    """
    forwards, inner = [], frame
    while inner is not None:  # of each op: no generator
        outer, inner = inner, inner.f_back
        code = outer.f_code
        names = code.co_varnames[:1]
        if (code.co_name == "forward" or names == ("ctx",)) and _classify(code.co_filename, code.co_name)[0] == _USER:
            first = outer.f_locals.get(names[0]) if names else None
            if isinstance(first, BackwardCFunction):
                return first
            if not isinstance(first, torch.nn.Module):
                forwards.append(code)
    return forwards


def python_call(frame: FrameType | None) -> tuple[int, int]:
    """Equal for the ops that run within one call from Python code, that of emulated kernels and modes aside."""
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


Lines: TypeAlias = tuple[tuple[str, int], ...]


def users_lines(frame: FrameType | None) -> Lines:
    """The lines of the user's code that lead to `frame`, the outermost first, each as its file and number."""
    classified = [(outer, *_classify(outer.f_code.co_filename, outer.f_code.co_name)) for outer in frames(frame)]
    return tuple((path, outer.f_lineno) for outer, kind, path in reversed(classified) if kind == _USER)


def fork(first: Lines, second: Lines) -> tuple[tuple[str, int], tuple[str, int]]:
    """The first lines in which two calls differ; the innermost of both where one code ran twice."""
    apart = (pair for pair in zip(first, second, strict=False) if pair[0] != pair[1])
    return next(apart, (first[-1], (second or first)[-1]))


def parameter_name(frame: FrameType | None, parameter: torch.Tensor) -> str:
    """A parameter's name in the outermost module that has it, of the variables of the calls that lead to `frame`;
    else empty."""
    variables = [value for outer in reversed([*frames(frame)]) for value in outer.f_locals.values()]
    modules = {id(value): value for value in variables if isinstance(value, torch.nn.Module)}
    names = (parameter_names([module]).get(id(parameter), "") for module in modules.values())
    return next(filter(None, names), "")


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _classify(path: str, name: str) -> tuple[int, str]:  # not by the code: that of two equal files is equal
    if is_users(path):
        return _USER, short_path(path)
    if path == _GRAPH and name == "_engine_run_backward":
        return _ENGINE, ""
    if path == probe.__file__:
        return _PROBE, ""
    if path.startswith(_COMPILERS):
        return _COMPILER, ""
    if path.startswith(_WRAPPERS):
        return _WRAPPER, ""
    if path.startswith(_MODULES) and name == "forward":
        return _MODULE, path
    return (_LIBRARY if path.startswith(_TORCH) else _OTHER), ""
