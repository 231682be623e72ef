"""The expectations of an experiment, and helpers that several experiments share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.core.check import Check, Evidence
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Band, Finding

if TYPE_CHECKING:
    from typing_extensions import Unpack

ARITHMETIC = ("float32", "bfloat16", "float16")
"""Formats in which PyTorch computes everywhere, widest first."""


class Expectations:
    """Collects the findings of an experiment: what was expected, what was observed, and what was not measured."""

    def __init__(self, check: Check, device: str) -> None:
        self.findings: list[Finding] = []
        self._check, self._device = check, device

    def expect(
        self, expected: str, outcome: str, holds: bool, *, seen: int, warns: bool = False, **evidence: Unpack[Evidence]
    ) -> Finding:
        """Record one expectation and return its finding.

        seen: number of compared values, modules or updates. warns: a violation warns instead of failing, for what
        follows from experience and not from the format.
        """
        message = f"expected: {expected}; observed: {outcome}"
        if holds:
            finding = self._check.passed(self._device, message, seen, **evidence)
        else:
            finding = (self._check.warn if warns else self._check.fail)(self._device, message, **evidence)
        self.findings.append(finding)
        return finding

    def skip(self, reason: str) -> None:
        """Record what was not measured."""
        self.findings.append(self._check.skip(self._device, reason))


def dtype_of(name: str) -> torch.dtype | None:
    """The torch dtype of a format; None where this PyTorch has none, or packs several codes into a byte."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def lacks(name: str, device: str) -> str:
    """Why a device cannot compute in a format; "" where it can."""
    dtype = dtype_of(name)
    if dtype is None:
        return f"this PyTorch has no dtype {name}"
    try:
        torch.ones(2, dtype=dtype, device=device).mul(2).add(1).cpu()
    except Exception as error:  # noqa: BLE001  # each backend has an exception of its own
        return f"{device} does not compute in {name}: {brief(error)}"
    return ""


def missing(error: Exception) -> bool:
    """Whether this machine lacks what it takes (a C++ compiler, Triton, a 16-bit kernel of the CPU): a reason to skip.

    Everything else that raises is a failure: a graph break under `fullgraph` and a dtype error are what is looked for.
    """
    return bool(lacking(error, kernels=True))


def synchronize(device: str) -> None:
    """Wait until an accelerator has done what it was given; a CPU has."""
    place = torch.device(device)
    if place.type != "cpu":
        backend: Any = getattr(torch, place.type)
        backend.synchronize(*(() if place.index is None or place.type == "mps" else (place,)))


def bands_of(*names: str) -> tuple[Band, ...]:
    """The subnormal and the normal range of formats, as powers of two, for a chart."""
    bands: list[Band] = []
    for name in names:
        form = format_of(name)
        small, normal, top = (math.log2(v) for v in (form.smallest_subnormal, form.smallest_normal, form.max))
        bands += [Band(f"{name} subnormal", small, normal), Band(f"{name} normal", normal, top)]
    return tuple(bands)


def power(value: float) -> str:
    """A power of two as `2^-25`, anything else as a number."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:.6g}"
