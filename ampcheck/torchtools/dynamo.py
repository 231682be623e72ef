"""Dynamo, AOTAutograd and Inductor: settings, caches, the trace of compilations, and what `torch.compile` wrapped.

With `interception` the only place that uses private interfaces of PyTorch's compiler. They are imported when they are
used and checked by tests/contract/test_dynamo.py; `trace_unsupported()` reports a release that lacks one of the
trace, and callers then skip with that reason.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import runpy
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx

from ampcheck.core.environment import quiet, variables
from ampcheck.core.errors import UsageError
from ampcheck.torchtools.patching import once_imported, replaced, without_warning

# Settings and caches ---------------------------------------------------------------------------------------------


@contextmanager
def configured(settings: Mapping[str, Any]) -> Iterator[None]:
    """Settings of the compiler inside, by their full names, such as `torch._inductor.config.fallback_random`.

    Raises `UsageError` for one that this release lacks: `emulate_precision_casts` exists since 2.6,
    `backward_pass_autocast` since 2.8.
    """
    with ExitStack() as stack:
        for name, value in settings.items():
            module, short = _setting(name)
            if not hasattr(module, short):
                raise UsageError(f"PyTorch {torch.__version__} has no {name}")
            stack.enter_context(module.patch({short: value}))
        yield


def has_setting(name: str) -> bool:
    """Return whether this release has one of those settings."""
    return hasattr(*_setting(name))


def setting(name: str) -> Any:
    """The present value of one of those settings."""
    return getattr(*_setting(name))


def _setting(name: str) -> tuple[Any, str]:
    module, _, short = name.rpartition(".")
    return importlib.import_module(module), short


def recompile_limit() -> str:
    """The setting that bounds how often one function is compiled: `recompile_limit`, in 2.6 `cache_size_limit`."""
    from torch._dynamo import config

    return "torch._dynamo.config." + ("recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit")


def backend(name: str) -> Callable[[fx.GraphModule, Any], Callable[..., Any]]:
    """The backend of this name, which takes a Dynamo graph and its examples."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def reset() -> None:
    """Forget everything that was compiled; functions are compiled again when they are next called."""
    if "torch._dynamo" in sys.modules:  # whose import takes a second
        with quiet():  # of modules of torch that it imports
            torch.compiler.reset()


@contextmanager
def in_eager_mode(called: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Whatever is compiled runs in eager mode inside, also under `fullgraph=True`; `called` is called at each call.

    Dynamo is not asked, so that the caches of what was compiled before and the stance of the user stay as they are; it
    is not imported either, which takes a second.
    """

    def choose_eager(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        eval_frame = sys.modules["torch._dynamo.eval_frame"]
        count_frames = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)

        def choose(callback: Any) -> Any:
            # 2.6 gives the callback the attributes of what it wraps, under another name.
            exports = getattr(getattr(callback, "_torchdynamo_orig_backend", callback), "_export", False)
            if callback is None or callback is False or exports:  # `torch.compiler.disable`, or a graph is exported
                return original(callback)
            in_operator = getattr(sys.modules.get("torch._higher_order_ops.utils"), "_in_hop_compile", _by_operator)
            if not in_operator():
                called()
            if original.__name__ == choose.__name__:  # a block around this one counts as well
                return original(callback)
            if count_frames is not None:
                count_frames(-1)  # fullgraph counts the compiled frames of the call, and raises for none
            return None

        return choose

    def replace(module: types.ModuleType) -> AbstractContextManager[None]:
        return replaced(module.eval_frame, "_callback_from_stance", choose_eager)

    with once_imported("torch._dynamo", replace):
        yield


def _by_operator() -> bool:
    """Return whether an operator of PyTorch calls what it compiled itself, as `while_loop` does."""
    between = (__name__, replaced.__module__, "torch._dynamo.eval_frame")
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) in between:
        frame = frame.f_back
    return name.startswith(("torch._higher_order_ops.", "torch.nn.attention."))


def stance() -> str:
    """The stance that `torch.compiler.set_stance` set (2.6), such as `force_eager`."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return str(getattr(getattr(eval_frame, "_stance", None), "stance", "default"))


def without_autograd_cache() -> AbstractContextManager[None]:
    """Caches of whole AOTAutograd results are off inside."""
    from torch._functorch import config

    context: AbstractContextManager[None] = config.patch(enable_autograd_cache=False)
    return context


@contextmanager
def own_caches(folder: str) -> Iterator[None]:
    """Inductor and Triton write what they compile to `folder` inside, and start without results in memory.

    What Dynamo has compiled stays. `clear_inductor_caches` is another name for `clear_caches` since 2.8.
    """
    from torch._inductor import utils

    forget: Callable[[], None] = getattr(utils, "clear_caches", None) or utils.clear_inductor_caches
    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    try:
        with variables(names):
            forget()
            yield
    finally:
        forget()


def cache_folder() -> str:
    """The folder of Inductor's compiled code, which is created."""
    try:
        return str(_cache_folders()["cache_dir"]())
    except OSError:  # it creates the folder, which is what failed
        return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "Inductor's cache folder")


def default_cache_folder() -> str:
    """Inductor's folder if `TORCHINDUCTOR_CACHE_DIR` is not set; that of precompiled headers in any case."""
    return str(_cache_folders()["default_cache_dir"]())


def _cache_folders() -> Mapping[str, Any]:
    """Inductor's functions that name its folders, without the import of Inductor, which takes a second."""
    path = os.path.join(os.path.dirname(torch.__file__), "_inductor", "runtime", "cache_dir_utils.py")
    if "torch._inductor" not in sys.modules and os.path.exists(path):
        return runpy.run_path(path)
    return vars(importlib.import_module("torch._inductor.runtime.runtime_utils"))


# The trace of compilations ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One record of PyTorch's structured trace, the one that `TORCH_TRACE` writes to a folder.

    name: of the record or artifact, such as `compilation_metrics` or `recompile_reasons`. compile_id: frame and number
    of its compilation, `3/1`. fields: its data. text: its payload, as text or JSON.
    """

    name: str
    compile_id: str
    fields: Mapping[str, Any]
    text: str


TRACE_RECORDS = frozenset(
    "dynamo_start compilation_metrics bwd_compilation_metrics compilation_metrics_runtime dynamo_graph_break_reason "
    "recompile_reasons fx_graph_cache_hit fx_graph_cache_miss fx_graph_cache_bypass aotautograd_cache_hit "
    "aotautograd_cache_miss aotautograd_cache_bypass".split()
)
"""The records that listeners receive."""

_METRICS = tuple(
    "compile_id co_name co_filename co_firstlineno graph_op_count has_guarded_code fail_type fail_reason "
    "fail_user_frame_filename fail_user_frame_lineno".split()
)


def trace_unsupported() -> str:
    """Why the trace of compilations cannot be read in this PyTorch; "" where it can."""
    try:
        from torch._dynamo.utils import CompilationMetrics
        from torch._logging._internal import trace_log
    except ImportError as error:
        return f"compile trace unsupported: PyTorch {torch.__version__} lacks it ({error})"
    missing = [name for name in _METRICS if name not in getattr(CompilationMetrics, "__dataclass_fields__", {})]
    if missing or not isinstance(trace_log, logging.Logger):
        return f"compile trace unsupported: PyTorch {torch.__version__} lacks {', '.join(missing) or 'its logger'}"
    return ""


@contextmanager
def compile_trace(listener: Callable[[TraceRecord], None]) -> Iterator[None]:
    """Pass every record of `TRACE_RECORDS` to `listener`, in the thread that compiles. Other handlers stay."""
    from torch._logging._internal import trace_log

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            data = getattr(record, "metadata", {})
            name = next((name for name in TRACE_RECORDS if name in data), "")
            fields = data.get(name)
            if "artifact" in data:
                fields = data["artifact"]
                name = str(fields.get("name"))
            if name in TRACE_RECORDS:
                identity = f"{data.get('frame_id')}/{data.get('frame_compile_id')}"
                listener(TraceRecord(name, identity, fields or {}, getattr(record, "payload", None) or ""))

    def is_other(record: logging.LogRecord) -> bool:
        return record.name != trace_log.name

    handler = Handler(logging.DEBUG)
    others = [other for other in trace_log.handlers if not type(other).__module__.startswith("torch.")]
    for other in others:  # pytest shows the log of a failing test: records of the trace have no text
        other.addFilter(is_other)
    trace_log.addHandler(handler)
    try:
        # Before 2.7 it warns of settings that it cannot write to a record, which ends a run where warnings are errors.
        with nullcontext() if hasattr(torch.compiler, "save_cache_artifacts") else without_warning("Skipping serializ"):
            yield
    finally:
        trace_log.removeHandler(handler)
        for other in others:
            other.removeFilter(is_other)


def counters(group: str) -> Counter[str]:
    """Dynamo's counters of one group, such as `stats` with `unique_graphs`."""
    from torch._dynamo.utils import counters

    return Counter({name: int(count) for name, count in counters[group].items()} if group in counters else {})


def compile_seconds() -> float | None:
    """Seconds that this process has spent compiling frames and backward graphs; None where they are not measured."""
    try:
        from torch._dynamo.utils import calculate_time_spent
    except ImportError:
        return None
    return float(calculate_time_spent().get("total_wall_time", 0))


def kernel_count() -> int | None:
    """Kernels that Inductor generated, those of cached graphs included."""
    try:
        from torch._inductor import metrics

        return int(metrics.generated_kernel_count)
    except (ImportError, AttributeError):
        return None


# Dynamo's code on the call stack ---------------------------------------------------------------------------------


def is_compiled_code(code: CodeType) -> bool:
    """Return whether Dynamo wrote a code object: it calls a graph or resumes after a break."""
    return any(name.startswith(("__compiled_fn", "__resume_at")) for name in code.co_names)


def resumed_function(name: str) -> tuple[str, int] | None:
    """The function and line at which Dynamo's `torch_dynamo_resume_in_f_at_12` resumes after a graph break."""
    match = re.fullmatch(r"torch_dynamo_resume_in_(.*)_at_(\d+)", name)
    return (match[1], int(match[2])) if match else None


DISABLED = ("DisableContext", "RunOnlyContext")
"""Contexts of wrappers of `torch.compiler.disable`, by the names of their classes."""


# Modules and functions that torch.compile wrapped ----------------------------------------------------------------


def is_compiled(part: object) -> bool:
    """Return whether a module or function is a result of `torch.compile`, or a module on which `compile()` was called.

    The result of `torch.compiler.disable` is an `OptimizedModule` too, of another context.
    """
    if _is_wrapper(part):
        return type(getattr(part, "dynamo_ctx", None)).__name__ not in DISABLED
    if getattr(part, "_compiled_call_impl", None) is not None or _own_forward(part) is not None:
        return True
    wrapped = hasattr(part, "_torchdynamo_orig_callable") and not getattr(part, "_torchdynamo_disable", False)
    return wrapped and not isinstance(part, torch.nn.Module)


def uncompiled(part: object) -> Any:
    """The module or function that `torch.compile` wrapped. Parts inside it stay compiled."""
    if not is_compiled(part):
        return part
    return getattr(part, "_orig_mod", None) or getattr(part, "_torchdynamo_orig_callable", part)


def stripped(part: object) -> Any:
    """A module or function without `torch.compile`, in whole and in parts. Changes modules: pass a copy."""
    part = uncompiled(part)
    for module in list(part.modules()) if isinstance(part, torch.nn.Module) else ():
        module._compiled_call_impl = None
        if (forward := _own_forward(module)) is not None:
            plain = uncompiled(forward)  # bound to the original, which a copy shares
            module.forward = types.MethodType(getattr(plain, "__func__", plain), module)
        for name, child in _children(module):
            module._modules[name] = uncompiled(child)
    return part


class CompiledLike:
    """Compiles plain copies as their originals are, in whole and in parts, with the settings of each.

    The settings are in the `OptimizeContext` that `torch.compile` made: `dynamo_ctx` of a module, a cell of a function.
    What originals share their copies share.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._visited: dict[int, Any] = {}

    def of(self, original: Any, duplicate: Any) -> Any:
        """The copy as its original is: itself, or its compiled form."""
        if isinstance(original, torch.nn.Module) and id(duplicate) not in self._visited:
            self._visited[id(duplicate)] = duplicate
            self._compile_inside(uncompiled(original), duplicate)
        if not is_compiled(original) or original is uncompiled(original):
            return duplicate
        key = id(original), id(duplicate)
        if key not in self._compiled:  # the values keep the objects alive, so that each `id` stays unique
            self._compiled[key] = _context(original)(duplicate), original, duplicate
        return self._compiled[key][0]

    def _compile_inside(self, inner: torch.nn.Module, duplicate: torch.nn.Module) -> None:
        for name, module in _children(inner):
            duplicate._modules[name] = self.of(module, duplicate._modules[name])
        if getattr(inner, "_compiled_call_impl", None) is not None:
            duplicate._compiled_call_impl = _context(inner._compiled_call_impl)(duplicate._call_impl)
        if (forward := _own_forward(inner)) is not None:
            duplicate.forward = _context(forward)(duplicate.forward)


def _children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """All children by name; `named_children` leaves out the second name of a shared child."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _own_forward(part: object) -> Any:
    """The compiled function that `module.forward = torch.compile(module.forward)` set on a module."""
    forward = vars(part).get("forward") if isinstance(part, torch.nn.Module) else None
    return forward if hasattr(forward, "_torchdynamo_orig_callable") and not _is_wrapper(part) else None


def _is_wrapper(part: object) -> bool:
    """Return whether it is an `OptimizedModule`; without an import of Dynamo, which is slow, there is none."""
    return isinstance(part, getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ()))


def _context(part: Any) -> Callable[..., Any]:
    if hasattr(part, "dynamo_ctx"):
        return part.dynamo_ctx  # type: ignore[no-any-return]
    cells = dict(zip(part.__code__.co_freevars, part.__closure__ or (), strict=True))
    settings: Callable[..., Any] = cells["self"].cell_contents
    return settings
