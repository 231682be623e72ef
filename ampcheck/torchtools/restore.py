"""Restores the state of the process and the thread after each public call.

A public function that runs the user's code itself (`audit`, `assert_compiled`, `blame`, a search, the lab) is decorated
with `restoring`: whatever the model, the checks or PyTorch change in the process is restored, on success, on an error
and on `KeyboardInterrupt`. Blocks over the user's own code (`watch`) restore nothing of the user's, except the settings
that they say they restore.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
import torch.backends.opt_einsum  # PyTorch 2.6 imports it late

from ampcheck.core.environment import quiet
from ampcheck.torchtools.global_state import KERNELS, Setting, flags_at, read_state, restore_state
from ampcheck.torchtools.subnormals import flushed_here

Restore: TypeAlias = Callable[[], None]
P = ParamSpec("P")
T = TypeVar("T")

_CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
)

_REFUSED = (RuntimeError, AttributeError, OSError)
"""A setting that this PyTorch lacks or refuses to write, a folder that is gone."""


@contextmanager
def restored() -> Iterator[None]:
    """Restore on leaving the state of this thread and of the process.

    Of PyTorch: autocast, precision, determinism, default dtype and device, grad and anomaly mode, backends, threads,
    flushing of subnormals, print options, and the settings of Dynamo, Inductor, functorch and fx that were imported
    before. The random generators of PyTorch, numpy and Python; warnings filters; `logging.disable` and the levels of
    loggers that had one; the working directory, the recursion limit, and variables of the environment that were set
    before (new ones stay: a library that is imported meanwhile may rely on them).

    Blocks nest, and the outermost of a thread restores. The state of the process is saved by the first block of any
    thread and restored by the last one that ends, so that calls in several threads may overlap.
    """
    restores = [] if _thread.depth else _saved(_of_thread())
    _process.begin()
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1
        try:
            _run(restores)
        finally:
            _process.end()


def restoring(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs inside `restored`."""

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        with restored():
            return function(*args, **kwargs)

    return within


class _Thread(threading.local):
    depth = 0


class _Process:
    """The state of all threads: saved when the first block begins, restored when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._leaving = ExitStack()

    def begin(self) -> None:
        with self._lock:
            if not self._inside:
                restores = [*_saved(_of_process()), save_random_state()]
                self._leaving.enter_context(warnings.catch_warnings())
                self._leaving.callback(_run, restores)
            self._inside += 1

    def end(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._leaving.close()


_thread = _Thread()
_process = _Process()


def _random_state() -> tuple[Any, ...]:
    """The states of the generators that PyTorch, Python and numpy draw from by default, and of those of CUDA."""
    numpy = sys.modules.get("numpy")
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if initialized else []
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state(), cuda


def save_random_state() -> Restore:
    """Save the generators that PyTorch, numpy and Python draw from by default."""
    cpu, python, of_numpy, cuda = _random_state()

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def random_state_key() -> tuple[int, ...]:
    """Equal while nothing was drawn from those generators."""
    cpu, python, of_numpy, cuda = _random_state()
    position = b"" if of_numpy is None else of_numpy[1].tobytes() + bytes(of_numpy[2])
    return hash(python), hash(position), *(hash(state.numpy().tobytes()) for state in (cpu, *cuda))


def _run(restores: list[Restore]) -> None:
    """Run each of them, even if another raises."""
    with quiet(), ExitStack() as stack:
        for restore in restores:
            stack.callback(restore)


def _saved(settings: list[Setting]) -> list[Restore]:
    """A function for each setting that restores its present value. One that cannot be read is left out."""
    restores: list[Restore] = []
    with quiet():  # PyTorch warns of settings that it is about to rename
        for read, write in settings:
            with suppress(*_REFUSED):
                restores.append(functools.partial(_restore, read, write, read()))
    return restores


def _restore(read: Callable[[], Any], write: Callable[[Any], object], before: object) -> None:
    with suppress(*_REFUSED):
        if read() == before:
            return
    with suppress(*_REFUSED):
        write(before)


def _of_thread() -> list[Setting]:
    configs: list[Any] = [sys.modules.get(name) for name in _CONFIGS]
    return [
        (functools.partial(_read_state, of_thread=True), restore_state),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (flushed_here, torch.set_flush_denormal),
        *(
            (functools.partial(_options, config), functools.partial(_configure, config))
            for config in configs
            if hasattr(config, "get_config_copy")
        ),
    ]


def _read_state(*, of_thread: bool) -> dict[str, Any]:
    own = ("autocast", "default device")
    return {name: value for name, value in read_state().items() if name.startswith(own) is of_thread}


def _options(config: Any) -> dict[str, Any]:
    """Every setting of a config module; values whose copies cannot be compared are the objects themselves."""
    copied = config.get_config_copy()
    return {name: value if _is_plain(value) else getattr(config, name) for name, value in copied.items()}


def _configure(config: object, before: dict[str, Any]) -> None:
    now = _options(config)
    for name, value in before.items():
        if name in now and now[name] != value:
            with suppress(*_REFUSED):
                setattr(config, name, value)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype))


def _of_process() -> list[Setting]:
    backends: Any = torch.backends
    return [
        *flags_at((*KERNELS, "backends.opt_einsum.enabled", "backends.opt_einsum.strategy")).values(),
        *(
            (getattr(backends.cuda, f"{kind}_sdp_enabled"), getattr(backends.cuda, f"enable_{kind}_sdp"))
            for kind in ("flash", "mem_efficient", "math", "cudnn")
            if hasattr(backends.cuda, f"enable_{kind}_sdp")
        ),
        (functools.partial(_read_state, of_thread=False), restore_state),
        (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda before: torch.autograd.set_detect_anomaly(*before),
        ),
        (torch.is_warn_always_enabled, torch.set_warn_always),
        (torch.get_num_threads, torch.set_num_threads),
        (lambda: dict(vars(torch._tensor_str.PRINT_OPTS)), vars(torch._tensor_str.PRINT_OPTS).update),
        (lambda: logging.root.manager.disable, logging.disable),
        (_levels, _set_levels),
        (lambda: dict(os.environ), os.environ.update),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (os.getcwd, os.chdir),
    ]


def _levels() -> list[tuple[logging.Logger, int, bool]]:
    """The loggers that have a level; an imported library sets its own, PyTorch's compiler included."""
    loggers = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    return [(log, log.level, log.disabled) for log in (logging.root, *loggers) if log.level != logging.NOTSET]


def _set_levels(before: list[tuple[logging.Logger, int, bool]]) -> None:
    for logger, level, disabled in before:
        logger.setLevel(level)
        logger.disabled = disabled
