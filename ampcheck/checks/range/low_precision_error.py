"""Requires: A model that runs in float32 must also run in low precision. Fails when only the low-precision run raises
an exception.

Measured: If the low-precision run raises, the subject runs again in float32 and under autocast to the other 16-bit
dtype; the exception is reported with its op, module and line, or the cast that lets the model run under one dtype
alone. A subject that raises in all of them is not judged; where its forward refuses gradients, its values are.

Causes: Operands with different dtypes (a float32 table and a bfloat16 tensor), a constant such as -1e9 beyond the range
of float16, in-place and out= variants that autocast does not cast, a missing kernel.

Fix: Cast the operands to one dtype (.to(x.dtype)), take mask values from torch.finfo(x.dtype).min or use a boolean
mask, use the out-of-place variant of the op.
"""

from __future__ import annotations

from ampcheck.checks.property import failures
from ampcheck.checks.range import (
    Judges,
    passed,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import MODELS
from ampcheck.core.text import cannot_run
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.property import RAISES, Problem, PropertyStats

CHECK = Check(
    "low-precision-error",
    "range",
    __doc__,
    subjects=MODELS,
    needs=("NumericsStats", "PropertyStats"),
    order=100,
    evidence=("tests/corpus/cholesky_of_half", "tests/corpus/complex_rotary_bfloat16", "tests/corpus/fft_of_half"),
)

_REPORT = "this is a limit of ampcheck, please report it; judge the model without this part (a list of blocks)"


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Check that what runs in float32, or under autocast to another dtype, runs in low precision too."""
    if stats.raised is None:
        text = f"forward {'ran' if stats.no_backward else 'and backward ran'} to the end"
        return [passed(stats, CHECK, text, stats.coverage.total)]
    if stats.raised.ours:
        text = f"not judged: ampcheck cannot follow this run in float64, which runs without it: {stats.raised.message}"
        return [CHECK.incomplete(stats.name, text, where=stats.raised.where, hint=_REPORT)]
    if stats.raised.missing:
        text = f"not judged: {cannot_run(stats.raised.message)}"
        return [CHECK.skip(stats.name, text)]
    message = f"what runs {stats.raised.runs} must run in {stats.format}; {stats.raised.message}"
    hint = (
        "make the operands' dtypes meet with an explicit .to(), take constants from torch.finfo(x.dtype), and leave "
        "in-place and out= variants to tensors that autocast does not touch"
    )
    return [CHECK.fail(stats.name, message, where=stats.raised.where, hint=hint)]


def _of_search(stats: PropertyStats, limits: Limits) -> list[Finding]:
    return list(failures(stats, CHECK, _words))


def _words(problem: Problem) -> str:
    return "what runs in float32 must run in {format}; it raises {detail}" if problem.kind == RAISES else ""


_JUDGES: Judges = {NumericsStats: _of_run, PropertyStats: _of_search}


def check(stats: NumericsStats | PropertyStats, limits: Limits) -> list[Finding]:
    """Check that what runs in float32 runs in low precision too."""
    return _JUDGES[type(stats)](stats, limits)
