"""Differences without any change: products that are called float32, the order of sums, seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ampcheck.checks import findings
from ampcheck.core.errors import brief
from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.limits import Limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Finding, Run, Scalar, Series, Table
from ampcheck.records.tf32 import ConfounderStats
from ampcheck.tools.lab.lab import Expectations, run_of
from ampcheck.tools.lab.loops import AMP_BFLOAT16, FLOAT32, Loop
from ampcheck.torchtools.global_state import read_state, restore_state
from ampcheck.torchtools.spacing import spacing
from ampcheck.training.tf32.settings import confounders_table, measure_confounders

SIZE = 256
"""Rows and columns of the product."""

SETTINGS: Mapping[str, str] = {"highest": "float32", "high": "tf32", "medium": "bfloat16"}
"""`torch.set_float32_matmul_precision`, and the narrowest format that its operands may be rounded to (PyTorch's
documentation)."""

OPERANDS = ("tf32", "bfloat16", "float16")
STEPS, FULL_STEPS = 12, 60
_FLOOR = 2.0**-26
_UNIT = format_of("float32").unit_roundoff


@dataclass(frozen=True, slots=True)
class ProductStats:
    """A product of normal numbers. setting: of PyTorch, or the format that its operands were rounded to. norm: its
    relative error against float64, Euclidean. worst: the largest error of an element over that of |A| |B|; bound: its
    limit."""

    setting: str
    norm: float
    worst: float
    bound: float

    @property
    def name(self) -> str:
        """Such as `precision 'high'`."""
        return f"precision {self.setting!r}" if self.setting in SETTINGS else self.setting


@dataclass(frozen=True, slots=True)
class SpreadStats:
    """The losses of a short training run. repeated: whether it should equal the first run."""

    name: str
    losses: tuple[float, ...]
    repeated: bool = False

    def distances(self, other: SpreadStats) -> list[float]:
        """The difference of the losses at each step."""
        return [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]


@dataclass(frozen=True, slots=True)
class LabConfounders:
    """flags: settings and products that ampcheck itself judges. products: as PyTorch computes them under each setting,
    then with rounded operands; spread: runs, the first is the reference; lacking: settings that PyTorch refuses."""

    device: str
    flags: ConfounderStats
    products: tuple[ProductStats, ...]
    spread: tuple[SpreadStats, ...]
    lacking: tuple[str, ...] = ()


def measure_lab_confounders(device: str = "cpu", *, steps: int = STEPS, progress: Progress = silent) -> LabConfounders:
    """Measure products under each setting, restore the settings, and train the demo several times."""
    progress("products", 0, 8)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float32) for _ in range(2))
    products, lacking = [], []
    for setting, name in SETTINGS.items():
        before = read_state()
        try:
            torch.set_float32_matmul_precision(setting)
            out = (a.to(device) @ b.to(device)).cpu()
        except RuntimeError as error:  # a program that set `fp32_precision` may not use the older setting
            lacking.append(f"matmul precision {setting!r}: {brief(error)}")
            continue
        finally:
            restore_state(before)
        products.append(product_stats(setting, a, b, out.double(), format_of(name)))
    for name in OPERANDS:
        form = format_of(name)
        out = rounded_to(a, form) @ rounded_to(b, form)
        products.append(product_stats(f"{name} operands", a, b, out, form))
    spread = tuple(_spread(device, steps, progress))
    return LabConfounders(device, measure_confounders(device), tuple(products), spread, tuple(lacking))


def rounded_to(values: Tensor, form: FloatFormat) -> Tensor:
    """float64, each value rounded to the nearest of a format, ties to even. Within the format's range."""
    wide = values.double()
    step = spacing(wide, form)
    return (wide / step).round() * step


def product_stats(setting: str, a: Tensor, b: Tensor, out: Tensor, form: FloatFormat) -> ProductStats:
    """Compare `out`, float64 [n, m], with the product of `a` and `b` in float64.

    The bound is Higham's (Accuracy and Stability of Numerical Algorithms, section 3.5): rounding each operand by u and
    summing k terms in float32 moves an element by at most ((1 + u)^2 (1 + gamma_k) - 1) (|A| |B|), with
    gamma_k = k u32 / (1 - k u32). Tensor cores may truncate to TF32 instead, which errs by up to 2u; on this product of
    random signs that comes to a third of the bound.
    """
    exact = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    gamma = a.shape[1] * _UNIT / (1 - a.shape[1] * _UNIT)
    u = form.unit_roundoff if form.name != "float32" else 0.0  # operands are float32 already
    error = out - exact
    norm, worst = float(error.norm() / exact.norm()), float((error.abs() / size).max())
    return ProductStats(setting, norm, worst, (1 + u) ** 2 * (1 + gamma) - 1)


def _spread(device: str, steps: int, progress: Progress) -> Iterator[SpreadStats]:
    threads, on_cpu = torch.get_num_threads(), torch.device(device).type == "cpu"
    plans = [
        ("the first run", FLOAT32, 0, threads, True),
        ("again, all equal", FLOAT32, 0, threads, True),
        ("once more, all equal", FLOAT32, 0, threads, True),
        # Never more threads than the program has: on a busy machine they wait for each other.
        # The threads of an accelerator are not set here.
        *([(f"one thread instead of {threads}", FLOAT32, 0, 1, False)] if threads > 1 and on_cpu else []),
        ("autocast to bfloat16", AMP_BFLOAT16, 0, threads, False),
        ("another seed", FLOAT32, 1, threads, False),
    ]
    for number, (name, mode, seed, count, repeated) in enumerate(plans):
        progress(f"training, {name}", 1 + number, 2 + len(plans))
        torch.set_num_threads(count)
        try:
            loop = Loop(mode, device=device, seed=seed, width=64)
            yield SpreadStats(name, tuple(loop.step(step).loss for step in range(steps)), repeated)
        finally:
            torch.set_num_threads(threads)


def check_lab_confounders(stats: LabConfounders) -> list[Finding]:
    """float32 is float32; each setting stays within its bound; equal runs are equal."""
    lab = Expectations("confounders", stats.device)
    lab.adopt(findings(stats.flags, Limits()))
    for product in stats.products:
        name = f"matmul {product.name}" if product.setting in SETTINGS else product.name
        expected = f"{name}: each element of a product of {SIZE} terms within {product.bound:.2g} of |A| |B|"
        lab.at_most(expected, product.worst, product.bound, seen=SIZE * SIZE)
    first, *others = stats.spread
    if repeated := [spread for spread in others if spread.repeated]:
        same = sum(spread.losses == first.losses for spread in repeated)
        far = max(max(spread.distances(first)) for spread in repeated)
        expected = "a run repeated with the same seed, data, threads and settings gives the same losses, bit for bit"
        outcome = f"{same} of {len(repeated)} repetitions do"
        outcome += f"; the others are up to {far:.2g} off" if far else ""
        hint = "torch.use_deterministic_algorithms(True) names the ops; until then smaller differences mean nothing"
        lab.expect(expected, outcome, same == len(repeated), seen=len(repeated), warns=True, hint=hint)
    lab.skip(*stats.lacking)
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of settings, products and runs, and a chart of how runs diverge."""
    stats = measure_lab_confounders(device, steps=FULL_STEPS if full else STEPS, progress=progress)
    seen = {"products": len(stats.products), "short training runs": len(stats.spread)}
    charts = [spread_chart(stats)]
    return run_of(check_lab_confounders(stats), seen, tables=_tables(stats), charts=charts)


def _tables(stats: LabConfounders) -> tuple[Table, ...]:
    rows = []
    for product in stats.products:
        norm, worst, bound = (f"{value:.2g}" for value in (product.norm, product.worst, product.bound))
        rows.append((product.name, norm, f"{product.norm / _UNIT:,.3g}", worst, bound))
    columns = ("how", "relative error", "in roundoffs of float32", "worst of |A| |B|", "bound")
    note = (
        "precision: torch.set_float32_matmul_precision on this device. operands: rounded to the format and multiplied "
        "in float64, the best that hardware with that format can do."
    )
    title = f"A float32 product of {SIZE} by {SIZE} normal numbers on {stats.device}"
    products = Table(title, columns, rows, note=note)
    first = stats.spread[0]
    runs: list[tuple[Scalar, ...]] = []
    for spread in stats.spread:
        far = f"{max(spread.distances(first)):.2g}" if spread is not first else None
        runs.append((spread.name, f"{spread.losses[-1]:.7g}", spread.losses == first.losses, far))
    run_columns = ("run", "last loss", "bit for bit the first", "largest difference")
    note = (
        "Of the losses, in nats. A difference between two runs that is smaller than that of threads or a repetition "
        "means nothing."
    )
    again = Table(f"The same {len(first.losses)} training steps, again", run_columns, runs, note=note)
    return products, again, confounders_table(stats.flags)


def spread_chart(stats: LabConfounders) -> Chart:
    """Return how far each run's loss is from that of the first, over the steps."""
    first, *others = stats.spread
    steps = [float(step) for step in range(len(first.losses))]
    series = [
        Series(spread.name, steps, [max(distance, _FLOOR) for distance in spread.distances(first)])
        for spread in others
        if all(map(math.isfinite, spread.losses))
    ]
    label, note = "difference of the losses to the first run, nats", f"No difference is drawn at {_FLOOR:.2g}."
    return Chart("line", "How far runs diverge", "step", label, series, note=note, y_scale="log")
