"""Dispatch modes that Dynamo leaves alone."""

from __future__ import annotations

from typing import Any

from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

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
