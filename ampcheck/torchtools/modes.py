"""Dispatch modes that Dynamo leaves alone, and autocast below them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.torchtools.interception import leave_out, set_eval_frame
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.private import (
    DispatchKey,
    DispatchKeySet,
    HigherOrderOperator,
    current_mode,
    excluded_keys,
    forcing_keys,
    included_keys,
    state_of_caller,
    without_modes,
)

AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
"""The dispatch keys of autocast."""

_KNOWN = hasattr(eval_frame, "set_code_exec_strategy")
"""True if this PyTorch can skip a code object and all that it calls (2.7)."""

_CALLED = hasattr(TorchDispatchMode, "supports_higher_order_operators")
"""True if higher-order ops call modes (2.9); before, they raise under a mode that they do not know."""

_ASKED = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""True if Dynamo asks modes for `ignore_compile_internals` (2.9); before, for `is_infra_mode`."""


class _Flags:
    """The flags of the process by which Dynamo sees that a mode is on.

    Each mode sets them back to what it found. Where modes of two threads end in the order in which they began, they
    stay set, and nothing is compiled any more: the last mode that ends sets them to what the first one found.
    """

    def __init__(self) -> None:
        self._lock, self._modes, self._found = threading.Lock(), 0, dict[str, Any]()

    def keep(self) -> None:
        """Note that a mode begins."""
        with self._lock:
            if not self._modes:
                self._found = {n: v for n, v in vars(_python_dispatch).items() if n.startswith("_is_in_")}
            self._modes += 1

    def restore(self) -> None:
        """Note that a mode has ended."""
        with self._lock:
            self._modes -= 1
            if not self._modes:
                vars(_python_dispatch).update(self._found)


_flags = _Flags()


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that sees higher-order ops as well, and that Dynamo never compiles, nor what it calls.

    Where PyTorch knows `_should_skip_dynamo`, it wraps `__torch_dispatch__` for that. The wrapper imports Dynamo, which
    takes a second, and sets the callback of Dynamo at each op; the strategy of a code object is set once.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> DispatchMode:
        _flags.keep()
        self._supported = _as_in_newer_releases(self)
        self._supported.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._supported.__exit__(None, None, None)
        _flags.restore()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether Dynamo compiles under this mode as usual; it skips code otherwise."""
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """The name of `ignore_compile_internals` before 2.9."""
        return not _ASKED and cls.ignore_compile_internals()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not _KNOWN

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" not in vars(cls):
            return
        if _KNOWN:
            skip = eval_frame._FrameAction.SKIP
            strategy = eval_frame._FrameExecStrategy(skip, skip)  # of the frame, and of all that it calls
            eval_frame.set_code_exec_strategy(cls.__torch_dispatch__.__code__, strategy)
        else:
            cls.__torch_dispatch__ = _uncompiled(cls.__torch_dispatch__)  # type: ignore[method-assign]


def _uncompiled(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """The same, while Dynamo leaves alone what it calls (2.6)."""

    @functools.wraps(dispatch)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        try:
            return dispatch(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    leave_out(run.__code__)  # type: ignore[attr-defined]
    return run


@contextmanager
def _as_in_newer_releases(mode: DispatchMode) -> Iterator[None]:
    """Do for a mode what newer releases do themselves."""
    with ExitStack() as stack:
        if not _KNOWN and not mode.ignore_compile_internals():  # Dynamo would skip what it meets under a mode for good
            stack.enter_context(in_eager_mode())
        if not _CALLED:
            stack.enter_context(replaced(HigherOrderOperator, "dispatch", _calling_modes))
        yield


def _calling_modes(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Let a higher-order op call the mode that is on, if it is one of ampcheck."""

    def call(op: HigherOrderOperator, key: DispatchKey, /, *args: Any, **kwargs: Any) -> Any:
        mode = current_mode() if key == DispatchKey.Python else None
        if not isinstance(mode, DispatchMode):
            return dispatch(op, key, *args, **kwargs)
        with _python_dispatch._pop_mode_temporarily():
            return mode.__torch_dispatch__(op, (), args, kwargs)  # type: ignore[no-untyped-call]

    return call


@contextmanager
def in_this_thread(mode: DispatchMode) -> Iterator[None]:
    """Enter a mode in this thread, to which the stack of modes belongs.

    `__enter__` also sets flags of the process, which a thread that outlives the block would set back wrongly.
    """
    _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        _python_dispatch._pop_mode()


@contextmanager
def aside() -> Iterator[None]:
    """Compute outside of any mode, with tensors that code outside of inference mode may write, without gradients."""
    with without_modes(), torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def autocast_of_caller() -> Iterator[None]:
    """Let autocast act on the ops that an op calls, as it does in a run without a mode: a mode runs below autocast."""
    with state_of_caller():
        entered = excluded_keys()
    with forcing_keys(included_keys(), excluded_keys() - (AUTOCAST - entered)):
        yield
