"""What a case of hand-written half precision is, and how data enter it.

`case` registers a function of one dtype. In float16 or bfloat16 it is the faulty code, in float32 the healthy twin, in
float64 the reference. Everything that stands for data (inputs, weights) passes through `enter`; integers and random
draws do not, since they are exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LOW = (torch.float16, torch.bfloat16)
FLOAT16 = (torch.float16,)
BFLOAT16 = (torch.bfloat16,)
KINDS = ("overflow", "flush", "silent-zero", "collision", "cancellation", "absorption", "drift", "decision")
MARK = "# lost here"


@dataclass(frozen=True)
class Case:
    """One mistake: `function(dtype)` makes it in each of `formats`, at one of `fault_lines` of `file`."""

    name: str
    family: str
    function: Callable[[torch.dtype], Any]
    fault_lines: tuple[int, ...]
    formats: tuple[torch.dtype, ...]
    kind: str
    note: str

    @property
    def fault_line(self) -> int:
        return self.fault_lines[0]

    @property
    def file(self) -> Path:
        return Path(inspect.getfile(self.function))


CASES: list[Case] = []
_arrivals: list[Callable[[Tensor], Tensor]] = []


def case(kind: str, formats: tuple[torch.dtype, ...], parts: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """Register the decorated function; `parts` are the classes and functions that it calls and that hold marks too."""
    assert kind in KINDS, kind

    def register(function: Callable[[torch.dtype], Any]) -> Callable[[torch.dtype], Any]:
        lines = tuple(line for part in (function, *parts) for line in _marked_lines(part))
        note = " ".join((function.__doc__ or "").split())
        family = function.__module__.rpartition(".")[2]
        CASES.append(Case(function.__name__, family, function, lines, formats, kind, note))
        return function

    return register


def enter(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floating data as the code receives them: in `dtype`, changed as the `arriving` context says."""
    for change in _arrivals:
        data = change(data)
    # Through NumPy, as from a data loader: whoever watches the run knows nothing of how the data were drawn.
    return torch.from_numpy(data.numpy().copy()).to(dtype)


def enter_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let the parameters of a module enter."""
    for parameter in module.parameters():
        parameter.data = enter(parameter.data, dtype)
    return module


@contextmanager
def arriving(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change all data that enter: round them (an island behind a low tensor) or move them (their conditioning)."""
    _arrivals.append(change)
    try:
        yield
    finally:
        _arrivals.pop()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what surrounds the sensitive part: float32, or float64 in the reference."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return autocast in a low format; the healthy twin and the reference switch it off."""
    return torch.autocast("cpu", dtype=dtype) if dtype in LOW else nullcontext()


def _marked_lines(part: Any) -> list[int]:
    lines, start = inspect.getsourcelines(part)
    return [start + offset for offset, line in enumerate(lines) if line.rstrip().endswith(MARK)]
