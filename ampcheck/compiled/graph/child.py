"""Run in a child process when its Python starts: notes what it compiles, saves and loads. Only the standard library.

It is run by its path, in whatever Python the child is, so it imports nothing of this package.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import json
import os
import sys

TYPE_CHECKING = False  # a type checker takes it for true; `typing` itself is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FILE = "AMPCHECK_CHILDREN"


def counters() -> dict[str, int]:
    """Graphs compiled and cached results used so far, by Dynamo's own counters; zeros before it is imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    found = getattr(utils, "counters", None) or {}
    inductor, aot, stats = (dict(found.get(name, {})) for name in ("inductor", "aot_autograd", "stats"))
    hits = inductor.get("fxgraph_cache_hit", 0) + aot.get("autograd_cache_hit", 0)
    return {"graphs": stats.get("unique_graphs", 0), "hits": hits}


def tell(path: str, event: str, **data: Any) -> None:
    """Append one line of JSON; a file that is gone belongs to a block that was left."""
    line = json.dumps({"event": event, "pid": os.getpid(), **counters(), **data}) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    with os.fdopen(file, "a") as stream:
        stream.write(line)


def wrapped(path: str, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, telling how many artifacts it saved or loaded and who called it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        info = result[1] if action == "save" and result is not None else result
        groups = getattr(info, "artifacts", None) or {}
        caller = sys._getframe(1)
        place = {"file": caller.f_code.co_filename, "line": caller.f_lineno}
        tell(path, action, keys=sum(len(keys) for keys in groups.values()), **place)
        return result

    return call


class Finder:
    """Wraps the two functions as soon as `torch.compiler` is imported."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """The spec of `torch.compiler` with a loader that wraps; None for all else."""
        if name != "torch.compiler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for action, attribute in (("save", "save_cache_artifacts"), ("load", "load_cache_artifacts")):
                if hasattr(module, attribute):
                    setattr(module, attribute, wrapped(self.path, action, getattr(module, attribute)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def end(path: str) -> None:
    """What the process had compiled when it ended, if it used PyTorch."""
    if "torch" in sys.modules:
        tell(path, "end")


def start() -> None:
    """Begin to watch, unless this process is one of Inductor's own workers."""
    path = os.environ.get(FILE)
    if path and not any("compile_worker" in word for word in getattr(sys, "orig_argv", ())):
        sys.meta_path.insert(0, Finder(path))
        atexit.register(end, path)


if __name__ == "ampcheck_child":
    start()
