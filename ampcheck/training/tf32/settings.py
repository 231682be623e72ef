"""Settings that change the precision of float32, and the measured error of float32 products on a device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.catalog.training import TF32
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table
from ampcheck.facts.norms import distance
from ampcheck.torchtools.global_state import KERNELS, PRECISION, flags_at

UNIT = format_of("float32").unit_roundoff

_REFUSED = "set through fp32_precision"

_FLAGS = (*PRECISION, "backends.cudnn.fp32_precision", "backends.mkldnn.fp32_precision", *KERNELS)

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


@dataclass(frozen=True, slots=True)
class ProductError:
    """The relative error, in the Euclidean norm, of one float32 product compared with float64.

    name: `matmul`, `convolution` or `gradient of a linear layer`. terms: how many products each element sums.
    error: in unit roundoffs of float32 (2^-24).
    """

    name: str
    terms: int
    error: float

    @property
    def kind(self) -> str:
        """`matmul` or `convolution`."""
        return self.name if self.name in _CUDA else "matmul"


@dataclass(frozen=True, slots=True)
class ConfounderStats:
    """Settings outside the model that change the precision of float32, and the errors that were measured under them.

    flags: by their names in PyTorch. flushes: whether this thread flushes subnormals to zero on the CPU.
    """

    subject: str
    device: str
    flags: Mapping[str, Scalar]
    products: tuple[ProductError, ...]
    flushes: bool = False
    unmeasured: str = ""


def measure_confounders(device: str | torch.device = "cpu") -> ConfounderStats:
    """Read the flags, and measure a matmul, a convolution and a linear layer's gradient in float32 on `device`.

    Takes milliseconds; changes no setting and draws nothing from the generators of the program.
    """
    where = torch.device(device)
    flags = _flags()
    flushes = bool(torch.full((1,), format_of("float32").smallest_subnormal * 4).mul(0.5).eq(0).item())
    products: tuple[ProductError, ...] = ()
    reason = ""
    try:
        with torch.inference_mode(False), torch.autocast(where.type, enabled=False):
            products = _products(where)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
    return ConfounderStats("float32 on this machine", str(where), flags, products, flushes, unmeasured=reason)


def _flags() -> dict[str, Scalar]:
    known: dict[str, Scalar] = {name: _read(read) for name, (read, _) in flags_at(_FLAGS).items()}
    known["float32_matmul_precision"] = _read(torch.get_float32_matmul_precision)
    known["use_deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    return {name: value for name, value in known.items() if value is not None}


def _read(read: Callable[[], Any]) -> Scalar:
    """A flag; PyTorch refuses to read the old ones once a program has set their successors, and the other way round."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old names are deprecated
            value = read()
    except RuntimeError:
        return _REFUSED
    return value if isinstance(value, (bool, str, int)) or value is None else str(value)


def _products(device: torch.device) -> tuple[ProductError, ...]:
    functional = torch.nn.functional
    a, b = _normal(256, 256, seed=1), _normal(256, 256, seed=2)
    matmul = relative_error(a.to(device) @ b.to(device), a.double() @ b.double())
    x, weight = _normal(2, 32, 16, 16, seed=3), _normal(64, 32, 3, 3, seed=4)
    exact = functional.conv2d(x.double(), weight.double())
    convolution = relative_error(functional.conv2d(x.to(device), weight.to(device)), exact)
    x, weight, grad = _normal(256, 128, seed=5), _normal(192, 128, seed=6), _normal(256, 192, seed=7)
    with torch.enable_grad():
        parameter = weight.to(device, copy=True).requires_grad_()
        (gradient,) = torch.autograd.grad(functional.linear(x.to(device), parameter), parameter, grad.to(device))
    return (
        ProductError("matmul", 256, matmul),
        ProductError("convolution", 32 * 9, convolution),
        ProductError("gradient of a linear layer", 256, relative_error(gradient, grad.double().T @ x.double())),
    )


def _normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """`|value - exact| / |exact|` in the Euclidean norm, in unit roundoffs of float32; infinite where not finite."""
    error = distance(value, exact)
    return error / UNIT if math.isfinite(error) else math.inf


def allowed_error(terms: int, limits: Limits) -> float:
    """The error that float32 explains of a product that sums `terms`, in its unit roundoffs.

    Roundings of random sign grow with the square root of their number (Higham, Accuracy and Stability, section 2.8);
    a fast algorithm (Winograd's) has a few times that. TF32 is some 4,000 away, bfloat16 30,000.
    """
    return 2 * limits.precision * math.sqrt(max(terms, 1))


def check_tf32(stats: ConfounderStats, limits: Limits) -> list[Finding]:
    """Whether products in float32 have the error of float32. The finding names the flag to change."""
    if not stats.products:
        return [TF32.skip(stats.subject, f"the error of float32 could not be measured: {stats.unmeasured}")]
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
        findings.append(TF32.warn(stats.subject, message, observed=product.error, limit=limit, hint=hint))
    if findings:
        return findings
    errors = ", ".join(f"{product.name} {product.error * UNIT:.2g}" for product in stats.products)
    worst = max(stats.products, key=lambda product: product.error / allowed_error(product.terms, limits))
    text = f"products in float32 on {stats.device} are float32 by their measured errors ({errors}){_on_ampere(stats)}"
    limit = allowed_error(worst.terms, limits)
    seen = len(stats.products)
    return [TF32.passed(stats.subject, text, seen, observed=worst.error, limit=limit)]


def _like(error: float) -> str:
    """The format whose usual error is nearest, by its power."""
    return f"as of {min(_FORMATS, key=lambda name: abs(math.log2(max(error, 1e-9) * UNIT / _FORMATS[name])))}"


def _flag_values(stats: ConfounderStats, kind: str, on_cuda: bool) -> str:
    names = (_CUDA if on_cuda else _CPU)[kind]
    known = {name: stats.flags.get(name) for name in names}
    flags = [f"torch.{name} is {value!r}" for name, value in known.items() if value not in (None, _REFUSED)]
    if kind == "matmul":
        flags.append(f"float32_matmul_precision is {stats.flags.get('float32_matmul_precision')!r}")
    return f"; {', '.join(flags)}" if flags else ""


def _on_ampere(stats: ConfounderStats) -> str:
    """The effect of the flags on an NVIDIA GPU (Ampere and later), where this is none or an older one."""
    lowered = []
    for kind, names in _CUDA.items():
        # The first flag that is set decides; `none` leaves it to the setting for all backends.
        values = (stats.flags.get(name) for name in (*names, "backends.fp32_precision"))
        if next((value for value in values if value not in (None, _REFUSED, "none")), None) in ("tf32", True):
            lowered.append(f"a {kind}")
    if not lowered:
        return ""
    return f"; by the flags as they are, {' and '.join(lowered)} in float32 would run in TF32 on an Ampere GPU or later"


def confounders_table(stats: ConfounderStats) -> Table:
    """Flags and measurements, one a row."""
    rows: list[tuple[Scalar, ...]] = list(stats.flags.items())
    rows.append(("subnormals flushed to zero on the CPU (this thread)", stats.flushes))
    rows += [(f"error of float32, {product.name}", product.error * UNIT) for product in stats.products]
    note = "errors are relative, against float64; float32 rounds to 6.0e-08, TF32 to 4.9e-04"
    return Table(f"What float32 means here: {stats.device}", ("setting", "value"), rows, str(TF32), note)
