"""Settings that change the precision of float32, and the measured error of float32 products on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ampcheck.core.environment import quiet
from ampcheck.core.formats import format_of
from ampcheck.core.run import Scalar, Table
from ampcheck.facts.norms import distance
from ampcheck.records.tf32 import REFUSED, UNIT, ConfounderStats, ProductError
from ampcheck.torchtools.global_state import KERNELS, PRECISION, flags_at

_FLAGS = (*PRECISION, "backends.cudnn.fp32_precision", "backends.mkldnn.fp32_precision", *KERNELS)


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
        with quiet():  # the old names are deprecated
            value = read()
    except RuntimeError:
        return REFUSED
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


def confounders_table(stats: ConfounderStats) -> Table:
    """Flags and measurements, one a row."""
    rows: list[tuple[Scalar, ...]] = list(stats.flags.items())
    rows.append(("subnormals flushed to zero on the CPU (this thread)", stats.flushes))
    rows += [(f"error of float32, {product.name}", product.error * UNIT) for product in stats.products]
    note = "errors are relative, against float64; float32 rounds to 6.0e-08, TF32 to 4.9e-04"
    return Table(f"What float32 means here: {stats.device}", ("setting", "value"), rows, "tf32", note)
