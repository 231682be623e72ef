"""Dispatch modes that Dynamo leaves alone, and autocast below them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
"""The dispatch keys of autocast."""

_KNOWN = hasattr(eval_frame, "set_code_exec_strategy")
"""Whether this PyTorch can skip a code object."""


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that sees higher-order ops as well, and that Dynamo never compiles, nor what it calls.

    Where PyTorch knows `_should_skip_dynamo`, it wraps `__torch_dispatch__` for that. The wrapper imports Dynamo, which
    takes a second, and sets the callback of Dynamo at each op; the strategy of a code object is set once.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not _KNOWN

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if _KNOWN and "__torch_dispatch__" in vars(cls):
            skip = eval_frame._FrameAction.SKIP
            strategy = eval_frame._FrameExecStrategy(skip, skip)  # of the frame, and of all that it calls
            eval_frame.set_code_exec_strategy(cls.__torch_dispatch__.__code__, strategy)


@contextmanager
def autocast_of_caller() -> Iterator[None]:
    """Let autocast act on the ops that an op calls, as it does in a run without a mode: a mode runs below autocast."""
    excluded_by = torch._C._dispatch_tls_local_exclude_set
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        entered = excluded_by()
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded_by() - (AUTOCAST - entered)):
        yield
