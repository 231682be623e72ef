"""The expectations of an experiment, and helpers that several experiments share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from ampcheck.core.check import Evidence
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Band, Chart, Coverage, Finding, Run, Table, Verdict
from ampcheck.lab.registry import experiments_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")

ARITHMETIC = ("float32", "bfloat16", "float16")
"""Formats in which PyTorch computes everywhere, widest first."""


class Expectations:
    """Collects the findings of an experiment: expectations with their outcome, and the reasons of what was skipped."""

    def __init__(self, experiment: str, device: str) -> None:
        self.findings: list[Finding] = []
        self._check, self._device = experiments_of([experiment])[0].check, device

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

    def at_most(
        self, expected: str, observed: float, limit: float, *, seen: int, warns: bool = False, hint: str = ""
    ) -> None:
        """Record the expectation that `observed` is at most `limit`."""
        outcome, holds = f"{observed:.2g}", observed <= limit
        self.expect(expected, outcome, holds, seen=seen, warns=warns, observed=observed, limit=limit, hint=hint)

    def skip(self, *reasons: str) -> None:
        """Record what was not measured."""
        self.findings += [self._check.skip(self._device, reason) for reason in reasons]

    def adopt(self, findings: Iterable[Finding], *, warns: bool = False) -> None:
        """Add the findings of another check as the experiment's own. warns: failures become warnings without a hint."""
        for finding in findings:
            own = replace(finding, check=self._check.slug, subject=self._device)
            if warns:
                verdict = Verdict.WARN if own.verdict is Verdict.FAIL else own.verdict
                own = replace(own, verdict=verdict, hint="")
            self.findings.append(own)


def run_of(
    findings: Sequence[Finding],
    seen: Mapping[str, int],
    *,
    tables: Iterable[Table] = (),
    charts: Iterable[Chart] = (),
    unseen: Iterable[str] = (),
) -> Run:
    """The run of an experiment. unseen: why something was not measured, besides the reasons of skips."""
    skipped = (finding.message for finding in findings if finding.verdict is Verdict.SKIP)
    coverage = Coverage(seen, dict.fromkeys((*skipped, *unseen), 1))
    return Run(findings=tuple(findings), coverage=coverage, tables=tuple(tables), charts=tuple(charts))


def lacks(name: str, device: str) -> str:
    """Why a device cannot compute in a format; "" where it can."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        return f"this PyTorch has no dtype {name}"
    try:
        torch.ones(2, dtype=dtype, device=device).mul(2).add(1).cpu()
    except Exception as error:  # noqa: BLE001  # each backend has an exception of its own
        return f"{device} does not compute in {name}: {brief(error)}"
    return ""


def usable(names: Iterable[str], device: str) -> tuple[dict[str, torch.dtype], dict[str, str]]:
    """The dtypes of the formats in which a device computes, and why it does not compute in the others."""
    reasons = {name: lacks(name, device) for name in names}
    dtypes: dict[str, torch.dtype] = {name: getattr(torch, name) for name, reason in reasons.items() if not reason}
    return dtypes, {name: reason for name, reason in reasons.items() if reason}


def timed(call: Callable[[], T], device: str) -> tuple[float, T]:
    """The seconds of one call, including its kernels on an accelerator, and its result."""

    def wait() -> None:
        torch.zeros((), device=device).item()  # a copy to the host waits for all kernels before it

    wait()
    begin = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - begin, result


def bands_of(name: str) -> tuple[Band, ...]:
    """The subnormal and the normal range of a format, as powers of two, for a chart."""
    form = format_of(name)
    least, normal, top = (math.log2(value) for value in (form.smallest_subnormal, form.smallest_normal, form.max))
    return Band(f"{name} subnormal", least, normal), Band(f"{name} normal", normal, top)


def power(value: float) -> str:
    """A power of two as `2^-25`, anything else as a number."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:.6g}"
