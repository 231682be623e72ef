"""Compiled code in float64: whether what the compiler made is the function that eager mode computes.

Results in 16 bits hide what is smaller than their bound: a factor of 1.003, another gelu, one wrong element. Compiled
again with parameters and arguments in float64, the same code must give what eager mode gives in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ampcheck.core.errors import brief
from ampcheck.facts.memory import roundoff
from ampcheck.parity.calls import Side, modules_of
from ampcheck.parity.execution import run_plainly
from ampcheck.parity.functions import ALIKE, ROUNDED, SAME, UNDETERMINED, relate
from ampcheck.records.results import Key
from ampcheck.shadow.compare import Result
from ampcheck.shadow.result import Reference
from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.torchtools.pytree import map_tensors


def compiled_apart(side: Side, results: Mapping[Key, Result]) -> tuple[dict[Key, str], str]:
    """By result, how compiled code in float64 is another function than eager mode; and why nothing was compared.

    results: of eager mode under a shadow. A result counts where eager mode in float64 gives its exact value: behind a
    decision near a tie, or a cast of the program's own to 16 bits, it is left out.
    """
    if side.function is None:
        return {}, "it is built anew in each run"
    wide = replace(side, args=_lifted(side.args), kwargs=_lifted(dict(side.kwargs)), dtype=None)
    try:
        with _in_float64(side):
            with in_eager_mode():
                eager = run_plainly(wide).values
            compiled = run_plainly(wide).values
    except Exception as error:  # noqa: BLE001  # the program, or its compiler, need not know float64
        return {}, brief(error)
    apart: dict[Key, str] = {}
    reason = "eager mode does not give its exact values in float64: a decision, or a cast of the program's own"
    for key, result in results.items():
        if result.reference is None or key not in eager or key not in compiled:
            continue
        expected, got = (_in_place_of(result, values[key]) for values in (eager, compiled))
        how = relate(result, expected, roundoff(torch.float32))
        if how not in (SAME, ALIKE, ROUNDED):
            continue
        reason = ""
        found = relate(expected, got, roundoff(torch.float32) if how == ROUNDED else 0.0)
        if found not in (SAME, ALIKE, ROUNDED, UNDETERMINED):
            apart[key] = found
    return apart, reason


def _in_place_of(result: Result, value: torch.Tensor) -> Result:
    """A result with other exact values, which data move as far."""
    assert result.reference is not None
    known, exact = result.reference, value.to(result.reference.exact.dtype)
    if exact.shape != known.exact.shape:
        return Result(value, Reference(exact, exact, known.unit))
    return Result(value, Reference(exact, known.moved.to(exact.dtype) - known.exact + exact, known.unit))


def _lifted(values: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values)


@contextmanager
def _in_float64(side: Side) -> Iterator[None]:
    """The modules that a side is, or closes over, in float64."""
    tensors = [t for module in modules_of(side.function) for t in (*module.parameters(), *module.buffers())]
    before = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
    try:
        for tensor, data in before:
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
