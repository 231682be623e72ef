"""CUDA graphs on the CPU: the ops of a capture are recorded below autograd and autocast, and run again on replay."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.stream.ops import OpEvent, OpSubscriber, leaves
from ampcheck.torchtools.storage import storage_number

_capturing: list[CUDAGraph] = []


def end_captures() -> None:
    """End the captures that code has begun and, since it raised, not ended."""
    for each in reversed(list(_capturing)):
        each.capture_end()


class CUDAGraph:
    """`torch.cuda.CUDAGraph`. Unlike CUDA's, ops of a capture also run while they are captured."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._recorder: _Recorder | None = None

    def capture_begin(self, *args: object, **kwargs: object) -> None:
        """Record from now on. Raises `RuntimeError` inside of a capture, as CUDA does."""
        if _capturing:
            raise RuntimeError("a capture of a CUDA graph cannot begin inside of another")
        self._recorder = _Recorder(self._calls)
        self._recorder.__enter__()
        _capturing.append(self)

    def capture_end(self) -> None:
        """End the record."""
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None
            _capturing.remove(self)

    def replay(self) -> None:
        """Run the ops again, with results written to the tensors of the capture."""
        with torch.no_grad():
            for op, args, kwargs, results in self._calls:
                again = op(*args, **kwargs)
                for old, new in zip(leaves(results), leaves(again), strict=True):
                    if old is not new and not _shares(old, new):
                        old.copy_(new)

    def reset(self) -> None:
        """Forget the ops."""
        self._calls.clear()

    def pool(self) -> tuple[int, int]:
        """The memory pool: there is one."""
        return (0, 0)


class graph:  # noqa: N801
    """`torch.cuda.graph`: the block whose ops a graph records."""

    def __init__(self, cuda_graph: CUDAGraph, *args: object, **kwargs: object) -> None:
        self.cuda_graph = cuda_graph

    def __enter__(self) -> None:
        self.cuda_graph.capture_begin()

    def __exit__(self, *exc: object) -> None:
        self.cuda_graph.capture_end()


class _Recorder(OpSubscriber):
    """Records ops with their arguments and results."""

    def __init__(self, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]) -> None:
        self._calls = calls

    def see(self, event: OpEvent) -> Any:
        """Record an op."""
        self._calls.append((event.op, event.args, event.kwargs, event.run()))
        return event.out


def _shares(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether an op returned the memory of the capture: it is a view, or has written it."""
    number = storage_number(old)
    return number is not None and number == storage_number(new)
