"""PyTorch's own gate for compiled code against the comparison of ampcheck, with faults planted in compiled graphs.

    python benchmarks/parity_gate.py ../shared/zoo --models 60 --minutes 15 --json reports/evidence/parity_gate.json

Each model is cast to bfloat16, compiled once by a backend that runs its graphs as they are, and called without
gradients. While a graph runs, a dispatch mode plants a fault in one op of a kind, the middle one, or replaces ops by
honest ones (another order, sums in float32, other kernels). What comes out is judged by

- gate: `torch._dynamo.utils.same(eager, compiled, float64, tol=torch._dynamo.config.repro_tolerance)`, which PyTorch's
  minifier and benchmarks call: close within 1e-3, or an RMSE against float64 of at most 3 times that of eager mode;
- cosine: the same with `cos_similarity=True`, which many of its benchmarks use;
- bound: results against the exact companions of eager mode, under their bounds;
- ampcheck: that, and the same code compiled in float64 against eager mode in float64, as `assert_parity(model,
  compiled)` judges compiled code; the shadow runs once for all variants of a model.

A variant without its op, or that changes no bit of a result, is left out; so is a fault that changes nothing in float64
(a bias before a softmax, an element that is masked), except that of the precision, whose sums are in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from _evidence import markdown_table, write_evidence
from shadow_identity import MODELS
from torch._dynamo.utils import same
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.subject import load_collection
from ampcheck.parity.execution import Execution, Side, execute, run_plainly
from ampcheck.parity.lifted import compiled_apart
from ampcheck.shadow.compare import compare_results
from ampcheck.tools.sweep.listing import ZOO

TOLERANCE = torch._dynamo.config.repro_tolerance
LINEAR = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::linear")
NORMS = (
    "aten::native_layer_norm",
    "aten::native_batch_norm",
    "aten::native_group_norm",
    "aten::_native_batch_norm_legit_no_training",
)
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What takes the place of an op: of the op and its arguments."""


def scaled(factor: float) -> Run:
    return lambda op, args, kwargs: op(*args, **kwargs) * factor


def wrong_element(op: Any, args: Any, kwargs: Any) -> Any:
    """The middle element of the result times 1.5."""
    out = op(*args, **kwargs).clone()
    out.view(-1)[out.numel() // 2] *= 1.5
    return out


def stale_tail(op: Any, args: Any, kwargs: Any) -> Any:
    """The last row of the result is that before it."""
    out = op(*args, **kwargs).clone()
    rows = out.view(-1, out.shape[-1])
    rows[-1] = rows[-2 if len(rows) > 1 else -1]
    return out


def without_bias(op: Any, args: Any, kwargs: Any) -> Any:
    if op.name().startswith("aten::addmm"):
        return torch.mm(args[1], args[2])
    return op(args[0], args[1], None, *args[3:], **kwargs)


def larger_eps(op: Any, args: Any, kwargs: Any) -> Any:
    """Eps, the last floating argument below 1e-2, times 1,000."""
    place = max(i for i, value in enumerate(args) if is_eps(value))
    return op(*args[:place], args[place] * 1e3, *args[place + 1 :], **kwargs)


def is_eps(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1e-2


def exchanged(op: Any, args: Any, kwargs: Any) -> Any:
    """The operands of a subtraction exchanged, or the parts of a concatenation."""
    if op.name().startswith("aten::cat"):
        return op(list(args[0])[::-1], *args[1:], **kwargs)
    return op(args[1], args[0], *args[2:], **kwargs)


def other_gelu(op: Any, args: Any, kwargs: Any) -> Any:
    return op(args[0], approximate="none" if kwargs.get("approximate") == "tanh" else "tanh")


def warmer(op: Any, args: Any, kwargs: Any) -> Any:
    """A softmax at a temperature of 1 / 1.02."""
    return op(args[0] * 1.02, *args[1:], **kwargs)


def narrow_sum(op: Any, args: Any, kwargs: Any) -> Any:
    """A product whose sum is kept in bfloat16, term by term."""
    a, b = args[-2:]
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for i in range(a.shape[-1]):
        total = total + a[..., i : i + 1] * b[..., i : i + 1, :]
    return total if len(args) == 2 else total + args[0]


def in_float32(op: Any, args: Any, kwargs: Any) -> Any:
    """The same op in float32, rounded once."""
    if not any(map(is_low, pytree.tree_leaves((args, kwargs)))):
        return op(*args, **kwargs)
    wide = pytree.tree_map(lambda v: v.float() if is_low(v) else v, (args, kwargs))
    out = op(*wide[0], **wide[1])
    return pytree.tree_map(lambda t: t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, out)


def is_low(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16


def in_two_parts(op: Any, args: Any, kwargs: Any) -> Any:
    """A product whose sum is made of two, each rounded to bfloat16."""
    a, b = args[-2:]
    half = a.shape[-1] // 2
    if not half:
        return op(*args, **kwargs)
    total = a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]
    return total if len(args) == 2 else total + args[0]


def in_reverse(op: Any, args: Any, kwargs: Any) -> Any:
    """A product whose terms are added in reverse order."""
    a, b = args[-2:]
    return op(*args[:-2], a.flip(-1), b.flip(-2), **kwargs)


def has_bias(name: str, args: tuple[Any, ...]) -> bool:
    return name.startswith("aten::addmm") or (len(args) > 2 and isinstance(args[2], torch.Tensor))


def with_eps(name: str, args: tuple[Any, ...]) -> bool:
    return any(map(is_eps, args))


def any_args(name: str, args: tuple[Any, ...]) -> bool:
    return True


PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
Plant = tuple[tuple[str, ...], Callable[[str, tuple[Any, ...]], bool], Run, bool]
"""Names of ops, which calls of them, what takes their place, in all of them and not only in the middle one."""

NARROW = "all products summed in bfloat16"
HONEST: dict[str, Plant] = {
    "as it is": ((), any_args, in_float32, True),
    "products in float32, rounded once": (PRODUCTS, any_args, in_float32, True),
    "products summed in reverse": (PRODUCTS, any_args, in_reverse, True),
    "products in two parts": (PRODUCTS, any_args, in_two_parts, True),
    "pointwise ops and norms in float32": (
        ("aten::silu", "aten::gelu", "aten::_softmax", "aten::mul.Tensor", "aten::add.Tensor", *NORMS),
        any_args,
        in_float32,
        True,
    ),
}
FAULTS: dict[str, Plant] = {
    "factor of 1.003 on one product": (LINEAR, any_args, scaled(1.003), False),
    "factor of 1.02 on one product": (LINEAR, any_args, scaled(1.02), False),
    "one element of a product times 1.5": (LINEAR, any_args, wrong_element, False),
    "last row of a product not written": (LINEAR, any_args, stale_tail, False),
    "one bias left out": (("aten::addmm", "aten::convolution"), has_bias, without_bias, False),
    "eps of one norm times 1,000": ((*NORMS, "aten::add.Tensor", "aten::add.Scalar"), with_eps, larger_eps, False),
    "operands exchanged": (("aten::sub.Tensor", "aten::cat"), any_args, exchanged, False),
    "the other gelu": (("aten::gelu",), any_args, other_gelu, True),
    "softmax at another temperature": (("aten::_softmax",), any_args, warmer, False),
    NARROW: (PRODUCTS, any_args, narrow_sum, True),
}


class Planted(TorchDispatchMode):
    """Replaces chosen ops while graphs run. seen: calls of the kind; count: of these, in one call of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.plant: Plant | None = None
        self.at: int | None = None
        self.seen, self.count = 0, 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.plant is None:
            return func(*args, **kwargs)
        names, chooses, run, every = self.plant
        name = func.name()
        if not (name in names or name.partition(".")[0] in names) or not chooses(name, args):
            return func(*args, **kwargs)
        self.seen += 1
        if every or self.at == (self.seen - 1) % self.count:
            return run(func, args, kwargs)
        return func(*args, **kwargs)


MODE = Planted()


def as_it_is(graph: Any, inputs: Any) -> Any:
    """A backend whose graphs run under the mode that plants."""

    def run(*args: Any) -> Any:
        with MODE:
            return graph(*args)

    return run


def results_with(side: Side, plant: Plant | None) -> dict[Any, torch.Tensor] | None:
    """The results of compiled code with a plant; None where it has no such op."""
    MODE.plant, MODE.at, MODE.seen = plant, None, 0
    every = plant is None or plant[3]
    values = run_plainly(side).values
    if plant is not None and plant[0] and not MODE.seen:
        MODE.plant = None
        return None
    if not every:
        MODE.at, MODE.seen, MODE.count = MODE.seen // 2, 0, MODE.seen
        values = run_plainly(side).values
    return dict(values)


def gates(
    eager: dict[Any, torch.Tensor], compiled: dict[Any, torch.Tensor], wide: dict[Any, torch.Tensor]
) -> dict[str, bool]:
    """Whether PyTorch's gate passes, by RMSE and by cosine."""
    keys = [key for key, value in eager.items() if value.is_floating_point()]
    lists = [[side[key] for key in keys] for side in (eager, compiled, wide)]
    how: dict[str, Any] = {"tol": TOLERANCE, "equal_nan": True, "log_error": lambda *_: None}
    return {"gate": same(*lists, **how), "cosine": same(*lists, cos_similarity=True, **how)}


def judged(run: Execution, side: Side, values: dict[Any, torch.Tensor]) -> dict[str, Any]:
    """Whether ampcheck passes compiled results, by their bound alone, and with compiled code in float64."""
    within = not any(error.at_fault for error in compare_results(run.results, values, run.freedom))
    apart, reason = compiled_apart(side, run.results)
    MODE.plant = None
    return {"bound": within, "ampcheck": within and not apart, "not in float64": reason}


def rows_of(name: str, build: Callable[[], Any]) -> list[dict[str, Any]]:
    """The rows of a model. Raises where it does not run in bfloat16 or does not compile."""
    model, args, kwargs = build()
    double, wide_args = copy.deepcopy(model).double(), cast((args, kwargs), torch.float64)
    model, (args, kwargs) = model.to(torch.bfloat16), cast((args, kwargs), torch.bfloat16)
    side = Side("a", model, tuple(args), kwargs, backward=False)
    eager = dict(run_plainly(side).values)
    double_side = Side("a", double, tuple(wide_args[0]), wide_args[1], backward=False)
    wide = dict(run_plainly(double_side).values)
    if wide.keys() != eager.keys():
        raise RuntimeError("float64 gives other results")
    torch._dynamo.reset()
    compiled = Side("b", torch.compile(model, backend=as_it_is, dynamic=False), tuple(args), kwargs, backward=False)
    plain = results_with(compiled, None) or {}
    if plain.keys() != eager.keys() or not all(same_bits(plain[key], eager[key]) for key in eager):
        raise RuntimeError("compiled without a plant, it gives other bits")
    begun = time.perf_counter()
    run = execute(side)
    shadow = time.perf_counter() - begun
    rows = []
    for kind, plants in (("honest", HONEST), ("fault", FAULTS)):
        for title, plant in plants.items():
            try:
                values = results_with(compiled, plant)
            except Exception:  # noqa: BLE001  # an op whose arguments the plant does not fit
                values, MODE.plant = None, None
            if values is None or (plant[0] and all(same_bits(values[key], eager[key]) for key in eager)):
                MODE.plant = None
                continue
            if kind == "fault" and title != NARROW and not changes(double_side, wide):
                MODE.plant = None
                continue
            row = {"model": name, "kind": kind, "variant": title, **gates(eager, values, wide)}
            rows.append(row | judged(run, compiled, values) | {"shadow": round(shadow, 2)})
    return rows


def changes(side: Side, wide: dict[Any, torch.Tensor]) -> bool:
    """Whether the plant changes a result of a model in float64."""
    with MODE:
        values = run_plainly(side).values
    return any(not torch.allclose(values[key], wide[key], 1e-9, 1e-12, equal_nan=True) for key in wide)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in a dtype."""
    return pytree.tree_map(lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v, value)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def counts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By variant: false alarms or misses of each judge."""
    lines = []
    for title in (*HONEST, *FAULTS):
        chosen = [row for row in rows if row["variant"] == title]
        wrong = {j: sum(row[j] is (row["kind"] == "fault") for row in chosen) for j in JUDGES}
        what = "false alarms" if title in HONEST else "misses"
        lines.append({"variant": title, "models": len(chosen), "of them": what, **wrong})
    return lines


JUDGES = ("gate", "cosine", "bound", "ampcheck")


def main() -> None:
    """Judge the variants of models, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true", help="keep the models that the evidence has already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    zoo = load_collection(str(options.zoo / ZOO))
    order = [name for name in (*MODELS, *(n for n in zoo if n not in MODELS)) if options.only in name]
    kept = json.loads(options.json.read_text()) if options.resume and options.json.is_file() else {}
    rows: list[dict[str, Any]] = kept.get("rows", [])
    ran: list[str] = kept.get("models", [])
    left: dict[str, str] = kept.get("left out", {})
    begun = time.monotonic()
    for name in order:
        if len(ran) >= options.models or time.monotonic() - begun > 60 * options.minutes:
            break
        if name in ran or name in left:
            continue
        try:
            found = rows_of(name, zoo[name])
        except Exception as error:  # noqa: BLE001  # not installed, not in bfloat16, not compiled
            left[name] = f"{type(error).__name__}: {error}"[:160]
            print("left", name, left[name], flush=True)
            continue
        finally:
            torch.set_default_dtype(torch.float32)
            gc.collect()
        rows, ran = rows + found, [*ran, name]
        wrong = [(r["variant"], j) for r in found for j in JUDGES if r[j] is (r["kind"] == "fault")]
        print(name, len(found), "variants;", "; ".join(f"{j}: {v}" for v, j in wrong if j == "ampcheck"), flush=True)
    lines = counts(rows)
    totals = {
        kind: {j: sum(line[j] for line in lines if line["of them"] == kind) for j in JUDGES}
        | {"variants": sum(line["models"] for line in lines if line["of them"] == kind)}
        for kind in ("false alarms", "misses")
    }
    print(json.dumps(totals, indent=1))
    data = {"tolerance of the gate": TOLERANCE, "models": ran, "left out": left, "totals": totals, "counts": lines}
    table = [f"{len(ran)} models in bfloat16, {len(left)} left out.", "", *markdown_table(lines), ""]
    table += markdown_table([{"": kind, **total} for kind, total in totals.items()])
    write_evidence(options.json, data | {"rows": rows}, table, a_line_each="rows")


if __name__ == "__main__":
    main()
