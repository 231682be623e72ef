"""What differs without any change: products that are called float32, the order of sums, seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampcheck.core.errors import brief
from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.limits import Limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table
from ampcheck.lab.expectations import Expectations
from ampcheck.lab.loops import AMP_BFLOAT16, FLOAT32, Loop, Mode
from ampcheck.lab.registry import check_of
from ampcheck.training.stagnation.shadows import spacing
from ampcheck.training.tf32.settings import (
    ConfounderStats,
    check_tf32,
    confounders_table,
    measure_confounders,
)

CHECK = check_of("confounders")

SIZE = 256
"""Rows and columns of the product."""

SETTINGS: Mapping[str, str] = {"highest": "float32", "high": "tf32", "medium": "bfloat16"}
"""`torch.set_float32_matmul_precision`, and the narrowest format that its operands may be rounded to (PyTorch's
documentation)."""

OPERANDS = ("tf32", "bfloat16", "float16")
STEPS, FULL_STEPS = 12, 60
_FLOOR = 2.0**-26


@dataclass(frozen=True, slots=True)
class ProductStats:
    """A product of normal numbers. setting: of PyTorch, or the format that its operands were rounded to. norm: its
    relative error against float64, Euclidean. worst: the largest error of an element over that of |A| |B|. bound: on
    the latter."""

    setting: str
    norm: float
    worst: float
    bound: float


@dataclass(frozen=True, slots=True)
class SpreadStats:
    """A short training run beside the first one. same: whether the losses are equal bit for bit. losses: of each
    step."""

    name: str
    losses: tuple[float, ...]
    same: bool
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class LabConfounders:
    """device: where. flags: settings and the products that ampcheck itself judges. products: as PyTorch computes them
    under each setting; rounded: as they would be with rounded operands; spread: runs, the first is the reference."""

    device: str
    flags: ConfounderStats
    products: tuple[ProductStats, ...]
    rounded: tuple[ProductStats, ...]
    spread: tuple[SpreadStats, ...]
    untold: tuple[str, ...] = ()


def measure_lab_confounders(device: str = "cpu", *, steps: int = STEPS, progress: Progress = silent) -> LabConfounders:
    """Measure products under each setting, which are put back, and train the demo several times."""
    progress("products", 0, 8)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float32) for _ in range(2))
    products, untold = [], []
    for setting, name in SETTINGS.items():
        try:
            with _matmul_precision(setting):
                out = (a.to(device) @ b.to(device)).cpu()
        except RuntimeError as error:  # a program that set `fp32_precision` may not use the older setting
            untold.append(f"matmul precision {setting!r}: {brief(error)}")
            continue
        products.append(product_stats(setting, a, b, out.double(), format_of(name)))
    rounded = []
    for name in OPERANDS:
        out = rounded_to(a, format_of(name)) @ rounded_to(b, format_of(name))
        rounded.append(product_stats(f"{name} operands", a, b, out, format_of(name)))
    spread = tuple(_spread(device, steps, progress))
    return LabConfounders(device, measure_confounders(device), tuple(products), tuple(rounded), spread, tuple(untold))


@contextmanager
def _matmul_precision(setting: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    # Newer PyTorch keeps a setting for each backend, and setting the common one writes all of them.
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    own = [(one, one.fp32_precision) for one in backends if hasattr(one, "fp32_precision")]
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, precision in own:
            backend.fp32_precision = precision


def rounded_to(values: Tensor, form: FloatFormat) -> Tensor:
    """float64, each value rounded to the nearest of a format, ties to even. Within the format's range."""
    wide = values.double()
    step = spacing(wide, form)
    return (wide / step).round() * step


def product_stats(setting: str, a: Tensor, b: Tensor, out: Tensor, form: FloatFormat) -> ProductStats:
    """Hold `out`, float64 [n, m], against the product of `a` and `b` in float64.

    The bound is Higham's (Accuracy and Stability of Numerical Algorithms, section 3.5): rounding each operand by u and
    summing k terms in float32 moves an element by at most ((1 + u)^2 (1 + gamma_k) - 1) (|A| |B|), with
    gamma_k = k u32 / (1 - k u32). Tensor cores may cut TF32 off instead, which errs by up to 2u; on this product of
    random signs that comes to a third of the bound.
    """
    exact = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    unit = format_of("float32").unit_roundoff
    gamma = a.shape[1] * unit / (1 - a.shape[1] * unit)
    u = form.unit_roundoff if form.name != "float32" else 0.0  # operands are float32 already
    bound = (1 + u) ** 2 * (1 + gamma) - 1
    off = (out - exact).abs()
    return ProductStats(setting, float((out - exact).norm() / exact.norm()), float((off / size).max()), bound)


def _spread(device: str, steps: int, progress: Progress) -> Iterator[SpreadStats]:
    threads, on_cpu = torch.get_num_threads(), torch.device(device).type == "cpu"
    plans: list[tuple[str, Mode, int, int, bool]] = [
        ("the first run", FLOAT32, 0, threads, True),
        ("again, all equal", FLOAT32, 0, threads, True),
        ("once more, all equal", FLOAT32, 0, threads, True),
        # Never more threads than the program has: on a busy machine they wait for each other.
        # The threads of an accelerator are not set here.
        *([(f"one thread instead of {threads}", FLOAT32, 0, 1, False)] if threads > 1 and on_cpu else []),
        ("autocast to bfloat16", AMP_BFLOAT16, 0, threads, False),
        ("another seed", FLOAT32, 1, threads, False),
    ]
    first: tuple[float, ...] = ()
    for number, (name, mode, seed, count, repeated) in enumerate(plans):
        progress(f"training, {name}", 1 + number, 2 + len(plans))
        torch.set_num_threads(count)
        try:
            loop = Loop(mode, device=device, seed=seed, width=64)
            losses = tuple(loop.step(step).loss for step in range(steps))
        finally:
            torch.set_num_threads(threads)
        first = first or losses
        yield SpreadStats(name, losses, losses == first, repeated)


def check_lab_confounders(stats: LabConfounders) -> list[Finding]:
    """float32 is float32; each setting keeps its bound; equal runs are equal."""
    lab = Expectations(CHECK, stats.device)
    settings = check_tf32(stats.flags, Limits())
    lab.findings += [replace(finding, check=CHECK.slug, subject=stats.device) for finding in settings]
    for product in (*stats.products, *stats.rounded):
        what = f"matmul precision {product.setting!r}" if product.setting in SETTINGS else product.setting
        expected = f"{what}: each element of a product of {SIZE} terms within {product.bound:.2g} of |A| |B|"
        found = f"at most {product.worst:.2g}"
        right = product.worst <= product.bound
        worst, bound = product.worst, product.bound
        lab.expect(expected, found, right, seen=SIZE * SIZE, observed=worst, limit=bound)
    repeated = [one for one in stats.spread[1:] if one.repeated]
    if repeated:
        same = sum(one.same for one in repeated)
        expected = "a run repeated with the same seed, data, threads and settings gives the same losses, bit for bit"
        far = max(_distance(one, stats.spread[0]) for one in repeated)
        found = f"{same} of {len(repeated)} repetitions do" + (f"; the others are up to {far:.2g} off" if far else "")
        lab.expect(
            expected,
            found,
            same == len(repeated),
            seen=len(repeated),
            warns=True,
            hint="torch.use_deterministic_algorithms(True) names the ops; until then smaller differences mean nothing",
        )
    for why in stats.untold:
        lab.skip(why)
    return lab.findings


def _distance(one: SpreadStats, other: SpreadStats) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of settings, products and runs, and a chart of how runs part."""
    stats = measure_lab_confounders(device, steps=FULL_STEPS if full else STEPS, progress=progress)
    return Run(
        findings=tuple(check_lab_confounders(stats)),
        coverage=Coverage(
            {"products": len(stats.products) + len(stats.rounded), "short training runs": len(stats.spread)},
            dict.fromkeys(stats.untold, 1),
        ),
        tables=(_products(stats), _runs(stats), replace(confounders_table(stats.flags), check=CHECK.slug)),
        charts=(spread_chart(stats),),
    )


def _products(stats: LabConfounders) -> Table:
    unit = format_of("float32").unit_roundoff
    rows: list[tuple[Scalar, ...]] = [
        (
            f"precision {one.setting!r}" if one.setting in SETTINGS else one.setting,
            f"{one.norm:.2g}",
            f"{one.norm / unit:,.3g}",
            f"{one.worst:.2g}",
            f"{one.bound:.2g}",
        )
        for one in (*stats.products, *stats.rounded)
    ]
    return Table(
        f"A float32 product of {SIZE} by {SIZE} normal numbers on {stats.device}",
        ("how", "relative error", "in roundoffs of float32", "worst of |A| |B|", "bound"),
        rows,
        check=CHECK.slug,
        note="precision: torch.set_float32_matmul_precision, as this device heeds it. operands: rounded to the format "
        "and multiplied in float64, which is what hardware that has it would do at best.",
    )


def _runs(stats: LabConfounders) -> Table:
    first = stats.spread[0]
    rows: list[tuple[Scalar, ...]] = [
        (one.name, f"{one.losses[-1]:.7g}", one.same, f"{_distance(one, first):.2g}" if one is not first else None)
        for one in stats.spread
    ]
    return Table(
        f"The same {len(first.losses)} training steps, again",
        ("run", "last loss", "bit for bit the first", "largest difference"),
        rows,
        check=CHECK.slug,
        note="Of the losses, in nats. A difference between two runs that is smaller than what threads or a repetition "
        "make says nothing.",
    )


def spread_chart(stats: LabConfounders) -> Chart:
    """How far each run's loss is from that of the first, over the steps."""
    first, *others = stats.spread
    steps = [float(step) for step in range(len(first.losses))]
    series = [
        Series(one.name, steps, [max(abs(a - b), _FLOOR) for a, b in zip(one.losses, first.losses, strict=True)])
        for one in others
        if all(map(math.isfinite, one.losses))
    ]
    return Chart(
        "line",
        "How far runs part",
        "step",
        "difference of the losses to the first run, nats",
        series=series,
        check=CHECK.slug,
        note=f"No difference at all is drawn at {_FLOOR:.2g}.",
        y_scale="log",
    )
