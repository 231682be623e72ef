"""Requires: A product in float32 is off by no more than its roundings. Warns when the device computes it in TF32 or
bfloat16; fails when the program multiplies float32 tensors whose last mantissa bits it has cut off itself.

Measured: A matmul, a convolution and a linear layer's gradient are computed in float32 on the device and compared with
float64: the relative error in the Euclidean norm may be 2 * precision * sqrt(terms) unit roundoffs of float32. The
flags (allow_tf32, fp32_precision, float32_matmul_precision, reduced-precision reductions, deterministic algorithms) are
listed; their effect on another device is reported. In a function, float32 tensors are followed through integer views of
their bits.

Causes: PyTorch sets torch.backends.cudnn.allow_tf32 by default; torch.set_float32_matmul_precision('high') or 'medium'
in the program or a library; an emulation of TF32 by bit tricks that was left in.

Fix: Set torch.set_float32_matmul_precision('highest') and torch.backends.cudnn.allow_tf32 = False for a baseline;
torch.backends.cudnn.conv.fp32_precision = 'ieee' in newer versions.
"""

from __future__ import annotations

import math

from ampcheck.core.check import LISTED, Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.records.tf32 import REFUSED, UNIT, ConfounderStats, OperandStats, allowed_error

CHECK = Check(
    "tf32",
    "training",
    __doc__,
    unit="unit roundoffs of float32",
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("ConfounderStats", "OperandStats"),
    order=608,
    evidence=("tests/corpus/training/gram_matrix_in_tf32",),
)

_CUDA = {
    "matmul": ("backends.cuda.matmul.fp32_precision", "backends.cuda.matmul.allow_tf32"),
    "convolution": (
        "backends.cudnn.conv.fp32_precision",
        "backends.cudnn.fp32_precision",
        "backends.cudnn.allow_tf32",
    ),
}
"""The flags of a product on CUDA, the newer interface first."""

_CPU = {
    "matmul": ("backends.mkldnn.matmul.fp32_precision",),
    "convolution": ("backends.mkldnn.conv.fp32_precision",),
}

_HINTS = {
    (True, "convolution"): (
        "torch.backends.cudnn.allow_tf32 = False, or torch.backends.cudnn.conv.fp32_precision = 'ieee' (2.9)"
    ),
    (True, "matmul"): "torch.set_float32_matmul_precision('highest') (torch.backends.cuda.matmul.allow_tf32 = False)",
    (False, "convolution"): "torch.backends.mkldnn.conv.fp32_precision = 'ieee'",
    (False, "matmul"): "torch.set_float32_matmul_precision('highest')",
}
"""By whether the device is CUDA, and the kind of product."""

_FORMATS = {"TF32 or float16": 2.0**-11, "bfloat16": 2.0**-8, "three products of bfloat16": 2.0**-17}
"""The usual error of a product whose operands are rounded to a format."""

_WIDEST = 16
"""bfloat16 has lost these; a value with fewer bits was quantised on purpose: a warning."""


def check(stats: ConfounderStats | OperandStats, limits: Limits) -> list[Finding]:
    """Products in float32 have the error of float32, and operands that are float32."""
    return _of_machine(stats, limits) if isinstance(stats, ConfounderStats) else _of_operands(stats, limits)


def _of_machine(stats: ConfounderStats, limits: Limits) -> list[Finding]:
    """Products on this machine; the finding names the flag to change."""
    if not stats.products:
        return [CHECK.skip(stats.subject, f"the error of float32 could not be measured: {stats.unmeasured}")]
    findings = []
    on_cuda = stats.device.startswith("cuda")
    for product in stats.products:
        limit = allowed_error(product.terms, limits)
        if product.error <= limit:
            continue
        message = (
            f"a product in float32 on {stats.device} must be off by no more than its roundings, {limit * UNIT:.2g} of "
            f"its norm; the {product.name} is off by {product.error * UNIT:.2g}, {product.error:,.0f} unit roundoffs "
            f"({_like(product.error)}){_flag_values(stats, product.kind, on_cuda)}"
        )
        hint = _HINTS[on_cuda, product.kind]
        findings.append(CHECK.warn(stats.subject, message, observed=product.error, limit=limit, hint=hint))
    if findings:
        return findings
    errors = ", ".join(f"{product.name} {product.error * UNIT:.2g}" for product in stats.products)
    worst = max(stats.products, key=lambda product: product.error / allowed_error(product.terms, limits))
    text = f"products in float32 on {stats.device} are float32 by their measured errors ({errors}){_on_ampere(stats)}"
    limit = allowed_error(worst.terms, limits)
    seen = len(stats.products)
    return [CHECK.passed(stats.subject, text, seen, observed=worst.error, limit=limit)]


def _like(error: float) -> str:
    """The format whose usual error is nearest, by its power."""
    return f"as of {min(_FORMATS, key=lambda name: abs(math.log2(max(error, 1e-9) * UNIT / _FORMATS[name])))}"


def _flag_values(stats: ConfounderStats, kind: str, on_cuda: bool) -> str:
    names = (_CUDA if on_cuda else _CPU)[kind]
    known = {name: stats.flags.get(name) for name in names}
    flags = [f"torch.{name} is {value!r}" for name, value in known.items() if value not in (None, REFUSED)]
    if kind == "matmul":
        flags.append(f"float32_matmul_precision is {stats.flags.get('float32_matmul_precision')!r}")
    return f"; {', '.join(flags)}" if flags else ""


def _on_ampere(stats: ConfounderStats) -> str:
    """The effect of the flags on an NVIDIA GPU (Ampere and later), where this is none or an older one."""
    lowered = []
    for kind, names in _CUDA.items():
        # The first flag that is set decides; `none` leaves it to the setting for all backends.
        values = (stats.flags.get(name) for name in (*names, "backends.fp32_precision"))
        if next((value for value in values if value not in (None, REFUSED, "none")), None) in ("tf32", True):
            lowered.append(f"a {kind}")
    if not lowered:
        return ""
    return f"; by the flags as they are, {' and '.join(lowered)} in float32 would run in TF32 on an Ampere GPU or later"


def _of_operands(stats: OperandStats, limits: Limits) -> list[Finding]:
    findings = []
    for product in stats.reduced:
        limit = allowed_error(product.terms, limits)
        if product.error is not None and product.error <= limit:
            continue
        message = (
            f"a product in float32 must be given float32 operands; {product.where.op.removeprefix('aten::')} was "
            f"given, {product.calls:,}x, float32 in name only: the last {product.bits} of 23 mantissa bits were cut off"
        )
        if product.error is not None:
            far, explained = product.error * UNIT, limit * UNIT
            message += f"; it is off by {far:.2g} of its norm against float64, where float32 explains {explained:.2g}"
        hint = "multiply the float32 tensors themselves, or cast to float16 or bfloat16, so that the dtype says it"
        build = CHECK.fail if product.bits <= _WIDEST else CHECK.warn
        findings.append(
            build(stats.subject, message, where=product.where, observed=product.error, limit=limit, hint=hint)
        )
    if findings:
        return sorted(findings, key=lambda finding: -(finding.observed or 0.0))[:LISTED]
    if stats.raised:
        return [CHECK.skip(stats.subject, f"the function did not come to its end: {stats.raised}")]
    if not stats.products:
        return [CHECK.skip(stats.subject, "nothing was multiplied in float32 outside compiled code")]
    text = f"none of {stats.products:,} float32 products had operands that lost bits on the way"
    return [CHECK.passed(stats.subject, text, stats.products)]
