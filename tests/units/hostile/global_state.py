"""A snapshot of the state that belongs to the whole process, as a mapping of names to values.

`snapshot()` reads; `leaks(before, after)` names every value that differs. What is not compared, and why:

- Functions and classes that a module gains, and modules that are imported: lazy imports. Those replaced or gone are
  compared, in every module of PyTorch, numpy, `random`, `threading`, `multiprocessing` and `concurrent.futures`.
- `torch._dynamo.utils.counters` and `torch._inductor.metrics`: statistics of what was compiled, which are data.
- `TORCHINDUCTOR_CACHE_DIR` and `_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR` where they were unset: Inductor writes the
  folder of its cache and an address that generated code reads there when it first needs them.
- Daemon threads: PyTorch keeps pools of them (compile workers, autograd).
"""

from __future__ import annotations

import contextvars
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.backends.opt_einsum  # PyTorch 2.6 imports it late

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla", "ipu", "privateuseone")
CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
    "torch._export.config",
    "torch.compiler.config",
)
KERNELS = ("aten::mm", "aten::addmm", "aten::linear", "aten::softmax.int", "aten::cat", "aten::layer_norm", "aten::exp")
OWNERS = ("torch", "numpy.random", "random", "threading", "multiprocessing", "concurrent.futures", "signal", "os")
"""Packages whose functions and classes must be the same objects, with those of all modules inside."""

ENVIRONMENT_SET_LAZILY = frozenset({"TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"})


class Unreadable(str):
    """Why a value cannot be read; equal to the same reason."""


class Same:
    """A value that is compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} {getattr(self.value, '__qualname__', '')} at {id(self.value):#x}>"


def snapshot(*, functions: bool = True) -> dict[str, Any]:
    """Every value that belongs to the process or to this thread, by a name that says what it is.

    functions: also the identities of some 60,000 functions and methods.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to read old switches of precision, or deprecated names, warns
        values: dict[str, Any] = dict(_functions()) if functions else {}
        for part in (_torch, _backends, _autocast, _configs, _compiler, _modes, _hooks, _kernels):
            values.update(part())
    for part in (_random, _logging, _python):
        values.update(part())
    return values


def leaks(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every name whose value differs, with both values. Names that only one side has are what was added or lost."""
    missing = Unreadable("not there")
    found: dict[str, tuple[Any, Any]] = {}
    for name in {**before, **after}:
        was, now = before.get(name, missing), after.get(name, missing)
        if isinstance(was, Functions):
            found.update(was.replaced_in(name, now))
        elif was != now and not _lazy(name, before):
            found[name] = was, now
    return found


class Functions:
    """What a module or a class holds by name. Functions and classes are compared, by identity; not code of Dynamo's."""

    def __init__(self, owner: Any) -> None:
        self.held = dict(vars(owner))

    def replaced_in(self, place: str, later: Any) -> dict[str, tuple[Any, Any]]:
        now = later.held if isinstance(later, Functions) else {}
        found = {}
        for name, value in self.held.items():
            other = now.get(name)
            if (
                other is not value
                and isinstance(value, _PLAIN)
                and not name.startswith(("__compiled_fn", "__resume_at"))
            ):
                found[f"{place}.{name}"] = Same(value), Same(other)
        return found


def _lazy(name: str, before: Mapping[str, Any]) -> bool:
    if name.startswith(("functions ", "config ", "logger ")):
        return name not in before  # its module was imported meanwhile
    return name.removeprefix("environ ") in ENVIRONMENT_SET_LAZILY and name not in before


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # an old flag beside a new one: PyTorch refuses to read it
        return Unreadable(type(error).__name__)


def _torch() -> Iterator[tuple[str, Any]]:
    tiny = torch.tensor([2.0**-130], device="cpu")
    readers: dict[str, Callable[[], Any]] = {
        "default dtype": torch.get_default_dtype,
        "default device": torch.get_default_device,
        "default tensor type": lambda: torch.tensor([1.0], device="cpu").type(),
        "grad mode": torch.is_grad_enabled,
        "inference mode": torch.is_inference_mode_enabled,
        "anomaly mode": torch.is_anomaly_enabled,
        "anomaly check of nan": torch.is_anomaly_check_nan_enabled,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled,
        "deterministic fill": lambda: torch.utils.deterministic.fill_uninitialized_memory,
        "deterministic debug mode": torch.get_deterministic_debug_mode,
        "warn always": torch.is_warn_always_enabled,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "threads": torch.get_num_threads,
        "interop threads": torch.get_num_interop_threads,
        "subnormals are flushed": lambda: float(tiny * 1.0) == 0.0 and float(tiny.double()) == 0.0,
        "subnormals of a product": lambda: (tiny * torch.tensor([0.5])).view(torch.int32).tolist(),
        "print options": lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
        "forward AD level": lambda: torch.autograd.forward_ad._current_level,
        "view replay": torch._C._is_view_replay_enabled,
        "multithreading of backward": torch._C._is_multithreading_enabled,
        "future: swap parameters": torch.__future__.get_swap_module_params_on_conversion,
        "future: overwrite parameters": torch.__future__.get_overwrite_module_params_on_conversion,
        "jit profiling executor": lambda: torch._C._get_graph_executor_optimize(),
        "storage sharing": torch.multiprocessing.get_sharing_strategy,
        "fork state of cuda": torch.cuda.is_initialized,
    }
    yield from ((f"torch: {name}", _read(read)) for name, read in readers.items())


def _backends() -> Iterator[tuple[str, Any]]:
    cudnn, mkldnn, cuda = torch.backends.cudnn, torch.backends.mkldnn, torch.backends.cuda
    places: dict[str, tuple[Any, str]] = {
        "torch.backends": (torch.backends, "fp32_precision"),
        "cudnn": (cudnn, "enabled benchmark benchmark_limit deterministic allow_tf32 fp32_precision"),
        "cudnn.conv": (getattr(cudnn, "conv", None), "fp32_precision"),
        "cudnn.rnn": (getattr(cudnn, "rnn", None), "fp32_precision"),
        "cuda.matmul": (
            cuda.matmul,
            "allow_tf32 fp32_precision allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction "
            "allow_fp16_accumulation",
        ),
        "mkldnn": (mkldnn, "enabled deterministic allow_tf32 fp32_precision"),
        "mkldnn.matmul": (getattr(mkldnn, "matmul", None), "fp32_precision"),
        "mkldnn.conv": (getattr(mkldnn, "conv", None), "fp32_precision"),
        "mkldnn.rnn": (getattr(mkldnn, "rnn", None), "fp32_precision"),
        "opt_einsum": (torch.backends.opt_einsum, "enabled strategy"),
        "quantized": (torch.backends.quantized, "engine"),
    }
    for place, (owner, names) in places.items():
        for name in names.split():
            yield f"backends: {place}.{name}", _read(lambda owner=owner, name=name: getattr(owner, name))
    yield "backends: nnpack", _read(torch._C._get_nnpack_enabled)
    for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"):
        yield f"backends: {name}", _read(lambda name=name: getattr(cuda, f"{name}_enabled")())
    yield "backends: preferred linear algebra", _read(cuda.preferred_linalg_library)
    yield "backends: preferred BLAS", _read(cuda.preferred_blas_library)


def _autocast() -> Iterator[tuple[str, Any]]:
    for device in AUTOCAST_DEVICES:
        yield f"autocast: on {device}", _read(lambda device=device: torch.is_autocast_enabled(device))
        yield f"autocast: dtype on {device}", _read(lambda device=device: torch.get_autocast_dtype(device))
    yield "autocast: cache", torch.is_autocast_cache_enabled()
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    yield "autocast: nesting", depth


def _configs() -> Iterator[tuple[str, Any]]:
    for name in CONFIGS:
        module: Any = sys.modules.get(name)
        if module is not None:
            for key, value in _settings(module).items():
                yield f"config {name}.{key}", value


def _settings(module: Any) -> dict[str, Any]:
    for method in ("get_config_copy", "shallow_copy_dict"):
        if hasattr(module, method):
            return dict(getattr(module, method)())
    return {name: value for name, value in vars(module).items() if not name.startswith("__") and not callable(value)}


def _compiler() -> Iterator[tuple[str, Any]]:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    yield "compiler: stance", _read(lambda: frames._stance.stance)
    yield "compiler: eval frame callback", Same(_read(torch._C._dynamo.eval_frame.get_eval_frame_callback))
    callbacks: Any = sys.modules.get("torch._dynamo.callback")
    if callbacks is not None:
        handler = callbacks.callback_handler
        yield "compiler: start callbacks", [id(one) for one in handler.start_callbacks]
        yield "compiler: end callbacks", [id(one) for one in handler.end_callbacks]
    guards: Any = sys.modules["torch._guards"]
    yield "compiler: tracing context", Same(guards.TracingContext.try_get())
    yield "compiler: compile context", Same(guards.CompileContext.try_get())
    yield "compiler: is compiling", torch.compiler.is_compiling()
    if hasattr(torch._inductor.config, "deterministic"):
        yield "compiler: deterministic", torch._inductor.config.deterministic


def _modes() -> Iterator[tuple[str, Any]]:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    yield "modes: torch function", [id(mode) for mode in _get_current_function_mode_stack()]
    yield "modes: torch dispatch", [id(mode) for mode in _get_current_dispatch_mode_stack()]
    yield "modes: torch function enabled", torch._C._is_torch_function_enabled()
    yield "modes: functorch", _read(lambda: len(torch._C._functorch.get_interpreter_stack() or ()))
    yield "modes: included dispatch keys", str(torch._C._dispatch_tls_local_include_set())
    yield "modes: excluded dispatch keys", str(torch._C._dispatch_tls_local_exclude_set())
    yield "modes: Python dispatcher", _read(lambda: torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher"))


def _hooks() -> Iterator[tuple[str, Any]]:
    from torch.optim import optimizer

    for module in (torch.nn.modules.module, optimizer):
        for name, value in vars(module).items():
            if name.startswith("_global_"):
                shown = [(key, id(hook)) for key, hook in value.items()] if isinstance(value, dict) else value
                yield f"hooks: {name}", shown
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())  # 2.6 cannot say
    yield "hooks: saved tensors", _read(lambda: [id(hook) for hook in top(True) or ()])
    yield "hooks: saved tensors disabled", _read(torch._C._autograd._saved_tensors_hooks_get_disabled_error_message)


def _kernels() -> Iterator[tuple[str, Any]]:
    """Which kernels the dispatcher has for some ops, and how many overloads have one for autocast on the CPU."""
    for op in KERNELS:
        yield f"kernels of {op}", torch._C._dispatch_dump(op)
    for key in ("AutocastCPU", "AutocastCUDA"):
        names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        yield f"kernels for {key}", {name for name in names if name.startswith("aten::")}


def _random() -> Iterator[tuple[str, Any]]:
    yield "random: torch", bytes(torch.random.get_rng_state().numpy().tobytes())
    yield "random: torch's default generator", Same(torch.default_generator)
    yield "random: torch's seed", torch.initial_seed()
    state = numpy.random.get_state()
    yield "random: numpy", (state[0], state[1].tobytes(), *state[2:])
    yield "random: Python", random.getstate()
    yield "random: numpy's generator", Same(_read(lambda: numpy.random.mtrand._rand))


def _logging() -> Iterator[tuple[str, Any]]:
    yield "logging: disable", logging.root.manager.disable
    yield "logging: class", Same(logging.getLoggerClass())
    yield "logging: factory", Same(logging.getLogRecordFactory())
    yield "logging: root", _logger(logging.root)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in ("torch", "ampcheck", "py", "hypothesis"):
            yield f"logger {name}", _logger(logger)


def _logger(logger: logging.Logger) -> tuple[Any, ...]:
    handlers = [(id(one), one.level, [id(each) for each in one.filters]) for one in logger.handlers]
    return (logger.level, handlers, [id(one) for one in logger.filters], logger.disabled, logger.propagate)


def _python() -> Iterator[tuple[str, Any]]:
    yield "warnings: filters", [(*one[:1], str(one[1]), one[2], str(one[3]), one[4]) for one in warnings.filters]
    yield "warnings: list of filters", Same(warnings.filters)
    yield "warnings: showwarning", Same(warnings.showwarning)
    yield "warnings: _showwarnmsg_impl", Same(getattr(warnings, "_showwarnmsg_impl", None))
    for number in signal.valid_signals():
        yield f"signal {number}", Same(signal.getsignal(number))
    yield "signal: wakeup", _read(_wakeup)
    yield "signal: timer", _read(lambda: signal.getitimer(signal.ITIMER_REAL)[1])
    for name, value in os.environ.items():
        if name != "PYTEST_CURRENT_TEST":
            yield f"environ {name}", value
    yield "working directory", str(Path.cwd())
    yield "sys.path", list(sys.path)
    yield "sys.meta_path", [id(one) for one in sys.meta_path]
    yield "sys.path_hooks", [id(one) for one in sys.path_hooks]
    yield "sys.argv", list(sys.argv)
    for name in ("stdout", "stderr", "stdin", "excepthook", "displayhook", "unraisablehook", "breakpointhook"):
        yield f"sys.{name}", Same(getattr(sys, name))
    yield "sys: recursion limit", sys.getrecursionlimit()
    yield "sys: switch interval", sys.getswitchinterval()
    yield "sys: trace", Same(sys.gettrace())
    yield "sys: profile", Same(sys.getprofile())
    yield "sys: dont_write_bytecode", sys.dont_write_bytecode
    yield "threading: excepthook", Same(threading.excepthook)
    yield "threading: trace", Same(threading.gettrace())
    yield "threading: profile", Same(threading.getprofile())
    alive = sorted(one.name for one in threading.enumerate() if not one.daemon and not _works_for_pytest(one))
    yield "threading: alive, no daemons", alive
    yield "gc", (gc.isenabled(), gc.get_threshold(), gc.get_debug(), [id(one) for one in gc.callbacks])
    mask = os.umask(0o22)
    os.umask(mask)
    yield "umask", mask
    yield "locale", locale.setlocale(locale.LC_ALL)
    yield "multiprocessing: start method", multiprocessing.get_start_method(allow_none=True)
    yield "multiprocessing: children", sorted(one.name for one in multiprocessing.active_children())
    yield "modules of targets", sorted(name for name in sys.modules if name.startswith("ampcheck_target_"))
    yield "temporary files", sorted(one.name for one in Path(tempfile.gettempdir()).glob("*ampcheck*"))
    yield "tempfile.tempdir", tempfile.tempdir
    ours = {var.name: value for var, value in contextvars.copy_context().items() if var.name.startswith("ampcheck")}
    yield "context variables", {name: repr(value) for name, value in ours.items() if value}
    yield "numpy: error state", numpy.geterr()
    yield "numpy: print options", numpy.get_printoptions()


def _works_for_pytest(thread: threading.Thread) -> bool:
    return thread.name.startswith(("execnet", "pytest"))


def _wakeup() -> int:
    before = signal.set_wakeup_fd(-1)  # raises outside of the main thread
    signal.set_wakeup_fd(before)
    return before


_PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, staticmethod, classmethod, property)


def _functions() -> Iterator[tuple[str, Any]]:
    """Every function and class of the packages in `OWNERS`, and every method of these classes."""
    for place, module in list(sys.modules.items()):
        if place.partition(".")[0] not in _ROOTS or place.startswith(_GENERATED) or module is None:
            continue
        if not any(place == owner or place.startswith(f"{owner}.") for owner in OWNERS):
            continue
        yield f"functions {place}", Functions(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == place and value.__name__ not in _REGISTRIES:
                yield f"functions {place}.{name}", Functions(value)


_ROOTS = frozenset(owner.partition(".")[0] for owner in OWNERS)
_GENERATED = ("torch._inductor.runtime.compile_tasks",)
"""Modules that Inductor writes and loads."""
_REGISTRIES = ("CacheInfo",)
"""Classes that get a property for each kind of cache when its module is imported."""
