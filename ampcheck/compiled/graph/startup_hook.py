"""Copied to a `sitecustomize.py` that child processes import when Python starts: records what they compile, save, load.

It runs in whatever Python the child is, so it imports the standard library alone.
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

FOLDER = os.path.dirname(os.path.abspath(__file__))
EVENTS = "events.jsonl"


def write(event: str, **data: object) -> None:
    """Append one line of JSON with Dynamo's own counters so far; without the file the observed block has ended."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None) or {}
    inductor, aot, stats = (dict(counters.get(name, {})) for name in ("inductor", "aot_autograd", "stats"))
    hits = inductor.get("fxgraph_cache_hit", 0) + aot.get("autograd_cache_hit", 0)
    counts = {"pid": os.getpid(), "graphs": stats.get("unique_graphs", 0), "hits": hits}
    try:
        file = os.open(os.path.join(FOLDER, EVENTS), os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    with os.fdopen(file, "a") as stream:
        stream.write(json.dumps({"event": event, **counts, **data}) + "\n")


def recorded(action: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, recording how many artifacts it saved or loaded and its caller."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        info = result[1] if action == "save" and result is not None else result
        groups = getattr(info, "artifacts", None) or {}
        caller = sys._getframe(1)
        where = {"file": caller.f_code.co_filename, "line": caller.f_lineno}
        write(action, keys=sum(len(keys) for keys in groups.values()), **where)
        return result

    return call


class Finder:
    """Wraps the two functions of `torch.compiler` when it is imported."""

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
                    setattr(module, attribute, recorded(action, getattr(module, attribute)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    if not any("compile_worker" in word for word in getattr(sys, "orig_argv", ())):  # Inductor's own workers
        sys.meta_path.insert(0, Finder())
        atexit.register(lambda: write("end") if "torch" in sys.modules else None)
    this = sys.modules.pop("sitecustomize")  # the environment's own comes next
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        sys.modules["sitecustomize"] = this
