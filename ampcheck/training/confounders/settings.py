"""What makes a float32 baseline something else: flags, and the measured error of float32 products on the device."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table, Verdict, passed
from ampcheck.torchtools.global_state import deterministic

UNIT = format_of("float32").unit_roundoff

_REFUSED = "set through fp32_precision"

_FLAGS = (
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cudnn.allow_tf32",
    "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.mkldnn.enabled",
    "utils.deterministic.fill_uninitialized_memory",
)
"""Attributes below `torch`. Before 2.9 there is no `fp32_precision`; what a PyTorch lacks is left out."""

_PROGRAM = {
    "matmul": ("backends.cuda.matmul.fp32_precision", "backends.cuda.matmul.allow_tf32"),
    "convolution": (
        "backends.cudnn.conv.fp32_precision",
        "backends.cudnn.fp32_precision",
        "backends.cudnn.allow_tf32",
    ),
}
"""Which flags decide about a product on CUDA, the newer interface first."""


@dataclass(frozen=True, slots=True)
class ProductError:
    """The relative error, in the Euclidean norm, of one float32 product against float64.

    name: `matmul`, `convolution` or `gradient of a linear layer`. terms: how many products each element sums.
    error: in unit roundoffs of float32 (2^-24).
    """

    name: str
    terms: int
    error: float


@dataclass(frozen=True, slots=True)
class ConfounderStats:
    """Settings outside the model that change what float32 means, and what was measured under them.

    flags: by their names in PyTorch. flushes: whether this thread flushes subnormals to zero on the CPU.
    nondeterministic: ops without a deterministic kernel that a step called, with how often; None where not looked at.
    """

    subject: str
    device: str
    flags: Mapping[str, Scalar]
    products: tuple[ProductError, ...]
    flushes: bool = False
    nondeterministic: Mapping[str, int] | None = None
    unmeasured: str = ""


def measure_confounders(
    device: str | torch.device = "cpu", subject: str = "float32 on this machine"
) -> ConfounderStats:
    """Read the flags, and measure a matmul, a convolution and a linear layer's gradient in float32 on `device`.

    Takes milliseconds; changes no setting and draws nothing from the generators of the program.
    """
    place = torch.device(device)
    flags = _flags()
    flushes = bool(torch.full((1,), format_of("float32").smallest_subnormal * 4).mul(0.5).eq(0).item())
    try:
        with torch.inference_mode(False), torch.autocast(place.type, enabled=False):
            products = (_matmul(place), _convolution(place), _linear(place))
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        return ConfounderStats(subject, str(place), flags, (), flushes, unmeasured=reason)
    return ConfounderStats(subject, str(place), flags, products, flushes)


def _flags() -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for name in _FLAGS:
        value = _read(attrgetter(name))
        if value is not None:
            found[name] = value
    precision = _read(lambda _: torch.get_float32_matmul_precision())
    found["float32_matmul_precision"] = _REFUSED if precision is None else precision
    found["use_deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    return found


def _read(read: Callable[[Any], Any]) -> Scalar:
    """A flag; PyTorch refuses to read the old ones once a program has set their successors, and the other way round."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old names warn that they are old
            value = read(torch)
    except AttributeError:
        return None
    except RuntimeError:
        return _REFUSED
    return value if isinstance(value, (bool, str, int)) or value is None else str(value)


def _matmul(device: torch.device) -> ProductError:
    a, b = _normal(256, 256, seed=1), _normal(256, 256, seed=2)
    out = a.to(device) @ b.to(device)
    return ProductError("matmul", 256, relative_error(out, a.double() @ b.double()))


def _convolution(device: torch.device) -> ProductError:
    x, weight = _normal(2, 32, 16, 16, seed=3), _normal(64, 32, 3, 3, seed=4)
    out = torch.nn.functional.conv2d(x.to(device), weight.to(device))
    exact = torch.nn.functional.conv2d(x.double(), weight.double())
    return ProductError("convolution", 32 * 9, relative_error(out, exact))


def _linear(device: torch.device) -> ProductError:
    x, weight, pulled = _normal(256, 128, seed=5), _normal(192, 128, seed=6), _normal(256, 192, seed=7)
    with torch.enable_grad():
        held = weight.to(device, copy=True).requires_grad_()
        out = torch.nn.functional.linear(x.to(device), held)
        (gradient,) = torch.autograd.grad(out, held, pulled.to(device))
    return ProductError("gradient of a linear layer", 256, relative_error(gradient, pulled.double().T @ x.double()))


def _normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """`|value - exact| / |exact|` in the Euclidean norm, in unit roundoffs of float32; infinite where not finite."""
    distance = float((value.detach().to(exact.device, torch.float64) - exact).norm())
    size = float(exact.norm())
    error = distance / size if size else distance
    return error / UNIT if math.isfinite(error) else math.inf


def allowed_error(terms: int, limits: Limits) -> float:
    """What float32 explains of a product that sums `terms`, in its unit roundoffs.

    Roundings of random sign grow with the square root of their number (Higham, Accuracy and Stability, section 2.8);
    a fast algorithm (Winograd's) has a few times that. TF32 is some 4,000 away, bfloat16 30,000.
    """
    return 2 * limits.precision * math.sqrt(max(terms, 1))


def measure_nondeterminism(step: Callable[[], Any]) -> dict[str, int]:
    """The ops that `torch.use_deterministic_algorithms` would refuse in one step, with how often they were called.

    The step runs in deterministic mode with warnings in place of errors; the mode is restored, Inductor's as well. What
    the step raises is raised.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with deterministic():
            step()
    told = Counter(str(one.message).partition(" does not have a deterministic implementation") for one in caught)
    for one in caught:
        if " deterministic implementation" not in str(one.message):
            with suppress(Warning):  # a filter of the program's that makes errors of warnings
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    found: Counter[str] = Counter()
    for (op, separator, _), count in told.items():
        if separator:
            found[op] += count
    return dict(found)


def check_tf32(stats: ConfounderStats, limits: Limits) -> list[Finding]:
    """Whether a product in float32 is one, by its measured error. The finding names the flag to turn."""
    check = "tf32"
    if not stats.products:
        why = stats.unmeasured or "no product was measured"
        return [Finding(check, Verdict.SKIP, stats.subject, f"the error of float32 could not be measured: {why}")]
    found = []
    for one in stats.products:
        limit = allowed_error(one.terms, limits)
        if one.error <= limit:
            continue
        message = (
            f"a product in float32 on {stats.device} must be off by no more than its roundings, {limit * UNIT:.2g} of "
            f"its norm; the {one.name} is off by {one.error * UNIT:.2g}, {one.error:,.0f} unit roundoffs "
            f"({_like(one.error)}){_told_flags(stats, one.name)}"
        )
        found.append(
            Finding(
                check, Verdict.WARN, stats.subject, message, observed=one.error, limit=limit,
                unit="unit roundoffs of float32", hint=_hint(stats.device, one.name),
            )
        )  # fmt: skip
    if found:
        return found
    errors = ", ".join(f"{one.name} {one.error * UNIT:.2g}" for one in stats.products)
    worst = max(stats.products, key=lambda one: one.error / allowed_error(one.terms, limits))
    text = f"products in float32 on {stats.device} are float32 by their measured errors ({errors}){_elsewhere(stats)}"
    limit = allowed_error(worst.terms, limits)
    unit = "unit roundoffs of float32"
    seen = len(stats.products)
    return [passed(check, stats.subject, text, seen, observed=worst.error, limit=limit, unit=unit)]


def _like(error: float) -> str:
    """Which format an error of this size is usual for, to the nearest power: rounded operands err by about u."""
    known = {"TF32 or float16": 2.0**-11, "bfloat16": 2.0**-8, "three products of bfloat16": 2.0**-17}
    nearest = min(known, key=lambda name: abs(math.log2(max(error, 1e-9) * UNIT / known[name])))
    return f"as of {nearest}"


def _kind(product: str) -> str:
    return product if product in _PROGRAM else "matmul"


def _told_flags(stats: ConfounderStats, product: str) -> str:
    if stats.device.startswith("cuda"):
        names: tuple[str, ...] = _PROGRAM[_kind(product)]
    else:
        names = (f"backends.mkldnn.{'conv' if product == 'convolution' else 'matmul'}.fp32_precision",)
    told = [f"torch.{name} is {stats.flags[name]!r}" for name in names if stats.flags.get(name) not in (None, _REFUSED)]
    if _kind(product) == "matmul":
        told.append(f"float32_matmul_precision is {stats.flags.get('float32_matmul_precision')!r}")
    return f"; {', '.join(told)}" if told else ""


def _hint(device: str, product: str) -> str:
    if device.startswith("cuda") and _kind(product) == "convolution":
        return "torch.backends.cudnn.allow_tf32 = False, or torch.backends.cudnn.conv.fp32_precision = 'ieee' (2.9)"
    if device.startswith("cuda"):
        return "torch.set_float32_matmul_precision('highest') (torch.backends.cuda.matmul.allow_tf32 = False)"
    if _kind(product) == "convolution":
        return "torch.backends.mkldnn.conv.fp32_precision = 'ieee'"
    return "torch.set_float32_matmul_precision('highest')"


def _elsewhere(stats: ConfounderStats) -> str:
    """What the flags would do on an NVIDIA GPU (Ampere and later), where this is none or an older one."""
    lowered = []
    for product, names in _PROGRAM.items():
        value = _in_force(stats.flags, names)
        if value in ("tf32", True):
            lowered.append(f"a {product}")
    if not lowered:
        return ""
    return f"; by the flags as they are, {' and '.join(lowered)} in float32 would run in TF32 on an Ampere GPU or later"


def _in_force(flags: Mapping[str, Scalar], names: tuple[str, ...]) -> Scalar:
    """The first of the flags that decides; `none` leaves it to the setting for all backends."""
    values = (flags.get(name) for name in (*names, "backends.fp32_precision"))
    return next((value for value in values if value not in (None, _REFUSED, "none")), None)


def confounders_table(stats: ConfounderStats) -> Table:
    """Flags and measurements, one a row."""
    rows: list[tuple[Scalar, ...]] = [(name, value) for name, value in stats.flags.items()]
    rows.append(("subnormals flushed to zero on the CPU (this thread)", stats.flushes))
    rows += [(f"error of float32, {one.name}", one.error * UNIT) for one in stats.products]
    if stats.nondeterministic is not None:
        rows.append(("ops without a deterministic kernel in a step", len(stats.nondeterministic)))
        rows += [(f"  {op}", f"{count}x") for op, count in stats.nondeterministic.items()]
    note = "errors are relative, against float64; float32 rounds to 6.0e-08, TF32 to 4.9e-04"
    return Table(f"What float32 means here: {stats.device}", ("setting", "value"), rows, "tf32", note)
