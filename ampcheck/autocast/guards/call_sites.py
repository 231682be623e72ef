"""Whose Python code called an op: the user's, the autograd engine, or what a compiler wrote."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ampcheck.autocast import probe
from ampcheck.torchtools.source import is_users, short_path

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_GRAPH = os.path.join(_TORCH, "autograd", "graph.py")
_FUNCTION = os.path.join(_TORCH, "autograd", "function.py")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_INDUCTOR = os.path.join(_TORCH, "_inductor") + os.sep
_COMPILERS = (_INDUCTOR, os.path.join(_TORCH, "_functorch", "_aot_autograd") + os.sep)
_OPTIMIZER = os.path.join(_TORCH, "optim") + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_DIRECT = tuple(os.path.join(_TORCH, name) for name in ("_tensor.py", "functional.py", "_compile.py", "_dynamo"))
"""Thin wrappers around a single op: a call through them is the user's own. The last two wrap every dispatch mode."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an op comes from.

    file, line: the innermost line of the user's code; empty where the autograd engine called the op by itself.
    direct: that line called the op, not a function of PyTorch's library. compiled: code of torch.compile ran it.
    site: what calls the op again when the same code runs again: that line, or the module of PyTorch that it calls.
    """

    file: str
    line: int | None
    direct: bool
    compiled: bool
    site: Hashable


@dataclass(frozen=True, slots=True)
class Way:
    """How the autograd engine came to an op.

    top: identifies the call that the engine made. checkpoint: through PyTorch's checkpoint. function: through the
    backward of an autograd.Function, not a hook. module: a module was entered on the way. differentiable: gradients are
    enabled all along, since this backward is to be differentiated itself (create_graph).
    """

    top: int
    checkpoint: bool
    function: bool
    module: bool
    differentiable: bool


_USER, _ENGINE, _COMPILER, _DIRECTLY, _MODULE, _LIBRARY, _PROBE, _NOBODY = range(8)
_kinds: dict[CodeType, tuple[int, str]] = {}


def spot_of(frame: FrameType | None, backward: bool) -> Spot | None:
    """The spot of an op that `frame` leads to; None where our own probe called it.

    backward: the autograd engine runs, and its frame ends the search.
    """
    direct, compiled, site = True, False, None
    while frame is not None:
        kind, path = _kind(frame.f_code)
        if kind == _ENGINE and backward:
            break
        if kind == _PROBE:
            return None
        if kind == _USER:
            above = frame.f_back
            if above is None or not above.f_code.co_filename.startswith(_INDUCTOR):
                return Spot(path, frame.f_lineno, direct, compiled, site or (path, frame.f_lineno))
            compiled = True  # a file that Inductor wrote
        elif kind == _COMPILER:
            compiled = True
        elif kind in (_MODULE, _LIBRARY):
            direct = False
            if kind == _MODULE and site is None:
                site = id(frame.f_locals.get("self")), path, frame.f_lineno
        frame = frame.f_back
    return Spot("", None, False, compiled, site)


def way_to(frame: FrameType | None) -> Way:
    """The way from the engine to the op that `frame` leads to."""
    top, checkpoint, function, module = 0, False, False, False
    while frame is not None:
        code = frame.f_code
        if _kind(code)[0] == _ENGINE:
            # Gradients, retain_graph, create_graph. A thread of the engine's own has no such frame.
            given = frame.f_locals.get("args", ())
            return Way(top, checkpoint, function, module, len(given) > 2 and given[2] is True)
        top = id(frame)
        checkpoint = checkpoint or code.co_filename == _CHECKPOINT
        module = module or code is torch.nn.Module._call_impl.__code__
        if code.co_filename == _FUNCTION and code.co_name.startswith("apply"):
            function = function or isinstance(frame.f_locals.get("self"), BackwardCFunction)
        frame = frame.f_back
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return Way(top, checkpoint, function, module, bool(keeps and keeps()))  # the next best


def in_optimizer(frame: FrameType | None) -> bool:
    """Whether an optimizer's step leads to `frame`."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZER):
            return True
        frame = frame.f_back
    return False


def function_context(frame: FrameType | None) -> Any:
    """The `ctx` of the innermost autograd.Function of the user's whose forward leads to `frame`.

    Where no forward was handed one (`setup_context`): the code of those forwards that are no module's. PyTorch calls
    them from C or from Python, depending on the release; what they were called with is the same.
    """
    forwards = []
    while frame is not None:
        code = frame.f_code
        names = code.co_varnames[:1]
        if (code.co_name == "forward" or names == ("ctx",)) and _kind(code)[0] == _USER:
            first = frame.f_locals.get(names[0]) if names else None
            if isinstance(first, BackwardCFunction):
                return first
            if not isinstance(first, torch.nn.Module):
                forwards.append(code)
        frame = frame.f_back
    return forwards


def _kind(code: CodeType) -> tuple[int, str]:
    known = _kinds.get(code)
    if known is None:
        known = _kinds[code] = _classify(code)
    return known


def _classify(code: CodeType) -> tuple[int, str]:
    path = code.co_filename
    if is_users(path):
        return _USER, short_path(path)
    if path == _GRAPH and code.co_name == "_engine_run_backward":
        return _ENGINE, ""
    if path == probe.__file__:
        return _PROBE, ""
    if path.startswith(_COMPILERS):
        return _COMPILER, ""
    if path.startswith(_DIRECT):
        return _DIRECTLY, ""
    if path.startswith(_MODULES) and code.co_name == "forward":
        return _MODULE, path
    return (_LIBRARY if path.startswith(_TORCH) else _NOBODY), ""
