"""What belongs to the process is after a public call as it was before: the one place that saves and restores it.

A public function that runs code of the user's on its own account (`audit`, `assert_compiled`, `blame`, a search, the
lab) is decorated with `restoring`: whatever the model, the checks or PyTorch change in the process meanwhile is undone,
on success, on an error and on `KeyboardInterrupt`. Blocks over the user's own code (`watch`, `guard`, `observe`) change
nothing and restore nothing of the user's, except the switches that `guard` says it restores.
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

from ampcheck.health.subnormals import flushed_here
from ampcheck.torchtools.global_state import read_state, restore_state

Undo: TypeAlias = Callable[[], None]
Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]
P = ParamSpec("P")
T = TypeVar("T")

_CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
)


@contextmanager
def restored() -> Iterator[None]:
    """Restore on leaving what belongs to this thread and to the process.

    Of PyTorch: autocast, precision, determinism, default dtype and device, grad and anomaly mode, backends, threads,
    flushing of subnormals, print options, and the settings of Dynamo, Inductor, functorch and fx that were imported
    before. The random generators of PyTorch, numpy and Python; warnings filters; `logging.disable` and the levels of
    loggers that had one; the working directory, the recursion limit, and variables of the environment that were set
    before (those that are added stay: a library that is imported meanwhile may rely on them).

    Blocks nest, and the outermost of a thread restores. What belongs to the process is saved by the first block of any
    thread and restored by the last one that ends, so that calls in several threads may overlap.
    """
    outermost = not _here.depth
    undo = _saved(_of_thread()) if outermost else []
    _process.begin()
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        try:
            _run(undo)
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


class _Here(threading.local):
    depth = 0


class _Process:
    """What belongs to all threads: saved when the first block begins, restored when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._undo: list[Undo] = []
        self._filters = warnings.catch_warnings()

    def begin(self) -> None:
        with self._lock:
            if not self._inside:
                self._undo = [*_saved(_of_process()), random_back(), _levels_back(), _environment_back()]
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
            self._inside += 1

    def end(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            try:
                _run(self._undo)
            finally:
                self._undo = []
                self._filters.__exit__(None, None, None)


_here = _Here()
_process = _Process()


def _run(undo: list[Undo]) -> None:
    """Each of them, even if another raises."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        for step in undo:
            stack.callback(step)


def _saved(settings: list[Setting]) -> list[Undo]:
    """What sets each setting back to its value of now, if it has another by then. One that cannot be read is left."""
    undo: list[Undo] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to read a switch that PyTorch is about to rename warns
        for read, write in settings:
            with suppress(*_REFUSED):
                undo.append(functools.partial(_put_back, read, write, read()))
    return undo


_REFUSED = (RuntimeError, AttributeError, OSError)
"""A switch that this PyTorch does not have or does not let go, a folder that is gone."""


def _put_back(read: Callable[[], Any], write: Callable[[Any], Any], before: Any) -> None:
    with suppress(*_REFUSED):
        if read() == before:
            return
    with suppress(*_REFUSED):
        write(before)


def _of_thread() -> list[Setting]:
    found: list[Setting] = [
        (functools.partial(_switches, of_thread=True), restore_state),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (flushed_here, torch.set_flush_denormal),
    ]
    for name in _CONFIGS:
        config: Any = sys.modules.get(name)
        if hasattr(config, "get_config_copy"):
            found.append((functools.partial(_options, config), functools.partial(_configure, config)))
    return found


def _switches(*, of_thread: bool) -> dict[str, Any]:
    own = ("autocast", "default device")
    return {name: value for name, value in read_state().items() if name.startswith(own) is of_thread}


def _options(config: Any) -> dict[str, Any]:
    """Every setting of a module of PyTorch's settings; what cannot be compared by its copy is the object itself."""
    return {
        name: value if _is_plain(value) else getattr(config, name) for name, value in config.get_config_copy().items()
    }


def _configure(config: Any, before: dict[str, Any]) -> None:
    now = _options(config)
    for name, value in before.items():
        if name in now and now[name] != value:
            with suppress(*_REFUSED):
                setattr(config, name, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype))


def _of_process() -> list[Setting]:
    backends: Any = torch.backends
    owners: dict[Any, tuple[str, ...]] = {
        backends.cudnn: ("enabled", "benchmark", "benchmark_limit", "deterministic"),
        backends.mkldnn: ("enabled", "deterministic"),
        backends.opt_einsum: ("enabled", "strategy"),
        torch.utils.deterministic: ("fill_uninitialized_memory",),
    }
    found: list[Setting] = [
        (functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))
        for owner, names in owners.items()
        for name in names
        if hasattr(owner, name)
    ]
    found += [
        (getattr(backends.cuda, f"{kind}_sdp_enabled"), getattr(backends.cuda, f"enable_{kind}_sdp"))
        for kind in ("flash", "mem_efficient", "math", "cudnn")
        if hasattr(backends.cuda, f"enable_{kind}_sdp")
    ]
    return [
        *found,
        (functools.partial(_switches, of_thread=False), restore_state),
        (_anomaly, lambda before: torch.autograd.set_detect_anomaly(*before)),
        (torch.is_warn_always_enabled, torch.set_warn_always),
        (torch.get_num_threads, torch.set_num_threads),
        (lambda: dict(vars(torch._tensor_str.PRINT_OPTS)), vars(torch._tensor_str.PRINT_OPTS).update),
        (lambda: logging.root.manager.disable, logging.disable),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (os.getcwd, os.chdir),
    ]


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def random_back() -> Undo:
    """What restores the generators that PyTorch, numpy and Python draw from by default."""
    numpy = sys.modules.get("numpy")
    ours, pythons = torch.get_rng_state(), random.getstate()
    theirs = None if numpy is None else numpy.random.get_state()
    devices = torch.cuda.get_rng_state_all() if _initialized() else []

    def back() -> None:
        torch.set_rng_state(ours)
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(theirs)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return back


def _initialized() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def switches_back() -> Undo:
    """What restores PyTorch's switches of autocast and of precision, of this process and thread."""
    (undo,) = _saved([(read_state, restore_state)])

    def back() -> None:
        _run([undo])

    return back


def _levels_back() -> Undo:
    """Of loggers that had a level: importing a library sets its own, PyTorch's compiler among them."""
    loggers = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    before = [(one, one.level, one.disabled) for one in (logging.root, *loggers) if one.level != logging.NOTSET]

    def back() -> None:
        for logger, level, disabled in before:
            if logger.level != level:
                logger.setLevel(level)
            logger.disabled = disabled

    return back


def _environment_back() -> Undo:
    before = dict(os.environ)

    def back() -> None:
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return back
