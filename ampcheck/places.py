"""Where something runs: the module, the source line of the user's code, and the names of ops."""

from __future__ import annotations

import os
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DEMO = os.path.join(_HERE, "demo.py")
_NOT_THE_USERS = (_HERE, _TORCH, os.path.dirname(os.__file__) + os.sep + "contextlib.py", "<")


class Scopes:
    """Which module of a model runs in this thread, from hooks on every module."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._here = _Stack()
        self._calls: Counter[str] = Counter()
        self._counting = threading.Lock()

    @property
    def inside(self) -> bool:
        """Whether a module of the model runs."""
        return bool(self._here.stack)

    @property
    def current(self) -> tuple[str, int]:
        """The innermost module and how often it was entered before; the root where none runs."""
        return self._here.stack[-1] if self._here.stack else ("", 0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the model's modules while the block runs."""
        with ExitStack() as hooks:
            for name, module in hookable(self._model):
                hooks.callback(module.register_forward_pre_hook(self._enter(name), prepend=True).remove)
                hooks.callback(module.register_forward_hook(self._leave(name), always_call=True).remove)
            try:
                yield
            finally:
                self._here.stack.clear()

    def _enter(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            with self._counting:
                call = self._calls[name]
                self._calls[name] += 1
            self._here.stack.append((name, call))

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            # When a forward raises, torch runs this hook on the way out and some modules may have been left already.
            stack = self._here.stack
            while stack and stack.pop()[0] != name:
                pass

        return hook


class _Stack(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []


def hookable(model: torch.nn.Module | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model by their paths, without those that TorchScript runs, which take no hooks."""
    for name, module in model.named_modules() if model is not None else ():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def op_name(op: Any) -> str:
    """`aten::addmm` for the default overload, `aten::sum.dim_IntList` otherwise."""
    name: str = op._schema.name
    overload: str = op._schema.overload_name
    return f"{name}.{overload}" if overload else name


def overload(name: str) -> torch._ops.OpOverload:
    """The overload that `op_name` names. Raises `AttributeError` where this PyTorch has none."""
    namespace, _, rest = name.partition("::")
    packet, _, chosen = rest.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), chosen or "default")
    return found


def is_users(path: str) -> bool:
    """Whether a source file is neither PyTorch's nor ours; the demo stands for a user's."""
    return path == _DEMO or not path.startswith(_NOT_THE_USERS)


def short_path(path: str) -> str:
    """Relative to the working directory or to the site-packages around it: `transformers/activations.py`."""
    _, installed, inside = path.rpartition(f"site-packages{os.sep}")
    here = os.getcwd() + os.sep
    return inside if installed else path.removeprefix(here)


def users_place(error: BaseException) -> tuple[str, int | None]:
    """The innermost line of the user's code that an exception came through."""
    places = ((f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__))
    found = [(short_path(path), line) for path, line in places if is_users(path)]
    return found[-1] if found else ("", None)


def users_line(frame: FrameType | None) -> tuple[str, int | None]:
    """The innermost frame of the user's code."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return short_path(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
    return "", None
