"""How the sums of this machine's 16-bit kernels are kept: what an emulated device can show, and what it cannot.

    python benchmarks/accumulation.py --json reports/evidence/accumulation_cpu.json

Under emulation the dtypes are the device's and the kernels the CPU's. For products of random matrices of growing inner
length n the table gives the relative error (Euclidean norm, against float64) of the installed kernel, of a sum in
float32 that is rounded once, and of a sum that is rounded to 16 bits at every step. `passes over` says whether a sum
whose parts exceed 65504 and whose result is 0 stays finite. On a GPU run it with `--device cuda`; there
`torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` lets split sums be added in 16 bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence

LENGTHS = (16, 64, 256, 1024, 4096, 16384)
ROWS = 32


def products(device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        a = torch.randn(ROWS, length, generator=generator).to(device, dtype)
        b = torch.randn(length, ROWS, generator=generator).to(device, dtype)
        exact = a.double() @ b.double()
        found: dict[str, Any] = {"op": "mm", "dtype": _name(dtype), "n": length}
        found["kernel"] = _error(a @ b, exact)
        found["float32, rounded once"] = _error((a.float() @ b.float()).to(dtype), exact)
        found["rounded at every step"] = _error(_step_by_step(a, b), exact)
        yield found


def reductions(device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda x: x.sum(-1),
        "cumsum": lambda x: x.cumsum(-1)[:, -1],
        "mean": lambda x: x.mean(-1),
    }
    for name, call in calls.items():
        for length in LENGTHS[2:]:
            x = torch.rand(ROWS, length, generator=torch.Generator().manual_seed(length)).to(device, dtype)
            exact = call(x.double())
            wide = call(x.float()).to(dtype)
            found = {"op": name, "dtype": _name(dtype), "n": length, "kernel": _error(call(x), exact)}
            yield {**found, "float32, rounded once": _error(wide, exact), "rounded at every step": ""}


def passes_over(device: str) -> Iterator[dict[str, Any]]:
    """Sums of 16 times 60000 and 16 times -60000 in float16."""
    half = torch.full((16,), 60000.0, dtype=torch.float16, device=device)
    x = torch.cat([half, -half])
    ones = torch.ones(32, 1, dtype=torch.float16, device=device)
    for name, result in (("mm", x[None] @ ones), ("sum", x.sum()), ("cumsum", x.cumsum(0)[-1]), ("mean", x.mean())):
        yield {"op": name, "passes over": "finite" if bool(result.isfinite().all()) else "overflows"}


def _step_by_step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k : k + 1]
    return total


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(f"{float((found.double() - exact).norm() / exact.norm()):.2e}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [
        row
        for dtype in (torch.float16, torch.bfloat16)
        for part in (products, reductions)
        for row in part(options.device, dtype)
    ]
    over = list(passes_over(options.device))
    lines = []
    for table in (rows, over):
        lines += [*markdown_table(table), ""]
    print("\n".join(lines))
    if options.json:
        write_evidence(options.json, {"relative error": rows, "passes over": over}, lines, device=options.device)


if __name__ == "__main__":
    main()
