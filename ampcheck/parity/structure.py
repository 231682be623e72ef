"""Compares what two executions return, write and get: other objects, results or shapes are no rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampcheck.facts.memory import roundoff
from ampcheck.parity.execution import Execution, str_of
from ampcheck.parity.functions import is_mask
from ampcheck.parity.relations import common_keys, in_order, is_of_other_argument
from ampcheck.records.parity import ANOTHER, INPUTS, NUMBERS, RECORDED, STRUCTURE, Parity
from ampcheck.records.results import Key
from ampcheck.shadow.compare import Result

_ROUNDINGS = 2.0
"""Distance of two roundings of one number, at most, in roundings of the coarser format."""


def other_structure(runs: Sequence[Execution]) -> Parity | None:
    """Two functions by what they return: other objects, other results, other shapes."""
    a, b = runs
    for path in sorted(a.plain.keys() | b.plain.keys()):
        first, second = (repr(run.plain[path]) if path in run.plain else "missing" for run in runs)
        if first != second and not are_numbers(a.plain.get(path), b.plain.get(path)):
            text = f"output {path}".rstrip()
            return _other(f"{text} is {first[:80]} in a and {second[:80]} in b", text)
    for key in in_order(a.results.keys() ^ b.results.keys()):
        has, lacks = (a, b) if key in a.results else (b, a)
        if not _may_be_absent(key, has.results[key], lacks):
            return _other(f"only {has.side.name} gives {str_of(key)}", str_of(key))
    for key in common_keys(runs):
        shapes = [list(run.results[key].value.shape) for run in runs]
        if shapes[0] != shapes[1]:
            return _other(f"{str_of(key)} is of shape {shapes[0]} in a and {shapes[1]} in b", str_of(key))
    return None


def _other(message: str, key: str) -> Parity:
    return Parity(ANOTHER, message, key=key, unplaced=STRUCTURE)


def _may_be_absent(key: Key, result: Result, run: Execution) -> bool:
    """Return whether a run may lack a result: its arguments, parameters and buffers have other names, masks and kernels
    no backward."""
    if key[0] == "module" or is_of_other_argument(key, run):
        return True
    if key[0] == "gradient":
        own = key[1].startswith("parameter ") and key[1] not in run.names
        argument = run.arguments.get(key[1].removeprefix("argument "))
        mask = argument is not None and is_mask(argument)
        return bool(run.opaque) or own or mask or not bool(result.value.any())
    return key[0] == "buffer" and str_of(key) not in run.names


def are_numbers(a: Any, b: Any) -> bool:
    """Return whether both are numbers of one type."""
    return type(a) is type(b) and isinstance(a, (bool, int, float))


def other_inputs(runs: Sequence[Execution]) -> list[str]:
    """The arguments that have one name on both sides, and other values than roundings of the same numbers."""
    a, b = (run.arguments for run in runs)
    return [f"argument {path}" for path in a if path in b and not _are_alike(a[path], b[path])]


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    first, second = (tensor.cpu().to(wide) for tensor in (a, b))
    if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in (a, b)):
        return torch.equal(first, second)
    coarser = max(a.dtype, b.dtype, key=roundoff)
    return torch.allclose(first, second, _ROUNDINGS * roundoff(coarser), torch.finfo(coarser).tiny, equal_nan=True)


def unplaced(parity: Parity, runs: Sequence[Execution], *, recorded: bool, inputs: bool) -> str:
    """Why a comparison names no op; "" where it does, and where each value on the way is one that both have."""
    if parity.outcome != ANOTHER or parity.at != (None, None):
        return ""
    if inputs:
        return INPUTS
    if parity.unplaced:
        return parity.unplaced
    keys = [key for key in common_keys(runs) if str_of(key) == parity.key]
    if any(run.results[key].reference is None for key in keys for run in runs) or not keys:
        return NUMBERS
    return RECORDED if recorded else ""
